#!/bin/bash
#SBATCH --job-name=histogram
#SBATCH --time=5 --nice=10
#BB capacity=17MiB pool=fast access=striped type=scratch
#DW stage_in type=file source=%d/input/numbers.txt destination=$DW_JOB_STRIPED/numbers.txt
#DW stage_out type=file source=$DW_JOB_STRIPED/histogram.txt destination=%d/results/%x-%j.txt

# How often each last digit occurs. The space is asked for with #BB, the files with #DW.
set -euo pipefail
home=$PWD
cd "$DW_JOB_STRIPED"
awk '{ count[$1 % 10]++ } END { for (digit = 0; digit < 10; digit++) print digit, count[digit] + 0 }' \
  numbers.txt > histogram.txt
echo "$FOREBAY_JOB_NAME $FOREBAY_JOB_ID" >> "$home/completed.txt"
