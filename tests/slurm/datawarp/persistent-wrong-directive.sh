#!/bin/sh
# documented: persistent buffers are created by #BB alone
# rejected: Batch job submission failed
# sbatch: -N0
#DW create_persistent name=delta capacity=2MB access=striped type=scratch
true
