#!/bin/bash
#SBATCH --job-name=digest --time=5
#DW stage_in type=file source=%d/input/numbers.txt destination=$FOREBAY_JOB_DIR/striped/numbers.txt
#DW stage_out type=file source=$FOREBAY_JOB_DIR/striped/digest.txt destination=%d/results/%x-%j.txt

# The digest of a file. The script says what to stage; how much space it gets is said on the command line:
#   forebay submit --bb "capacity=40MB pool=bulk" digest.sh
set -euo pipefail
home=$PWD
cd "$FOREBAY_JOB_DIR/striped"
sha256sum < numbers.txt | cut -d' ' -f1 > digest.txt
echo "$FOREBAY_JOB_NAME $FOREBAY_JOB_ID" >> "$home/completed.txt"
