"""How far an operation is: counters in memory that a worker writes and the agent reads."""

from __future__ import annotations

import mmap
import os
from typing import Final, NamedTuple

_BYTES: Final = mmap.PAGESIZE

SMOOTHING: Final = 0.5
"""Share of the newest sample in the shown rate: half, so that a pause shows within two polls and a hiccup does not."""

SAMPLE_S_MIN: Final = 0.2
"""Seconds between two samples of a rate: shorter ones measure the scheduler."""

FILE_NAME_BYTES_MAX: Final = 1_000
"""What is shown of the path of the file that is being moved, bytes: its end, which says most."""

PHASES: Final = ("", "planning", "copying", "verifying", "committing")
"""What a transfer is busy with, by its number in the counters."""


def nothing(*_: object) -> None:
    """Do nothing: what a context has where nobody wants to be told."""


class Counters(NamedTuple):
    """Files and bytes of an operation; totals are 0 while they are not known.

    What an earlier attempt did is in `files_done` and `bytes_done`, and again in the `resumed` ones.
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
    """Anything that shows life and is none of the others: entries walked, chunks compared, syncs. It only grows."""
    phase: int = 0
    """What it is busy with, an index of PHASES."""
    durable_files: int = 0
    durable_bytes: int = 0
    """How much of it no next attempt has to move again, whatever happens to this machine."""


_TOKENS: Final = len(Counters._fields)
_WAITS: Final = _TOKENS + 2
_NAME_OFFSET: Final = 1024
_NAME_LENGTH_BYTES: Final = 2


class SharedCounters:
    """Counters in anonymous memory that is shared through a descriptor."""

    def __init__(self, descriptor: int) -> None:
        """Map the descriptor; it stays the caller's."""
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES)
        # Each number is written whole or not at all, which struct.pack_into does not promise.
        self._words = memoryview(self._memory).cast("q")

    @staticmethod
    def create() -> int:
        """Return a descriptor of fresh counters, all 0, for this process and a child that inherits it."""
        descriptor = os.memfd_create("forebay-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        return descriptor

    def write(self, counters: Counters) -> None:
        """Publish the counters."""
        for place, number in enumerate(counters):
            self._words[place] = number

    def read(self) -> Counters:
        """Return the counters as they are now."""
        return Counters(*self._words[: len(Counters._fields)])

    def at(self, path: str | bytes) -> None:
        """Say which file is being moved. It is shown as it is found, so a torn name does no harm."""
        data = os.fsencode(path)[-FILE_NAME_BYTES_MAX:]
        start = _NAME_OFFSET + _NAME_LENGTH_BYTES
        self._memory[start : start + len(data)] = data
        self._memory[_NAME_OFFSET:start] = len(data).to_bytes(_NAME_LENGTH_BYTES, "little")

    @property
    def file(self) -> str:
        """The file that is being moved; bytes that are no UTF-8 are replaced."""
        start = _NAME_OFFSET + _NAME_LENGTH_BYTES
        length = int.from_bytes(self._memory[_NAME_OFFSET:start], "little")
        return self._memory[start : start + min(length, FILE_NAME_BYTES_MAX)].decode("utf-8", "replace")

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the rate limit: bytes that may be moved, and when that was so (ns)."""
        return self._words[_TOKENS], self._words[_TOKENS + 1]

    @tokens.setter
    def tokens(self, value: tuple[int, int]) -> None:
        self._words[_TOKENS], self._words[_TOKENS + 1] = value

    @property
    def waits(self) -> int:
        """How often the rate held somebody back. It only grows."""
        return self._words[_WAITS]

    def waited(self) -> None:
        """Count that the rate holds somebody back."""
        self._words[_WAITS] += 1

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
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
