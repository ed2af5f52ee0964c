#!/bin/sh
# documented: results of a job that reaches its time limit are staged out, too
# ends: TIMEOUT
# result: limited
# sbatch: --time=1
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW stage_in type=file source=@INPUT@/data destination=$DW_JOB_STRIPED/in
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination=@RESULTS@/limited
cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out"
sleep 600
