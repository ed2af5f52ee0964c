#!/bin/sh
# properties = {"type": "single", "rule": "map_reads", "local": false, "input": ["numbers.txt"], "threads": 4}
#SBATCH --job-name=snakejob.map_reads.12.sh
#SBATCH --cpus-per-task=4 --mem=8000 --time=30
#SBATCH --output=/scratch/k1234/%x.%j.out
#SBATCH --error=/scratch/k1234/%x.%j.err
#SBATCH --parsable

cd /scratch/k1234 && \
sort -n numbers.txt > mapped.txt && touch mapped.done || (touch mapped.failed; exit 1)
echo finished
