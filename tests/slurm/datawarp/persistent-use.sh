#!/bin/sh
# documented: persistentdw makes one available to a job
# ends: COMPLETED
# after: persistent-create
#DW persistentdw name=alpha
echo kept > "$DW_PERSISTENT_STRIPED_alpha/file"
