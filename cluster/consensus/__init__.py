"""How the replicas agree: Raft, with PySyncObj as the engine behind a seam. DESIGN.md here has the hazards."""

from cluster.consensus.changes import Wanted
from cluster.consensus.driver import Consensus
from cluster.consensus.frames import MAX_ENTRY_BYTES
from cluster.consensus.interface import (
    NO_OP,
    ChangeRefused,
    EntryTooLarge,
    Machine,
    NotLeader,
    PeerStatus,
    PromisesForgotten,
    RemovedFromCluster,
    Role,
    SnapshotRef,
    SnapshotSink,
    Timing,
)
from cluster.consensus.leading import HELD_BACK_ENTRIES
from cluster.security import TlsFiles as PeerTls
