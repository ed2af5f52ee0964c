#!/bin/sh
# documented: without pool= the default pool is used; sizes are rounded up to the granularity
# ends: COMPLETED
#DW jobdw type=scratch capacity=2MB access_mode=striped
test -d "$DW_JOB_STRIPED" || exit 3
scontrol show burst | grep -q "JobID=$SLURM_JOB_ID .*Pool=fast Size=2MiB " || exit 4
