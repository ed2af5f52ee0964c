#!/bin/sh
# documented: results of a job that fails are staged out, too
# ends: FAILED
# result: failed
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW stage_in type=file source=@INPUT@/data destination=$DW_JOB_STRIPED/in
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination=@RESULTS@/failed
cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out"
exit 7
