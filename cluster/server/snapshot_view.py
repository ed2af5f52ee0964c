"""A snapshot as the API and the command line show it."""

from __future__ import annotations

from pathlib import Path

from cluster.schemas import SnapshotPoolView, SnapshotView
from cluster.system import format_instant
from replica.values import Instant
from snapshots import Summary


def snapshot_view(path: Path, summary: Summary) -> SnapshotView:
    """Return what a snapshot's summary says in the shape of the API."""
    return SnapshotView(
        path=str(path),
        index=summary.index,
        term=summary.term,
        revision=summary.revision,
        at=format_instant(Instant(summary.at)),
        size_bytes=summary.size_bytes,
        ledger_digest=summary.digest,
        jobs=summary.jobs,
        buffers=summary.buffers,
        pools=tuple(
            SnapshotPoolView(name=pool.name, quantity_bytes=pool.quantity_bytes, free_bytes=pool.free_bytes)
            for pool in summary.pools
        ),
    )
