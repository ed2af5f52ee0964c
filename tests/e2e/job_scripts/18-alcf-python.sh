#!/usr/bin/env python3
#SBATCH --job-name=fit
#SBATCH --account=mat
#SBATCH --time=00:05:00
#SBATCH --mem 2G
#SBATCH --output=fit.%j.log
#SBATCH --get-user-env
"""Fits a line to the numbers of a file."""

import os

with open("/lus/grand/projects/mat/numbers.txt", encoding="ascii") as file:
    numbers = [int(line) for line in file]
mean = sum(numbers) / len(numbers)
print(f"job {os.environ['SLURM_JOB_ID']}: mean {mean}")
print("finished")
