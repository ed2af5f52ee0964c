#!/bin/bash
#SBATCH -J nf-multiqc
#SBATCH -o /scratch/k1234/multiqc.log
#SBATCH --no-requeue
#SBATCH --signal B:USR2@30
#SBATCH -t 00:30:00 --mem 8192M --account=genomics --qos=short --constraint="avx2&ssd"
NXF_CHDIR=/scratch/k1234
cd "$NXF_CHDIR"
test "$(wc -l < numbers.txt)" -gt 0
echo finished
