#!/bin/sh
# documented: afterburstbuffer waits until results are staged out
# ends: COMPLETED
# afterburstbuffer: stage-files
test -f @RESULTS@/staged || exit 3
