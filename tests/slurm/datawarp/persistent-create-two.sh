#!/bin/sh
# documented: a job with nodes may create several
# ends: COMPLETED
#BB create_persistent name=beta capacity=2MB access=striped type=scratch
#BB create_persistent name=gamma capacity=3MB access=striped type=scratch
scontrol show burst | grep -q 'Name=beta .*Size=2MiB ' || exit 4
scontrol show burst | grep -q 'Name=gamma .*Size=3MiB ' || exit 5
