#!/bin/sh
# documented: --bb takes the directive of a script
# ends: COMPLETED
# sbatch: --bb="#DW jobdw capacity=2MB access_mode=striped type=scratch"
test -d "$DW_JOB_STRIPED" || exit 3
scontrol show burst | grep -q "JobID=$SLURM_JOB_ID .*Pool=fast Size=2MiB " || exit 4
