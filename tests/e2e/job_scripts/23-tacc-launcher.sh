#!/bin/bash
#SBATCH --job-name=parametric
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=2
#SBATCH --partition=skx,normal
#SBATCH --time=00:05:00
#SBATCH --dependency=singleton

# A list of commands, run as many at a time as there are tasks.
cd /scratch1/01234/ada
for number in 1 2 3 4 5 6 7 8; do
    echo "sed -n ${number}p numbers.txt > launched.$number"
done > commands
xargs -P "$SLURM_NTASKS" -I{} sh -c '{}' < commands
test "$(cat launched.* | wc -l)" -eq 8
echo finished
