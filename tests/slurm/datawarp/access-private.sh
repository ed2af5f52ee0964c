#!/bin/sh
# documented: access modes may be rejected by the underlying software: Forebay has no private buffers in Slurm
# rejected: Burst Buffer request invalid
#DW jobdw type=scratch capacity=2MB access_mode=striped,private
true
