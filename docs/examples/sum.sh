#!/bin/bash
#SBATCH --job-name=sum --time=5
#DW jobdw type=scratch capacity=20MiB access_mode=striped pool=fast
#DW stage_in type=file source=%d/input/numbers.txt destination=$DW_JOB_STRIPED/numbers.txt
#DW stage_out type=file source=$DW_JOB_STRIPED/sum.txt destination=%d/results/%x-%j.txt

# Adds up a file of numbers. The data is on the burst buffer before the first line runs, and the result is taken back
# after the last.
set -euo pipefail
home=$PWD
cd "$DW_JOB_STRIPED"
awk '{ total += $1 } END { printf "%.0f\n", total }' numbers.txt > sum.txt
echo "job $FOREBAY_JOB_ID on $FOREBAY_NODE: the sum is $(cat sum.txt)"
echo "$FOREBAY_JOB_NAME $FOREBAY_JOB_ID" >> "$home/completed.txt"
