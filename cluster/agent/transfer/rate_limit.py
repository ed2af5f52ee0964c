"""Holding a transfer down to a rate that may change at any moment, in all of its processes together, and stopping it.

The agent decides the rate (cluster.agent.rate_governor shares out what a node, a user and a cluster may do) and writes
it into a page that the transfer can only read. The transfer keeps one bucket in its own memory
(`SharedCounters.tokens`): who wants to move takes from it, and waits while it is empty. A new rate counts from the next
look on, POLL_S later at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Final

from cluster.agent.transfer.errors import Paused
from cluster.agent.transfer.progress import SharedCounters
from cluster.system import Clock

UNLIMITED: Final = -1
"""A rate that holds nobody back; 0 is a pause."""

POLL_S: Final = 0.05
"""Seconds between two polls of who waits: how long a new rate, a pause's end or a stop may go unseen."""

WAIT_S_MIN: Final = 0.001
"""Least wait, seconds: what a timer is good for."""

BURST_S: Final = 0.1
"""Seconds' worth of a rate that may be saved up while nothing moves: enough to hide a hiccup, too little to be felt."""

STEP_BYTES_MIN: Final = 4096
"""Least that is moved between two polls, bytes: however low the rate, a page goes at once."""

_SEAL_FUTURE_WRITE: Final = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, which the fcntl module of Python 3.11 does not name: whoever maps from then on
reads."""

_RATE: Final = 0
_STOP: Final = 1
_STANDS: Final = 2
_GO, _END, _PAUSE = 0, 1, 2
_NS: Final = 1_000_000_000
_FOR_EVER: Final = 2**63 - 1


class Stopped(BaseException):
    """The transfer is to stop at once and clean up. No Exception, since it is no failure of a file."""


class Control:
    """The agent's side: what a transfer may do now."""

    def __init__(self) -> None:
        """Make a page that says: no limit, go on. `descriptor` is for the transfer's process."""
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
        """Until when the order is certain to stand, monotonic seconds."""
        return self._words[_STANDS] / _NS

    @stands_until_s.setter
    def stands_until_s(self, value: float) -> None:
        self._words[_STANDS] = int(value * _NS)

    def stop(self, *, resuming: bool = False) -> None:
        """Have whoever asks next end: with Paused if it is `resuming`, which leaves what is half done, else Stopped."""
        self._words[_STOP] = _PAUSE if resuming else _END

    def close(self) -> None:
        """Give the page up; a transfer that still looks sees what stood there last."""
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)


class Pace:
    """A transfer's side, for each of its processes; one object serves all threads of a process, and its forks."""

    def __init__(self, control: int, shared: SharedCounters, clock: Clock) -> None:
        """Look at the page behind the descriptor `control`, which stays the caller's; -1: no limit, never stopped."""
        page = None if control < 0 else mmap.mmap(control, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._words = None if page is None else memoryview(page).cast("q")
        self._shared = shared
        self._clock = clock
        self._mutex = threading.Lock()
        self._ended: type[BaseException] | None = None
        self._never = threading.Event()

    def check(self) -> None:
        """Raise Stopped or Paused if the transfer is to stop; cheap enough for every chunk and every entry."""
        if self._words is not None and self._words[_STOP] != _GO:
            raise Paused if self._words[_STOP] == _PAUSE else Stopped
        if self._ended is not None:
            raise self._ended

    def end(self, error: type[BaseException]) -> None:
        """Have `check` raise this from now on, in this process, unless the agent's page says something else.

        For the handler of a signal: it may run between any two steps, so that what it raised itself could undo half of
        one, such as a descriptor that is closed and not yet known to be. Whoever waits looks every POLL_S.
        """
        self._ended = error

    def await_order(self) -> None:
        """Return as soon as it is certain that the order stands; Stopped or Paused if the transfer is to stop."""
        self.check()
        while self._words is not None and self._words[_STANDS] < self._clock.monotonic_s() * _NS:
            self._shared.waited()
            self._never.wait(POLL_S)
            self.check()

    def step_bytes(self, most: int) -> int:
        """Return how much to move at once, after a `take` of it: at most `most`, and a tenth of a second's worth."""
        rate_bytes_s = UNLIMITED if self._words is None else self._words[_RATE]
        if rate_bytes_s < 0:
            return most
        return min(most, max(STEP_BYTES_MIN, rate_bytes_s // 10))

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may be moved; Stopped or Paused at once if the transfer is to stop."""
        self.check()
        wait_s = self._try(size_bytes)
        while wait_s > 0:
            self._shared.waited()
            self._never.wait(max(WAIT_S_MIN, min(wait_s, POLL_S)))
            self.check()
            wait_s = self._try(size_bytes)

    def _try(self, size_bytes: int) -> float:
        """Take from the bucket if nothing is owed; return how long to wait otherwise, seconds."""
        if self._words is None or self._words[_RATE] < 0:
            return 0.0
        with self._mutex, _only_process(self._shared.descriptor):
            rate_bytes_s = self._words[_RATE]
            if rate_bytes_s < 0:
                return 0.0
            now_ns = int(self._clock.monotonic_s() * _NS)
            tokens, then_ns = self._shared.tokens
            # What nobody took is lost but for the burst, and what was taken ahead is owed, a step at most.
            earned = max(0, now_ns - then_ns) * rate_bytes_s // _NS if then_ns else 0
            tokens = min(int(rate_bytes_s * BURST_S), tokens + earned)
            wait_s = POLL_S if rate_bytes_s == 0 else -tokens / rate_bytes_s
            if wait_s <= 0:
                tokens -= size_bytes
            # Only as far as whole bytes were earned: who looks often must not lose a fraction each time.
            at_ns = then_ns + earned * _NS // rate_bytes_s if then_ns and rate_bytes_s else now_ns
            self._shared.tokens = tokens, at_ns
        return wait_s


@contextlib.contextmanager
def _only_process(descriptor: int) -> Iterator[None]:
    """Keep the other processes of the transfer out: a lock of the kernel's, which a dead one does not keep."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX, 1)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1)
