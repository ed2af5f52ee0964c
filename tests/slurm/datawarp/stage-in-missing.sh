#!/bin/sh
# documented: a job whose stage-in fails is held, with the error as its Reason
# held: missing does not exist
#DW jobdw type=scratch capacity=2MB access_mode=striped
#DW stage_in type=file source=@INPUT@/missing destination=$DW_JOB_STRIPED/in
true
