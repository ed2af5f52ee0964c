"""Progress counters of an operation in shared memory, written by a worker and read by the agent."""

from __future__ import annotations

import mmap
import os
from typing import Final, NamedTuple

_BYTES: Final = mmap.PAGESIZE

SMOOTHING: Final = 0.5
"""Weight of the newest sample in the displayed rate: a pause shows within two polls, a brief stall does not."""

SAMPLE_S_MIN: Final = 0.2
"""Minimum seconds between two rate samples: shorter ones measure the scheduler."""

FILE_NAME_BYTES_MAX: Final = 1_000
"""Bytes displayed of the current file's path: its end, the most specific part."""

PHASES: Final = ("", "planning", "copying", "verifying", "committing")
"""Phases of a transfer, by their number in the counters."""


def no_op(*_: object) -> None:
    """Do nothing; the default for unused callbacks."""


class Counters(NamedTuple):
    """Files and bytes of an operation; totals are 0 while unknown.

    `files_done` and `bytes_done` include an earlier attempt's work, which the `resumed` fields repeat.
    """

    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    directories_done: int = 0
    retries: int = 0
    resumed_files: int = 0
    resumed_bytes: int = 0
    steps: int = 0
    """Other signs of progress, such as entries walked, chunks compared or syncs. Only grows."""
    phase: int = 0
    """Current phase, an index of PHASES."""
    durable_files: int = 0
    durable_bytes: int = 0
    """Bytes that no later attempt has to move, whatever happens to this machine."""


_TOKENS: Final = len(Counters._fields)
_WAITS: Final = _TOKENS + 2
_NAME_OFFSET: Final = 1024
_NAME_LENGTH_BYTES: Final = 2


class SharedCounters:
    """Counters in anonymous memory shared through a descriptor."""

    def __init__(self, descriptor: int) -> None:
        """Map the descriptor, which stays the caller's."""
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES)
        # Stores through this view are atomic, which struct.pack_into does not guarantee.
        self._words = memoryview(self._memory).cast("q")

    @staticmethod
    def create() -> int:
        """Return a descriptor of new counters, all 0, for this process and a child that inherits it."""
        descriptor = os.memfd_create("forebay-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        return descriptor

    def write(self, counters: Counters) -> None:
        """Publish the counters."""
        for place, number in enumerate(counters):
            self._words[place] = number

    def read(self) -> Counters:
        """Return the current counters."""
        return Counters(*self._words[: len(Counters._fields)])

    def at(self, path: str | bytes) -> None:
        """Set the current file. Readers may see a torn name, which is harmless."""
        data = os.fsencode(path)[-FILE_NAME_BYTES_MAX:]
        start = _NAME_OFFSET + _NAME_LENGTH_BYTES
        self._memory[start : start + len(data)] = data
        self._memory[_NAME_OFFSET:start] = len(data).to_bytes(_NAME_LENGTH_BYTES, "little")

    @property
    def file(self) -> str:
        """Path of the current file; invalid UTF-8 is replaced."""
        start = _NAME_OFFSET + _NAME_LENGTH_BYTES
        length = int.from_bytes(self._memory[_NAME_OFFSET:start], "little")
        return self._memory[start : start + min(length, FILE_NAME_BYTES_MAX)].decode("utf-8", "replace")

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the rate limit: bytes that may be moved, and when they were computed (ns)."""
        return self._words[_TOKENS], self._words[_TOKENS + 1]

    @tokens.setter
    def tokens(self, value: tuple[int, int]) -> None:
        self._words[_TOKENS], self._words[_TOKENS + 1] = value

    @property
    def waits(self) -> int:
        """Number of rate-limit waits. Only grows."""
        return self._words[_WAITS]

    def count_wait(self) -> None:
        """Count one rate-limit wait."""
        self._words[_WAITS] += 1

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._memory.close()


class Rate:
    """Smoothed rate of a growing byte counter."""

    def __init__(self) -> None:
        """Begin without samples, at rate 0."""
        self._at_s: float | None = None
        self._bytes = 0
        self._rate_bytes_s = 0.0

    def sample(self, bytes_done: int, at_s: float) -> float:
        """Add a counter value at a monotonic time in seconds; return the rate in bytes per second."""
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
