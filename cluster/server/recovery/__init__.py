"""What a cluster does when its history may be in doubt: at a first start, and after a majority was lost."""

from cluster.server.recovery.first_start import refuse_beside_history
