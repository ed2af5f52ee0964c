#!/bin/sh
# documented: what a job leaves there stays for later ones, beside a buffer of their own
# ends: COMPLETED
# after: persistent-use
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW persistentdw name=alpha
test -d "$DW_JOB_STRIPED" || exit 3
test "$(cat "$DW_PERSISTENT_STRIPED_alpha/file")" = kept || exit 5
