#!/bin/sh
# documented: a request that can never be met is rejected
# rejected: Burst Buffer request invalid
#DW jobdw type=scratch capacity=99TiB access_mode=striped
true
