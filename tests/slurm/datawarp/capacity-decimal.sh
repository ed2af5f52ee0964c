#!/bin/sh
# documented: KB counts 1000 bytes
# ends: COMPLETED
#DW jobdw type=scratch capacity=1025KB access_mode=striped
test -d "$DW_JOB_STRIPED" || exit 3
scontrol show burst | grep -q "JobID=$SLURM_JOB_ID .*Pool=fast Size=1MiB " || exit 4
