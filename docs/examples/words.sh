#!/bin/bash
#SBATCH --job-name=words --time=5
#DW jobdw type=scratch capacity=12MiB access_mode=striped pool=fast
#DW stage_in type=directory source=%d/input/texts destination=$DW_JOB_STRIPED/texts
#DW stage_out type=directory source=$DW_JOB_STRIPED/counts destination=%d/results/%x-%j

# Counts the words of every text in a directory; a directory of counts goes back.
set -euo pipefail
home=$PWD
cd "$DW_JOB_STRIPED"
mkdir counts
for text in texts/*.txt; do
  wc --words < "$text" > "counts/$(basename "$text")"
done
echo "$FOREBAY_JOB_NAME $FOREBAY_JOB_ID" >> "$home/completed.txt"
