"""Installation of the leader's snapshot, and conversion of snapshot summaries for API and command line.

Chunks are written as they arrive. The complete snapshot is verified in a thread, and then installed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from forebay.cluster.schemas import SnapshotPoolView, SnapshotView
from forebay.cluster.system import format_instant
from forebay.replica.values import Instant
from forebay.snapshots import Image, SnapshotStore, Summary
from forebay.wal import BrokenInvariant, ConfigurationAt


class SnapshotInstall:
    """Receiver of a snapshot for consensus (cluster.consensus.SnapshotSink); the store holds the bytes."""

    def __init__(self, snapshots: SnapshotStore, index: int, term: int, *, installed: Callable[[Image], None]) -> None:
        """Start, or continue the part of an earlier process. `installed` receives the verified image, and may raise."""
        self._snapshots = snapshots
        self._installed = installed
        self._receiver = snapshots.receive(index, term)
        self._verified: Future[None] | None = None

    @property
    def received_bytes(self) -> int:
        """Number of bytes received."""
        return self._receiver.next_offset

    def write(self, offset: int, data: bytes) -> None:
        """Write the bytes at `offset`.

        Raises:
            SnapshotRefused: The bytes are out of order.
        """
        self._receiver.write(offset, data)

    def verify(self, done: Callable[[], None]) -> None:
        """Verify the snapshot in a thread. `done` is called in the loop at the end, with any result."""
        loop = asyncio.get_running_loop()
        self._verified = self._snapshots.verify(self._receiver)
        self._verified.add_done_callback(lambda verified: call_soon(loop, done))

    def finish(self) -> ConfigurationAt | None:
        """Finalize and install the snapshot. Raises the error that `verify` found."""
        if self._verified is None:
            raise BrokenInvariant("an unverified snapshot was to be installed")
        self._verified.result()
        image = self._receiver.image
        self._receiver.finalize()
        self._installed(image)
        return image.configuration

    def abort(self) -> None:
        """Discard the received part."""
        self._receiver.abort()

    def suspend(self) -> None:
        """Keep the received part for the next process."""
        self._receiver.suspend()


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    """Call a function in the loop, from another thread."""
    # The loop may already be closed if the replica stops while a snapshot is abandoned.
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)


def snapshot_view(path: Path, summary: Summary) -> SnapshotView:
    """Convert a snapshot's summary to the API's form."""
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
