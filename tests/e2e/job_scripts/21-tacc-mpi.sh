#!/bin/bash
#SBATCH -J mpi -o mpi.o%j -e mpi.e%j
#SBATCH -p skx -N 1 -n 4
#SBATCH -t 00:10:00 -A project

cd /scratch1/01234/ada
ibrun sort -n numbers.txt > mpi.sorted
test "$SLURM_TASKS_PER_NODE" = 4
echo finished
