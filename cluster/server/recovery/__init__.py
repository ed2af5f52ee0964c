"""Recovery: checks before a replica participates, and the restart of a cluster after the loss of a majority."""

from forebay.cluster.server.recovery.new_incarnation import (
    RecoveryNotPossible,
    RecoveryPlan,
    RecoveryResult,
    plan_recovery,
    recover,
)
from forebay.cluster.server.recovery.restore import plan_restore, restore_snapshot
from forebay.cluster.server.recovery.start_checks import refuse_beside_history, refuse_incarnation_over
