#!/bin/bash
#SBATCH --account=k1234
#SBATCH --job-name=heat2d
#SBATCH --output=heat2d.out --error=heat2d.err
#SBATCH --nodes=1
#SBATCH --ntasks=32
#SBATCH --hint=nomultithread
#SBATCH --partition=workq
#SBATCH --time=00:10:00   # minutes are enough

module swap PrgEnv-cray PrgEnv-gnu
srun --hint=nomultithread --ntasks=${SLURM_NTASKS} --ntasks-per-node=${SLURM_NTASKS_PER_NODE} hostname
echo finished
