#!/bin/bash -l
#SBATCH --partition=batch
#SBATCH -J io_bench
#SBATCH -o io_bench.%N.%j.log
#SBATCH --time=00:30:00
#SBATCH --exclusive
#SBATCH --contiguous
#SBATCH --mem=0
#SBATCH -x node[12-17]

# The whole node is ours: nothing else disturbs the measurement.
test "$SLURM_CPUS_ON_NODE" -ge 64
dd if=/dev/zero of=/scratch/k1234/bench bs=64k count=16 2> dd.txt
grep -q 16 dd.txt
echo finished
