"""What a replica remembers: the journal of consensus, which is the ledger, in one LMDB environment."""

from wal.codec import NO_OP, CodecError, Kind, decode_batch, encode_batch, kind_of, revision_after
from wal.environment import MAP_SIZE_BYTES, Environment
from wal.failures import BrokenInvariant, StorageFailed
from wal.journal import Journal
from wal.ledger import Gap, Ledger, LedgerBroken, LedgerEntry, Verified
from wal.records import ENTRY_MAX_BYTES, Entry
from wal.recovery import RecoveryRefused

__all__ = [
    "ENTRY_MAX_BYTES",
    "MAP_SIZE_BYTES",
    "NO_OP",
    "BrokenInvariant",
    "CodecError",
    "Entry",
    "Environment",
    "Gap",
    "Journal",
    "Kind",
    "Ledger",
    "LedgerBroken",
    "LedgerEntry",
    "RecoveryRefused",
    "StorageFailed",
    "Verified",
    "decode_batch",
    "encode_batch",
    "kind_of",
    "revision_after",
]
