"""Raft consensus of the replicas, with PySyncObj behind one adapter. DESIGN.md lists the hazards."""

from forebay.cluster.consensus.configurations import MemberChange, recovery_configuration
from forebay.cluster.consensus.driver import Consensus
from forebay.cluster.consensus.interface import (
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
from forebay.cluster.consensus.log_compaction import HELD_BACK_ENTRIES
from forebay.cluster.consensus.peer_clocks import OFF_S, OFF_US, ClockBounds
from forebay.cluster.consensus.seals import KeyReplaced, SealBroken, SealChecks, Seals, check_tail
from forebay.cluster.consensus.service import Engine, Peer
from forebay.cluster.security import TlsFiles as PeerTls
