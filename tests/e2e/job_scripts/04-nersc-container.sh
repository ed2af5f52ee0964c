#!/bin/bash
#SBATCH --image=docker:library/ubuntu:latest
#SBATCH --module=none
#SBATCH --nodes=1
#SBATCH --qos=regular
#SBATCH --tasks-per-node=2
#SBATCH --constraint=cpu
#SBATCH --time 2:00

# One process for each task, each in the container.
srun -n "$SLURM_NTASKS" shifter sort -rn /global/cfs/cdirs/m1234/numbers.txt | head -1
echo finished
