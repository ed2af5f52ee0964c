#!/bin/bash
#SBATCH -J omp
#SBATCH -o omp.o%j
#SBATCH -p normal
#SBATCH -N1
#SBATCH -n1
#SBATCH -c16
#SBATCH -t10
#SBATCH -Aproject
##SBATCH --mail-type=all

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
test "$OMP_NUM_THREADS" -eq 16
echo finished
