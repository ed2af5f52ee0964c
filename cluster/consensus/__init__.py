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
from cluster.tls import TlsFiles as PeerTls

__all__ = [
    "MAX_ENTRY_BYTES",
    "NO_OP",
    "ChangeRefused",
    "Consensus",
    "EntryTooLarge",
    "Machine",
    "NotLeader",
    "PeerStatus",
    "PeerTls",
    "PromisesForgotten",
    "RemovedFromCluster",
    "Role",
    "SnapshotRef",
    "SnapshotSink",
    "Timing",
    "Wanted",
]
