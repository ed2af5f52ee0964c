#!/bin/bash
#SBATCH --account=m1234_g
#SBATCH --constraint=gpu
#SBATCH --qos=debug
#SBATCH --time=5
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-task=1
#SBATCH --gpu-bind=none
#SBATCH --output=/global/cfs/cdirs/m1234/gpu-%j.out

export SLURM_CPU_BIND="cores"
test "$SLURM_NTASKS" = 4
srun hostname
echo finished
