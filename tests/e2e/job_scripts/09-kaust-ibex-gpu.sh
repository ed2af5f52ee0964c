#!/bin/bash
#SBATCH --job-name=train
#SBATCH --partition=batch
#SBATCH --time=00:20:00
#SBATCH --gres=gpu:v100:1
#SBATCH --constraint=[v100]
#SBATCH --mem=32G
#SBATCH --cpus-per-task=4
#SBATCH --mail-type=ALL
#SBATCH --mail-user=ada@example.org
#SBATCH --output=train.%J.out
#SBATCH --error=train.%J.err

module load cuda/11.8 python
echo "running on $(hostname) with $SLURM_CPUS_PER_TASK CPUs" >&2
python3 -c 'print(sum(int(line) for line in open("/scratch/k1234/numbers.txt")))'
echo finished
