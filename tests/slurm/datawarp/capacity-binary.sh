#!/bin/sh
# documented: KiB counts 1024 bytes
# ends: COMPLETED
#DW jobdw type=scratch capacity=1025KiB access_mode=striped
test -d "$DW_JOB_STRIPED" || exit 3
scontrol show burst | grep -q "JobID=$SLURM_JOB_ID .*Pool=fast Size=2MiB " || exit 4
