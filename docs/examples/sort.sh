#!/bin/bash
#SBATCH --job-name=sort --time=5
#DW jobdw type=scratch capacity=60MB access_mode=striped,private \
#DW   pool=bulk
#DW stage_in type=file source=%d/input/numbers.txt destination=$DW_JOB_STRIPED/numbers.txt
#DW stage_out type=file source=$DW_JOB_PRIVATE/sorted.txt destination=%d/results/%x-%j.txt

# Sorts a file of numbers, with the scratch space of the sort on the buffer too.
set -euo pipefail
home=$PWD
LC_ALL=C sort --numeric-sort --temporary-directory="$DW_JOB_PRIVATE" \
  --output="$DW_JOB_PRIVATE/sorted.txt" "$DW_JOB_STRIPED/numbers.txt"
echo "$FOREBAY_JOB_NAME $FOREBAY_JOB_ID" >> "$home/completed.txt"
