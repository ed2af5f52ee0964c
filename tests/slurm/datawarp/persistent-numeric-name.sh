#!/bin/sh
# documented: names of persistent buffers do not begin with a digit
# rejected: Burst Buffer request invalid
# sbatch: -N0
#BB create_persistent name=7seas capacity=2MB access=striped type=scratch
true
