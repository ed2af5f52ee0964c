"""What a cluster does when its history may be in doubt: before a replica takes part, and after a majority was lost."""

from cluster.server.recovery.new_incarnation import Recovered, RecoveryNotPossible, RecoveryPlan, plan_recovery, recover
from cluster.server.recovery.restore import plan_restore, restore_snapshot
from cluster.server.recovery.start_checks import refuse_beside_history, refuse_incarnation_over
