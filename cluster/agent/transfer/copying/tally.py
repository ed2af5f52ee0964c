"""What the threads of one process moved, until somebody is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec


class Moved(msgspec.Struct, array_like=True, gc=False):
    """What was done since it was told the last time; negative where it has to be done again. Bytes, and counts."""

    files: int = 0
    size_bytes: int = 0
    """Of what is at hand now, resumed or not."""
    written_bytes: int = 0
    """That went to the disk."""
    resumed_bytes: int = 0
    retries: int = 0
    durable_bytes: int = 0
    """That no other attempt has to move again."""
    steps: int = 0
    """Signs of life that move nothing."""
    path: bytes = b""
    """The file that it is at; empty: as before."""


class Tally:
    """Sums up, for all threads of a process; `tell` is called by one of them."""

    def __init__(self, tell: Callable[[Moved], None]) -> None:
        """Begin with nothing; `tell` is given the sums."""
        self._tell = tell
        self._lock = threading.Lock()
        self._sums = Moved()

    def add(
        self,
        *,
        files: int = 0,
        size_bytes: int = 0,
        written_bytes: int = 0,
        resumed_bytes: int = 0,
        retries: int = 0,
        durable_bytes: int = 0,
        steps: int = 0,
    ) -> None:
        """Count."""
        with self._lock:
            sums = self._sums
            sums.files += files
            sums.size_bytes += size_bytes
            sums.written_bytes += written_bytes
            sums.resumed_bytes += resumed_bytes
            sums.retries += retries
            sums.durable_bytes += durable_bytes
            sums.steps += steps

    def at(self, path: bytes) -> None:
        """Say which file it is at."""
        self._sums.path = path

    def tell(self) -> None:
        """Pass on what was counted; whatever the other side raises ends the copying."""
        with self._lock:
            sums, self._sums = self._sums, Moved()
        if sums != Moved():
            self._tell(sums)
