"""The digest of a State: equal states have equal digests on every machine, whatever PYTHONHASHSEED is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from replica.state.state import State
from replica.state.tables import LATER_MAPS

_ENCODER = msgspec.msgpack.Encoder()


def state_records(state: State) -> Iterator[tuple[str, object]]:
    """Yield (section, record) in canonical order: the scalars, then each map sorted by key. Derived maps are left
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
            state.policy,
            state.next_job,
            state.oldest_receipt,
            state.receipts_horizon_ms,
        ),
    )
    for name in sorted(state.pools):
        yield "pool", state.pools[name]
    for name in sorted(state.nodes):
        yield "node", state.nodes[name]
    for job in sorted(state.jobs):
        yield "job", state.jobs[job]
    for job in sorted(state.buffers):
        yield "buffer", state.buffers[job]
    for item in state.receipts.items():
        yield "receipt", item
    for later in LATER_MAPS:
        records = getattr(state, later.field)
        for key in sorted(records):
            yield later.field, (key, records[key])


def state_digest(state: State) -> bytes:
    """Return SHA-256 over the canonical records of the state, 32 bytes."""
    digest = hashlib.sha256()
    for section, record in state_records(state):
        encoded = _ENCODER.encode((section, record))
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.digest()
