#!/bin/sh
# documented: a buffer of a job needs a capacity
# rejected: Burst Buffer request invalid
#DW jobdw type=scratch access_mode=striped
true
