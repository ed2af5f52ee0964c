#!/bin/bash
#SBATCH --qos=debug
#SBATCH --nodes=1
#SBATCH --time=5
#SBATCH --constraint=cpu
#SBATCH --array=1-3%2
#SBATCH --output=slurm-%A_%a.out
#SBATCH --license=SCRATCH

part=$((SLURM_ARRAY_TASK_ID * 10))
srun head -n "$part" /global/cfs/cdirs/m1234/numbers.txt | tail -n 1
echo "finished $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID"
