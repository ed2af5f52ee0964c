#!/bin/sh
# documented: a job destroys several; hurry skips what was to be written
# ends: COMPLETED
# after: persistent-create-two
#BB destroy_persistent name=beta
#BB destroy_persistent name=gamma hurry
true
