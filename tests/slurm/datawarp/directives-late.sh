#!/bin/sh
# documented: directives after the first command are comments
# ends: COMPLETED
true
#DW jobdw type=scratch capacity=2MB access_mode=striped
test -z "$DW_JOB_STRIPED" || exit 3
