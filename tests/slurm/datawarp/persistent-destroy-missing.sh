#!/bin/sh
# documented: destroying what does not exist succeeds
# ends: COMPLETED
# after: persistent-destroy
# sbatch: -N0
#BB destroy_persistent name=alpha
true
