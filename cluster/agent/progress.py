"""How far an operation is: four counters in memory that a worker writes and the agent reads."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final, NamedTuple

_LAYOUT: Final = struct.Struct("=4Q")
_BYTES: Final = mmap.PAGESIZE

SMOOTHING: Final = 0.5
"""Share of the newest sample in the shown rate: half, so that a pause shows within two polls and a hiccup does not."""

SAMPLE_S_MIN: Final = 0.2
"""Seconds between two samples of a rate: shorter ones measure the scheduler."""


class Counters(NamedTuple):
    """Files and bytes of an operation; totals are 0 while they are not known."""

    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


class SharedCounters:
    """Counters in anonymous memory that is shared through a descriptor."""

    def __init__(self, descriptor: int) -> None:
        """Map the descriptor; it stays the caller's."""
        self._memory = mmap.mmap(descriptor, _BYTES)

    @staticmethod
    def create() -> int:
        """Return a descriptor of fresh counters, all 0, for this process and a child that inherits it."""
        descriptor = os.memfd_create("forebay-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        return descriptor

    def write(self, counters: Counters) -> None:
        """Publish the counters."""
        _LAYOUT.pack_into(self._memory, 0, *counters)

    def read(self) -> Counters:
        """Return the counters as they are now."""
        return Counters(*_LAYOUT.unpack_from(self._memory, 0))

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


class Rate:
    """Bytes per second of a counter that only grows, smoothed."""

    def __init__(self) -> None:
        """Begin with no sample: the rate is 0."""
        self._at_s: float | None = None
        self._bytes = 0
        self._rate_bytes_s = 0.0

    def sample(self, bytes_done: int, at_s: float) -> float:
        """Take the counter at a monotonic time in seconds; return the rate in bytes per second."""
        if self._at_s is None:
            self._at_s, self._bytes = at_s, bytes_done
            return 0.0
        passed_s = at_s - self._at_s
        if passed_s < SAMPLE_S_MIN:
            return self._rate_bytes_s
        newest = max(0, bytes_done - self._bytes) / passed_s
        self._rate_bytes_s = (
            newest if self._rate_bytes_s == 0.0 else SMOOTHING * newest + (1 - SMOOTHING) * self._rate_bytes_s
        )
        self._at_s, self._bytes = at_s, bytes_done
        return self._rate_bytes_s
