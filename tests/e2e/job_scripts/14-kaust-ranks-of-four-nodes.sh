#!/bin/bash
#SBATCH --account=k1234
#SBATCH -N 4
#SBATCH -n 128
#SBATCH --time=01:00:00

srun --hint=nomultithread -n 128 ./heat3d
echo finished
