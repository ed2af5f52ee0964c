#!/bin/sh
# documented: pool= names the pool
# ends: COMPLETED
#DW jobdw pool=fast type=scratch capacity=3MiB access_mode=striped
test -d "$DW_JOB_STRIPED" || exit 3
scontrol show burst | grep -q "JobID=$SLURM_JOB_ID .*Pool=fast Size=3MiB " || exit 4
