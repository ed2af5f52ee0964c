#!/bin/bash
#SBATCH --account mat
#SBATCH --time 60
#SBATCH --nodes 1
#SBATCH --ntasks 4 --overcommit
#SBATCH --job-name ensemble
#SBATCH --chdir /lus/grand/projects/mat

# Members of the ensemble run side by side in directories of their own.
for member in 1 2 3 4; do
    mkdir -p "member.$member"
    (
        cd "member.$member" || exit 1
        mpiexec -n 1 head -n "$member" ../numbers.txt > result.txt
    ) &
done
wait
test "$(cat member.*/result.txt | wc -l)" = 10
echo finished
