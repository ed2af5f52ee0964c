#!/bin/sh
# documented: %x, %u and %d stand for job name, user and working directory
# ends: COMPLETED
# result: named.@USER@
# sbatch: --job-name=named --chdir=@INPUT@
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW stage_in type=file source=%d/data destination=$DW_JOB_STRIPED/in
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination=@RESULTS@/%x.%u
cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out"
