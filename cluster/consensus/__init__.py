"""Raft consensus of the replicas, with PySyncObj behind one adapter. DESIGN.md lists the hazards."""

from cluster.consensus.configurations import MemberChange, recovery_configuration
from cluster.consensus.driver import Consensus
from cluster.consensus.interface import (
    ChangeRefused,
    EntryTooLarge,
    HistoryElsewhere,
    IncarnationOver,
    LostDurableState,
    Machine,
    NotLeader,
    RemovedFromCluster,
    Role,
    SnapshotRef,
    SnapshotSink,
    Timing,
)
from cluster.consensus.log_compaction import HELD_BACK_ENTRIES
from cluster.consensus.peer_clocks import OFF_S, OFF_US, ClockBounds
from cluster.consensus.seals import KeyReplaced, SealBroken, SealChecks, Seals, check_tail
from cluster.consensus.service import Engine, Peer
from cluster.security import TlsFiles as PeerTls
