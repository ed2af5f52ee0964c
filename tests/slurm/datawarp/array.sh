#!/bin/sh
# documented: each task of an array has a buffer of its own; %a stands for the task
# ends: COMPLETED
# tasks: 3
# result: task.1
# result: task.2
# result: task.3
# sbatch: --array=1-3
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW stage_in type=file source=@INPUT@/data destination=$DW_JOB_STRIPED/in
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination=@RESULTS@/task.%a
cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out"
