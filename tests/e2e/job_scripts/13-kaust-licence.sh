#!/bin/bash
#SBATCH --job-name=octave
#SBATCH --licenses=matlab@kaust:1,simulink@kaust:2
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=4G
#SBATCH --time=0-00:10
#SBATCH --output=/scratch/k1234/octave.%u.%j.txt
#SBATCH --input=/scratch/k1234/numbers.txt

# The numbers come on standard input.
sort -n | tail -n 1
echo finished
