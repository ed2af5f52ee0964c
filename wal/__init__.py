"""What a replica remembers: the journal of consensus, which is the ledger, in one LMDB environment."""

from wal.environment import MAP_SIZE_BYTES, Environment
from wal.failures import BrokenInvariant, StorageFailed
from wal.journal import ENTRY_MAX_BYTES, Entry, Journal
from wal.recovery import RecoveryRefused

__all__ = [
    "ENTRY_MAX_BYTES",
    "MAP_SIZE_BYTES",
    "BrokenInvariant",
    "Entry",
    "Environment",
    "Journal",
    "RecoveryRefused",
    "StorageFailed",
]
