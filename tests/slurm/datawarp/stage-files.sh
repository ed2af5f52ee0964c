#!/bin/sh
# documented: files are staged in before the job runs and out after it
# ends: COMPLETED
# result: staged
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW stage_in type=file source=@INPUT@/data destination=$DW_JOB_STRIPED/in
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination=@RESULTS@/staged
cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out"
