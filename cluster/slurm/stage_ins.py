"""Stage-ins under way at Slurm, as their calls show them, so that a cancelled one can end quietly.

When a job is cancelled, Slurm kills the call of its stage-in that is running, and calls `teardown`. Between two calls
there is nothing to kill: the stage-in goes on, and its next call finds the buffer torn down. A failure then is shown as
the reason of a job that was only cancelled, and alarms administrators; a success later than the teardown would mark the
buffer as staged again. So the calls that are still to come succeed, and the teardown is answered after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from cluster.slurm.checks import POLL_DEFAULT_S
from cluster.slurm.files import uptime_s

NEXT_S: Final = 2.0
"""Seconds within which Slurm makes the next call of a stage-in after an answer: a fork and some locks."""

POLLED_AGAIN_S: Final = POLL_DEFAULT_S + NEXT_S
"""The same after an answer that the stage-in goes on, seconds: PollInterval, which is at most Slurm's default."""

READ_S: Final = 0.5
"""Seconds within which an answer to a call that is running is read; the caller was killed if it is not. Short, since
what killed it may also kill a teardown that waits.
"""

SETTLE_S: Final = 2.0
"""Seconds after the last call of a stage-in within which Slurm has marked its buffer as staged in."""


class StageIns:
    """Stage-ins of one slurmctld, by the numbers of their jobs."""

    def __init__(self, now_s: Callable[[], float] = uptime_s) -> None:
        """`now_s` is a clock that never goes back, seconds."""
        self._now_s = now_s
        self._due_s: dict[str, float] = {}
        """Jobs whose next call is awaited -> until when."""
        self._calls: Counter[str] = Counter()
        """Jobs -> calls that are running."""
        self._leaving: dict[str, asyncio.Event] = {}
        """Jobs whose teardown is under way -> set when a call of the stage-in was answered."""
        self._succeeded: set[str] = set()
        """Those of them whose stage-in was told that it had ended well."""

    def is_leaving(self, job: str) -> bool:
        """Whether the job's teardown is under way: what is left of its stage-in succeeds."""
        return job in self._leaving

    @contextlib.contextmanager
    def called(self, job: str) -> Iterator[None]:
        """Note that a call of the stage-in runs."""
        self._due_s.pop(job, None)
        self._calls[job] += 1
        try:
            yield
        finally:
            self._calls[job] -= 1
            if not self._calls[job]:
                del self._calls[job]

    def answered(self, job: str, next_s: float) -> None:
        """Note that Slurm has read an answer: its next call comes within so many seconds, 0: there is none."""
        if next_s:
            self._due_s[job] = self._now_s() + next_s
        else:
            self._due_s.pop(job, None)
        if job in self._leaving:
            if not next_s:
                self._succeeded.add(job)
            self._leaving[job].set()

    @contextlib.asynccontextmanager
    async def leaving(self, job: str) -> AsyncIterator[None]:
        """Tear a job down within this; it ends when Slurm's stage-in of the job has ended."""
        until_s = self._due_s.pop(job, -math.inf)
        if self._calls[job]:
            until_s = max(until_s, self._now_s() + READ_S)
        changed = self._leaving[job] = asyncio.Event()
        try:
            yield
            while (left_s := max(until_s, self._due_s.get(job, -math.inf)) - self._now_s()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await changed.wait()
                if changed.is_set():
                    changed.clear()
                    until_s = -math.inf
            if job in self._succeeded:
                await asyncio.sleep(SETTLE_S)
        finally:
            self._succeeded.discard(job)
            self._due_s.pop(job, None)
            del self._leaving[job]
