"""How the replicas agree: Raft, with PySyncObj as the engine behind a seam. DESIGN.md here has the hazards."""

from cluster.consensus.driver import Consensus
from cluster.consensus.frames import MAX_ENTRY_BYTES
from cluster.consensus.interface import (
    NO_OP,
    EntryTooLarge,
    Machine,
    NotLeader,
    PeerStatus,
    Role,
    SnapshotRef,
    SnapshotSink,
    Timing,
)
from cluster.tls import TlsFiles as PeerTls

__all__ = [
    "MAX_ENTRY_BYTES",
    "NO_OP",
    "Consensus",
    "EntryTooLarge",
    "Machine",
    "NotLeader",
    "PeerStatus",
    "PeerTls",
    "Role",
    "SnapshotRef",
    "SnapshotSink",
    "Timing",
]
