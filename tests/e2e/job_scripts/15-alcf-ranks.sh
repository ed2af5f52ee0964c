#!/bin/bash -l
#SBATCH -A mat
#SBATCH -t 0:30:00
#SBATCH -p debug
#SBATCH -N 1
#SBATCH -o affinity.out
#SBATCH --distribution=block:cyclic
#SBATCH --switches=1@10:00

NNODES=${SLURM_JOB_NUM_NODES}
NRANKS_PER_NODE=4
NDEPTH=2
NTOTRANKS=$((NNODES * NRANKS_PER_NODE))
echo "NUM_OF_NODES= ${NNODES} TOTAL_NUM_RANKS= ${NTOTRANKS} RANKS_PER_NODE= ${NRANKS_PER_NODE}"

cd "${SLURM_SUBMIT_DIR}"
mpiexec -n ${NTOTRANKS} --ppn ${NRANKS_PER_NODE} --depth=${NDEPTH} --cpu-bind depth hostname
echo finished
