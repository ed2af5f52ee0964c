#!/bin/sh
# documented: directives may stand among those of sbatch
# ends: COMPLETED
#SBATCH --job-name=among
#DW jobdw type=scratch capacity=2MB access_mode=striped
#SBATCH --ntasks=1
#DW stage_in type=file source=@INPUT@/data destination=$DW_JOB_STRIPED/in
#SBATCH --comment=last
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination=@RESULTS@/interspersed
# result: interspersed
cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out"
