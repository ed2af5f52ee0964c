#!/bin/sh
# documented: --bbf takes a file of directives
# ends: COMPLETED
# bbf: #DW jobdw type=scratch capacity=2MB access_mode=striped
# bbf: #DW stage_in type=file source=@INPUT@/data destination=$DW_JOB_STRIPED/in
# bbf: #DW stage_out type=file source=$DW_JOB_STRIPED/out destination=@RESULTS@/of-file
# result: of-file
cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out"
