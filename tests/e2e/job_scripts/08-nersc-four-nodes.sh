#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=32
#SBATCH --constraint=cpu
#SBATCH --qos=regular
#SBATCH --time=30

srun ./solver.x
echo finished
