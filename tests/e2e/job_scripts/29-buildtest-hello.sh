#!/bin/bash -l
#SBATCH -N 1
#SBATCH --qos=debug
#SBATCH -t 5
#SBATCH -C knl
#SBATCH --job-name=hostname_knl
#SBATCH --output=hostname_knl.out
#SBATCH --error=hostname_knl.err
#SBATCH -q debug

# name of test, then what it checks
hostname -s > /global/cfs/cdirs/m1234/hostname.txt
test -s /global/cfs/cdirs/m1234/hostname.txt
echo finished
