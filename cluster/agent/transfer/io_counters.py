"""How far a program is that moves data by itself: what its processes have read and written, by the kernel's count.

It makes a program's work visible (one that is stuck stands still, as a transfer of ours does), and holds it to a rate:
its processes are stopped while it is ahead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final, NamedTuple

from cluster.agent.transfer.context import Pacer, Unpaced
from cluster.system import descendants, send

LOOK_S: Final = 0.1
"""Seconds between two looks at how far a program is: it is stopped as soon as it is ahead of its rate by as much, and
this is what looking costs of a hundredth of a processor."""

_IO_BYTES_MAX: Final = 4096
"""What is read of /proc/PID/io, bytes: seven lines."""

_STEP_BYTES: Final = 1 << 40
"""More than any rate moves at once: what is allowed of it says whether there is a rate."""


class _Io(NamedTuple):
    """What a process has done, and the children that it waited for, bytes."""

    read: int
    written: int
    """To files and pipes."""
    dirtied: int
    """Of pages that go to a disk."""


class IoWatch:
    """Told of a program from time to time (`look`, for guard.run); says that it lives, and holds it to the pace."""

    def __init__(self, alive: Callable[[], None], pace: Pacer | None = None) -> None:
        """`alive` is told of every look that found it further than the one before."""
        self._alive = alive
        self._pace = pace or Unpaced()
        self._seen: dict[int, int] = {}
        # A process has in its count what those of its children did that it waited for, so that none is lost, and none
        # counted twice: the sum over all that live, this one among them, only grows.
        self._written = _written_by([os.getpid()])
        self._handed = _handed_by([os.getpid()])

    def look(self, _child: int) -> None:
        """See what the processes beneath this one have done since the last look; raises what ends the transfer."""
        self._pace.check()
        pids = descendants(os.getpid())
        seen = {pid: count.read + count.written for pid in pids if (count := _io_of(pid)) is not None}
        if any(moved > self._seen.get(pid, 0) for pid, moved in seen.items()):
            self._alive()
        self._seen = seen
        every = [os.getpid(), *pids]
        written, handed = max(self._written, _written_by(every)), max(self._handed, _handed_by(every))
        # File systems without a disk of this machine are not counted by the kernel: what was handed to it is, with what
        # went through pipes, so that such a program is rather slower than its rate than faster.
        ahead = written - self._written or handed - self._handed
        self._written, self._handed = written, handed
        if ahead and self._pace.step_bytes(_STEP_BYTES) < _STEP_BYTES:
            self._hold(pids, ahead)

    def _hold(self, pids: list[int], written: int) -> None:
        for pid in pids:
            send(pid, signal.SIGSTOP)
        try:
            # The bucket owes what was taken ahead, and waits for it with the next byte.
            self._pace.take(written)
            self._pace.take(1)
        finally:
            for pid in pids:
                send(pid, signal.SIGCONT)


def _written_by(pids: list[int]) -> int:
    return sum(count.dirtied for count in map(_io_of, pids) if count is not None)


def _handed_by(pids: list[int]) -> int:
    return sum(count.written for count in map(_io_of, pids) if count is not None)


def _io_of(pid: int) -> _Io | None:
    """Return what a process has done; None if it is gone."""
    found: dict[bytes, int] = {}
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            for line in file.read(_IO_BYTES_MAX).splitlines():
                name, _, number = line.partition(b":")
                found[name] = int(number)
        return _Io(found[b"rchar"], found[b"wchar"], found[b"write_bytes"])
    except (OSError, ValueError, KeyError):
        return None
