"""Snapshots at a replica: installed when one comes from the leader, and shown as the API and the command line do.

Chunks are taken, the whole is verified beside the loop, and stood on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cluster.schemas import SnapshotPoolView, SnapshotView
from cluster.system import format_instant
from replica.values import Instant
from snapshots import Image, SnapshotStore, Summary
from wal import BrokenInvariant, ConfigurationAt


class SnapshotInstall:
    """What consensus writes a snapshot to (cluster.consensus.SnapshotSink); the store holds the bytes."""

    def __init__(self, snapshots: SnapshotStore, index: int, term: int, *, installed: Callable[[Image], None]) -> None:
        """Begin, or continue where an earlier process was; `installed` takes over the verified image, or raises."""
        self._snapshots = snapshots
        self._installed = installed
        self._receiver = snapshots.receive(index, term)
        self._verified: Future[None] | None = None

    @property
    def received_bytes(self) -> int:
        """Bytes that are there already."""
        return self._receiver.next_offset

    def write(self, offset: int, data: bytes) -> None:
        """Take the bytes at `offset`; SnapshotRefused if they do not come in order."""
        self._receiver.write(offset, data)

    def verify(self, done: Callable[[], None]) -> None:
        """Begin to verify the whole in a thread; `done` is called in the loop when that is over, well or not."""
        loop = asyncio.get_running_loop()
        self._verified = self._snapshots.verify(self._receiver)
        self._verified.add_done_callback(lambda verified: call_soon(loop, done))

    def finish(self) -> ConfigurationAt | None:
        """Seal the snapshot and stand on it; what `verify` found wrong is raised here."""
        if self._verified is None:
            raise BrokenInvariant("a snapshot that was not verified is to be installed")
        self._verified.result()
        image = self._receiver.image
        self._receiver.finalize()
        self._installed(image)
        return image.configuration

    def abort(self) -> None:
        """Throw away what came so far."""
        self._receiver.abort()

    def suspend(self) -> None:
        """Leave what came so far to the next process."""
        self._receiver.suspend()


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    """Have a function called in the loop, from another thread."""
    # The loop may be closed when a replica stops while its snapshot is being given up.
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)


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
