#!/bin/bash
#SBATCH --job-name=lattice
#SBATCH --export=ALL,OMP_NUM_THREADS=4,RESULTS=/lus/grand/projects/mat/lattice
#SBATCH --cpus-per-task=4
#SBATCH --threads-per-core=1
#SBATCH --time=10
#SBATCH --profile=Task
#SBATCH --wckey=lattice

test "$OMP_NUM_THREADS" = "$SLURM_CPUS_PER_TASK"
mkdir -p "$RESULTS"
aprun -n 1 -N 1 -d "$OMP_NUM_THREADS" -j 1 date > "$RESULTS/when.txt"
echo finished
