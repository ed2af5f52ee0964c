#!/bin/sh
# documented: a job of no nodes has no buffer of its own
# rejected: Batch job submission failed
# sbatch: -N0
#DW jobdw type=scratch capacity=2MB access_mode=striped
true
