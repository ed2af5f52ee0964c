#!/bin/sh
# documented: type=directory stages trees
# ends: COMPLETED
# result: tree.out/leaf
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW stage_in type=directory source=@INPUT@/tree destination=$DW_JOB_STRIPED/tree
#DW stage_out type=directory source=$DW_JOB_STRIPED/tree destination=@RESULTS@/tree.out
test -f "$DW_JOB_STRIPED/tree/leaf" || exit 3
