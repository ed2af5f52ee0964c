"""Rate limit and stop control of a transfer, effective in all its processes at any time.

The agent sets the rate (cluster.agent.rate_governor distributes the limits of node, user and cluster) in a page that
the transfer can only read. The transfer keeps a token bucket in its own memory (`SharedCounters.tokens`): processes
take bytes from it and wait while it is empty. A new rate takes effect at the next check, at most POLL_S later.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Final

from forebay.cluster.agent.transfer.errors import TransferPaused
from forebay.cluster.agent.transfer.progress import SharedCounters
from forebay.cluster.system import Clock

UNLIMITED: Final = -1
"""Rate without a limit; 0 is a pause."""

POLL_S: Final = 0.05
"""Seconds between two checks while waiting: the delay of a new rate, the end of a pause, or a stop."""

WAIT_S_MIN: Final = 0.001
"""Minimum wait, seconds: the resolution of a timer."""

BURST_S: Final = 0.1
"""Seconds of a rate that may accumulate while nothing moves: enough to cover a stall, too little to notice."""

STEP_BYTES_MIN: Final = 4096
"""Minimum bytes moved between two checks: a page, however low the rate."""

_SEAL_FUTURE_WRITE: Final = 0x10
"""F_SEAL_FUTURE_WRITE (Linux 5.1), missing in Python 3.11's fcntl module: later mappings are read-only."""

_RATE: Final = 0
_STOP: Final = 1
_STANDS: Final = 2
_GO, _END, _PAUSE = 0, 1, 2
_NS: Final = 1_000_000_000
_FOR_EVER: Final = 2**63 - 1


class TransferStopped(BaseException):
    """Stop the transfer at once and clean up. Not an Exception, because no file failed."""


class TransferControl:
    """Agent's side of the control page of a transfer."""

    def __init__(self) -> None:
        """Create a page without limits; pass `descriptor` to the transfer's process."""
        self.descriptor = os.memfd_create("forebay-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("q")
        self._words[_RATE] = UNLIMITED
        self._words[_STANDS] = _FOR_EVER
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)

    @property
    def rate_bytes_s(self) -> int:
        """Bytes per second, UNLIMITED, or 0 for a pause."""
        return self._words[_RATE]

    @rate_bytes_s.setter
    def rate_bytes_s(self, value: int) -> None:
        self._words[_RATE] = value

    @property
    def stands_until_s(self) -> float:
        """Time until which the order is confirmed, monotonic seconds."""
        return self._words[_STANDS] / _NS

    @stands_until_s.setter
    def stands_until_s(self, value: float) -> None:
        self._words[_STANDS] = int(value * _NS)

    def stop(self, *, resuming: bool = False) -> None:
        """Make the transfer's next check raise TransferPaused if `resuming`, which keeps partial files, or else
        TransferStopped.
        """
        self._words[_STOP] = _PAUSE if resuming else _END

    def close(self) -> None:
        """Release the page; a running transfer keeps seeing its last content."""
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)


class Pace:
    """Transfer's side of the control page, shared by all threads of a process and its forks."""

    def __init__(self, control: int, shared: SharedCounters, clock: Clock) -> None:
        """Map the descriptor `control`, which stays the caller's; -1 means no limit and no stop."""
        page = None if control < 0 else mmap.mmap(control, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._words = None if page is None else memoryview(page).cast("q")
        self._shared = shared
        self._clock = clock
        self._mutex = threading.Lock()
        self._ended: type[BaseException] | None = None
        self._never = threading.Event()

    def check(self) -> None:
        """Raise TransferStopped or TransferPaused if the transfer has to stop. Call it for every chunk and entry."""
        if self._words is not None and self._words[_STOP] != _GO:
            raise TransferPaused if self._words[_STOP] == _PAUSE else TransferStopped
        if self._ended is not None:
            raise self._ended

    def end(self, error: type[BaseException]) -> None:
        """Make `check` raise this exception in this process, unless the agent's page requires another.

        For signal handlers, which may run between any two steps: raising directly could undo half a step, for example
        leave a closed descriptor registered. Waiting threads check every POLL_S.
        """
        self._ended = error

    def await_order(self) -> None:
        """Block until the order is confirmed to be current.

        Raises:
            TransferStopped, TransferPaused: The transfer has to stop.
        """
        self.check()
        while self._words is not None and self._words[_STANDS] < self._clock.monotonic_s() * _NS:
            self._shared.count_wait()
            self._never.wait(POLL_S)
            self.check()

    def step_bytes(self, most: int) -> int:
        """Return the bytes to move after one `take`: at most `most` and a tenth of a second's worth."""
        rate_bytes_s = UNLIMITED if self._words is None else self._words[_RATE]
        if rate_bytes_s < 0:
            return most
        return min(most, max(STEP_BYTES_MIN, rate_bytes_s // 10))

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be moved.

        Raises:
            TransferStopped, TransferPaused: The transfer has to stop; raised at once.
        """
        self.check()
        wait_s = self._try(size_bytes)
        while wait_s > 0:
            self._shared.count_wait()
            self._never.wait(max(WAIT_S_MIN, min(wait_s, POLL_S)))
            self.check()
            wait_s = self._try(size_bytes)

    def _try(self, size_bytes: int) -> float:
        """Take from the bucket if it has no debt; otherwise return the seconds to wait."""
        if self._words is None or self._words[_RATE] < 0:
            return 0.0
        with self._mutex, _only_process(self._shared.descriptor):
            rate_bytes_s = self._words[_RATE]
            if rate_bytes_s < 0:
                return 0.0
            now_ns = int(self._clock.monotonic_s() * _NS)
            tokens, then_ns = self._shared.tokens
            # Unused tokens expire beyond the burst; bytes taken in advance are owed, at most one step.
            earned = max(0, now_ns - then_ns) * rate_bytes_s // _NS if then_ns else 0
            tokens = min(int(rate_bytes_s * BURST_S), tokens + earned)
            wait_s = POLL_S if rate_bytes_s == 0 else -tokens / rate_bytes_s
            if wait_s <= 0:
                tokens -= size_bytes
            # Advance the time only by whole bytes earned, so that frequent checks lose no fractions.
            at_ns = then_ns + earned * _NS // rate_bytes_s if then_ns and rate_bytes_s else now_ns
            self._shared.tokens = tokens, at_ns
        return wait_s


@contextlib.contextmanager
def _only_process(descriptor: int) -> Iterator[None]:
    """Exclude the transfer's other processes with a kernel lock, which a dead process does not keep."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX, 1)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1)
