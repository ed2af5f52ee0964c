#!/bin/bash
#SBATCH -N 1
#SBATCH -C cpu
#SBATCH -q regular
#SBATCH -J waves
#SBATCH -A m1234
#SBATCH -t 00:10:00
#SBATCH --mail-user=ada@example.org
#SBATCH --mail-type=FAIL

export OMP_NUM_THREADS=2
export OMP_PLACES=threads
export OMP_PROC_BIND=spread

cd /global/cfs/cdirs/m1234
srun -n 8 -c 2 --cpu-bind=cores sort -n numbers.txt > waves.sorted
echo finished
