#!/bin/bash
#SBATCH --account=k1234
#SBATCH --partition=workq
#SBATCH -t 10
#SBATCH -N 1 -n 2
#DW jobdw type=scratch access_mode=striped capacity=64MiB
#DW stage_in type=directory source=/scratch/k1234/project/input destination=$DW_JOB_STRIPED/input
#DW stage_out type=file source=$DW_JOB_STRIPED/count.txt destination=/scratch/k1234/project/count.txt

cd "$DW_JOB_STRIPED"
cat input/* | wc -l > count.txt
echo finished
