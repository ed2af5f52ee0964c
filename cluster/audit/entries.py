"""One entry of the ledger as JSON: names for numbers, hexadecimal for bytes, sentences left to whoever reads it."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from cluster.client.views import Json, LedgerEntryView
from cluster.clock import format_instant
from replica.commit import Batch, Entry
from replica.jobs import JobSpec
from replica.units import Instant
from wal.codec import Kind, decode_batch, kind_of
from wal.ledger import Ledger, LedgerEntry

NO_OP = "no-op"
BATCH = "batch"
VOID = "void"
"""A batch that the fence refused everywhere: it was decided on another revision, and changed nothing."""


def entry_view(entry: LedgerEntry, ledger: Ledger) -> LedgerEntryView:
    """Return an entry as JSON shows it; CodecError for one that this release does not know, LedgerBroken for damage."""
    batch = decode_batch(entry.data) if kind_of(entry.data) is Kind.BATCH else None
    if batch is None:
        return LedgerEntryView(
            index=entry.index, term=entry.term, kind=NO_OP, digest=entry.digest.hex(), size_bytes=len(entry.data)
        )
    void = is_void(entry.index, batch, ledger)
    return LedgerEntryView(
        index=entry.index,
        term=entry.term,
        kind=VOID if void else BATCH,
        digest=entry.digest.hex(),
        base_revision=batch.base,
        revision=None if void else batch.base + len(batch.entries),
        at=format_instant(batch.at),
        size_bytes=len(entry.data),
        records=tuple(record_json(record, batch.base + 1 + k) for k, record in enumerate(batch.entries)),
    )


def is_void(index: int, batch: Batch, ledger: Ledger) -> bool:
    """Say whether the fence refused this batch: another entry settled the revisions that it would have."""
    if not batch.entries:
        return False
    try:
        return ledger.index_of_revision(batch.base + 1) != index
    except LookupError:
        return True


def record_json(record: Entry, revision: int) -> Json:
    """Return one settled command: who asked for what, and its events or its refusal."""
    found: Json = {
        "revision": revision,
        "command_id": record.id.hex() or None,
        "actor": str(record.actor),
        "command": record.command,
        "events": [{"event": type(event).__name__, **_fields(event)} for event in record.events],
    }
    if record.refusal is not None:
        found["refusal"] = _fields(record.refusal)
    return found


def _fields(value: msgspec.Struct) -> Json:
    return {name: _plain(getattr(value, name), name, type(value)) for name in value.__struct_fields__}


def _plain(value: Any, name: str, holder: type[msgspec.Struct]) -> Any:
    if isinstance(value, msgspec.Struct):
        return _fields(value)
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _plain(one, name, holder) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, name, holder) for one in value]
    if isinstance(value, int) and (name.endswith("_at") or (holder is JobSpec and name == "deadline")):
        return format_instant(Instant(value))
    return value
