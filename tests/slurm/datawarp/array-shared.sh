#!/bin/sh
# documented: tasks whose directives have no symbols stage the same files in
# ends: COMPLETED
# tasks: 3
# result: shared.1
# result: shared.2
# result: shared.3
# sbatch: --array=1-3
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW stage_in type=file source=@INPUT@/data destination=$DW_JOB_STRIPED/in
cp "$DW_JOB_STRIPED/in" "@RESULTS@/shared.$SLURM_ARRAY_TASK_ID"
