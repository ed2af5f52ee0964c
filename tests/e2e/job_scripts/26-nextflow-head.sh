#!/bin/bash
#SBATCH --job-name="[head] rnaseq (run 7)"
#SBATCH --export=NONE
#SBATCH --ntasks=1
#SBATCH --mem=4G --time=2-00:00:00
#SBATCH --output="/scratch/k1234/head %j.log"
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --nice

export NXF_OPTS="-Xms500M -Xmx2G"
mkdir -p /scratch/k1234/work
test "$SLURM_JOB_NAME" = "[head] rnaseq (run 7)"
echo finished
