#!/bin/sh
#SBATCH -n1 -c2 -t30 -pcompute --mem-per-cpu=1500 -Jrule_sort --comment='rule: sort, wildcards: sample=A'
#SBATCH -Agenomics -qnormal --tmp=10G -o/scratch/k1234/rule_sort-%3j.log

for part in a b; do
    sort /scratch/k1234/numbers.txt > "/scratch/k1234/$part.sorted"
done
cmp /scratch/k1234/a.sorted /scratch/k1234/b.sorted
echo finished
