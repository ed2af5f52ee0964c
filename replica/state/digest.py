"""The digest of a State: equal states have equal digests on every machine, whatever PYTHONHASHSEED is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from replica.state.state import TABLES, State

_ENCODER = msgspec.msgpack.Encoder()


def state_records(state: State) -> Iterator[tuple[str, object]]:
    """Yield (section, record) in canonical order: the scalars, then the maps of TABLES. Derived maps are left
    out.
    """
    yield (
        "state",
        (
            state.cluster_id,
            state.name,
            state.feature_level,
            state.revision,
            state.at,
            state.site,
            state.scheduling_rules,
            state.transfer_rules,
            state.next_job,
            state.receipt_seconds,
            state.oldest_receipt,
            state.receipts_horizon_ms,
            state.clock_set_back,
        ),
    )
    for table in TABLES:
        for record in table.written(state):
            yield table.field, record


def state_digest(state: State) -> bytes:
    """Return SHA-256 over the canonical records of the state, 32 bytes."""
    digest = hashlib.sha256()
    for section, record in state_records(state):
        encoded = _ENCODER.encode((section, record))
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.digest()


def table_digests(state: State) -> dict[str, bytes]:
    """Return SHA-256 over the canonical records of each table that holds some, 32 bytes each."""
    digests: dict[str, Any] = {}
    for section, record in state_records(state):
        if section not in digests:
            digests[section] = hashlib.sha256()
        digests[section].update(_ENCODER.encode(record))
    return {section: digest.digest() for section, digest in digests.items()}
