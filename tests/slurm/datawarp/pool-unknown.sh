#!/bin/sh
# documented: a pool that does not exist is rejected
# rejected: Burst Buffer request invalid
#DW jobdw pool=none type=scratch capacity=2MB access_mode=striped
true
