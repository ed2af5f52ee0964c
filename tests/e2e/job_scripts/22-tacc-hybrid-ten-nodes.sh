#!/bin/bash
#SBATCH -J hybrid
#SBATCH -o hybrid.o%j
#SBATCH -p large
#SBATCH -N 10
#SBATCH -n 40
#SBATCH -t 01:30:00

export OMP_NUM_THREADS=14
ibrun ./mycode.exe
echo finished
