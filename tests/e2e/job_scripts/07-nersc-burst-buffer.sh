#!/bin/bash
#SBATCH -q premium
#SBATCH -N 1
#SBATCH -C haswell
#SBATCH -t 00:15:00
#DW jobdw capacity=100MB access_mode=striped type=scratch
#DW stage_in source=/global/cfs/cdirs/m1234/numbers.txt destination=$DW_JOB_STRIPED/numbers.txt type=file
#DW stage_out source=$DW_JOB_STRIPED/sorted destination=/global/cfs/cdirs/m1234/sorted type=directory

mkdir "$DW_JOB_STRIPED/sorted"
srun -n 1 sort -n "$DW_JOB_STRIPED/numbers.txt" > "$DW_JOB_STRIPED/sorted/numbers.txt"
echo finished
