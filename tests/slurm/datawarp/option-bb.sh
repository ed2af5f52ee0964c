#!/bin/sh
# documented: --bb takes capacity=, from which Slurm makes the directive
# ends: COMPLETED
# sbatch: --bb=capacity=2MB
test -d "$DW_JOB_STRIPED" || exit 3
scontrol show burst | grep -q "JobID=$SLURM_JOB_ID .*Pool=fast Size=2MiB " || exit 4
