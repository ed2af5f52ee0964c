#!/bin/bash
#SBATCH --qos=shared
#SBATCH --constraint=cpu
#SBATCH --ntasks=1 --cpus-per-task=2 --mem=4GB
#SBATCH --time=0:05:00
#SBATCH --licenses=cfs
#SBATCH --job-name="small analysis"
#SBATCH --chdir=/global/cfs/cdirs/m1234

awk '{ sum += $1 } END { print "sum", sum }' numbers.txt
echo finished
