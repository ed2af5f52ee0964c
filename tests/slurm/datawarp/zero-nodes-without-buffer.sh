#!/bin/sh
# documented: a job of no nodes needs a directive that creates or destroys a buffer
# rejected: Batch job submission failed
# sbatch: -N0
true
