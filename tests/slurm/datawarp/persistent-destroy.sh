#!/bin/sh
# documented: a job destroys a persistent buffer
# ends: COMPLETED
# after: persistent-use-again
# sbatch: -N0
#BB destroy_persistent name=alpha
true
