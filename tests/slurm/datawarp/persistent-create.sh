#!/bin/sh
# documented: a job of no nodes creates persistent buffers, in the default pool
# ends: COMPLETED
# sbatch: -N0
#BB create_persistent name=alpha capacity=2MB access=striped type=scratch
true
