"""Tracking of Slurm's running stage-ins, so that a cancelled one ends quietly.

When a job is cancelled, Slurm kills the running call of its stage-in and calls `teardown`. Between two calls there is
nothing to kill: the stage-in continues, and its next call finds the buffer torn down. If that call failed, Slurm would
show the failure as the reason of the cancelled job, which would alarm administrators. If it succeeded after the
teardown, Slurm would mark the buffer as staged again. So the remaining calls succeed, and the teardown is answered
after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from forebay.cluster.slurm.checks import POLL_DEFAULT_S
from forebay.cluster.slurm.files import uptime_s

NEXT_S: Final = 10.0
"""Seconds within which Slurm makes the next call of a stage-in, even on a busy host.

Only the teardown of a job whose next call was killed waits for this time.
"""

POLLED_AGAIN_S: Final = POLL_DEFAULT_S + NEXT_S
"""Seconds within which Slurm makes the next call after a reply of `busy`: Slurm's default PollInterval."""

READ_S: Final = 1.0
"""Seconds within which a caller reads a reply, unless it was killed.

The time is short, because a waiting teardown may be killed as well.
"""

SETTLE_S: Final = 10.0
"""Seconds within which Slurm marks a buffer as staged in after the last call of its stage-in.

The threads of all cancelled jobs wait for one lock: of 148 jobs on a busy host six took more than two seconds.
"""


class StageIns:
    """Stage-ins of one slurmctld, by job ID."""

    def __init__(self, now_s: Callable[[], float] = uptime_s) -> None:
        """Begin without stage-ins; `now_s` is a monotonic clock, seconds."""
        self._now_s = now_s
        self._due_s: dict[str, float] = {}
        """Jobs whose next call or whose reading of a reply is expected -> deadline."""
        self._calls: Counter[str] = Counter()
        """Jobs -> running calls."""
        self._leaving: dict[str, asyncio.Event] = {}
        """Jobs being torn down -> event that is set when a stage-in call was answered, and when the reply was read."""
        self._succeeded: set[str] = set()
        """Jobs being torn down whose stage-in was answered with success."""

    def is_leaving(self, job: str) -> bool:
        """Return whether the job is being torn down, so that its remaining stage-in calls succeed."""
        return job in self._leaving

    @contextlib.contextmanager
    def running_call(self, job: str) -> Iterator[None]:
        """Note that a call of the stage-in runs."""
        self._due_s.pop(job, None)
        self._calls[job] += 1
        try:
            yield
        finally:
            self._calls[job] -= 1
            if not self._calls[job]:
                del self._calls[job]
                self._due_s[job] = self._now_s() + READ_S
                if job in self._leaving:
                    self._leaving[job].set()

    def note_reply(self, job: str, next_s: float) -> None:
        """Note that Slurm has read a reply; its next call comes within `next_s` seconds, 0 if there is none."""
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
        """Tear a job down within this context; it ends once Slurm's stage-in of the job has ended."""
        changed = self._leaving[job] = asyncio.Event()
        try:
            yield
            # The leader may answer a running call later than the teardown.
            while job in self._calls or self._due_s.get(job, -math.inf) > self._now_s():
                left_s = None if job in self._calls else self._due_s[job] - self._now_s()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await changed.wait()
                changed.clear()
            if job in self._succeeded:
                await asyncio.sleep(SETTLE_S)
        finally:
            self._succeeded.discard(job)
            self._due_s.pop(job, None)
            del self._leaving[job]
