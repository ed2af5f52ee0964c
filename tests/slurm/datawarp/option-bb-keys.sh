#!/bin/sh
# documented: --bb takes access=, type= and pool= beside it
# ends: COMPLETED
# sbatch: --bb="capacity=2MB access=striped type=scratch pool=fast"
test -d "$DW_JOB_STRIPED" || exit 3
scontrol show burst | grep -q "JobID=$SLURM_JOB_ID .*Pool=fast Size=2MiB " || exit 4
