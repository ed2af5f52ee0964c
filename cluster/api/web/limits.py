"""Limits per user: commands and bytes per minute, and unfinished jobs and script bytes.

Only the leader counts, in memory, with one token bucket per user. Operators and agents are not limited, because their
certificates allow worse.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from forebay.cluster.api.web.problems import too_many
from forebay.cluster.config import LimitsConfig
from forebay.cluster.security import Identity, Role
from forebay.cluster.system import Clock
from forebay.cluster.system.eventloop import SlicedWork, iterate_paced
from forebay.replica.messages import Command, SubmitJob
from forebay.replica.state import State

USERS_MAX = 10_000
"""Users with a bucket, count; beyond that the longest full buckets are dropped."""

RECOUNT_S = 5.0
"""Lifetime of a user's count, seconds; an apparent excess then triggers a recount."""

SECONDS_PER_MINUTE = 60


class Bucket:
    """Token bucket refilled per minute with one minute's capacity. A larger cost requires a full bucket."""

    __slots__ = ("_level", "_per_minute", "_since_s")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._since_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Return the wait until the amount is available, seconds."""
        passed_s = max(0.0, now_s - self._since_s)
        self._level = min(float(self._per_minute), self._level + passed_s * self._per_minute / SECONDS_PER_MINUTE)
        self._since_s = now_s
        lacking = min(amount, self._per_minute) - self._level
        return max(0.0, lacking * SECONDS_PER_MINUTE / self._per_minute)

    def take(self, amount: int) -> None:
        """Take an amount that `wait_s` found available."""
        self._level -= amount


class _User:
    """Usage of one user."""

    def __init__(self, limits: LimitsConfig, now_s: float) -> None:
        self.commands = Bucket(limits.commands_per_minute, now_s)
        self.bytes = Bucket(limits.bytes_per_minute, now_s)
        self.jobs = 0
        self.script_bytes = 0
        """Upper bound of unfinished work: the last count plus later submits."""
        self.counted_at_s = -math.inf


class UserLimits:
    """The bounds of [limits], and each user's usage."""

    def __init__(
        self, limits: LimitsConfig, clock: Clock, *, state: Callable[[], State], work: Callable[[Identity], SlicedWork]
    ) -> None:
        """`state` returns the applied state, in which usage is counted, `work` the slicing of that."""
        self._limits = limits
        self._clock = clock
        self._state = state
        self._work = work
        self._users: dict[str, _User] = {}
        self._counting: set[asyncio.Task[None]] = set()

    def renew(self, limits: LimitsConfig) -> None:
        """Apply new bounds, and refill all buckets."""
        self._limits = limits
        self._users.clear()

    def charge(self, identity: Identity, command: Command, size_bytes: int) -> None:
        """Charge one command of a size.

        Raises:
            Problem: 429, if the user must wait.
        """
        if identity.role is not Role.USER:
            return
        now_s, limits = self._clock.monotonic_s(), self._limits
        user = self._user(identity.name, now_s)
        for bucket, amount, most, what in (
            (user.commands, 1, limits.commands_per_minute, "commands"),
            (user.bytes, size_bytes, limits.bytes_per_minute, "bytes of commands"),
        ):
            wait_s = bucket.wait_s(amount, now_s)
            if wait_s:
                words = f"{identity} has sent {most} {what} within a minute, the maximum for one user"
                remedy = "send it again after the time in Retry-After; an operator sets the limit in [limits]"
                raise too_many(words, remedy, math.ceil(wait_s))
        user.commands.take(1)
        user.bytes.take(size_bytes)
        if isinstance(command, SubmitJob):
            self._check_jobs(identity, user, command, now_s)

    def _check_jobs(self, identity: Identity, user: _User, command: SubmitJob, now_s: float) -> None:
        """Charge the jobs and scripts of a submit.

        Raises:
            Problem: 429, if the user has too many unfinished ones.
        """
        jobs, script_bytes = max(1, len(command.tasks)), len(command.request.script)
        limits = self._limits
        over = user.jobs + jobs > limits.jobs or user.script_bytes + script_bytes > limits.script_bytes
        if (over and now_s - user.counted_at_s >= RECOUNT_S) or user.counted_at_s == -math.inf:
            user.counted_at_s = now_s
            task = asyncio.get_running_loop().create_task(
                self._count(identity, user, self._state(), user.jobs, user.script_bytes)
            )
            self._counting.add(task)
            task.add_done_callback(self._counting.discard)
        for has, more, most, what in (
            (user.jobs, jobs, limits.jobs, "jobs"),
            (user.script_bytes, script_bytes, limits.script_bytes, "bytes of scripts of jobs"),
        ):
            if has + more > most:
                words = f"{identity} has {has} {what} that have not finished; one user may have at most {most}"
                remedy = "wait until some have finished; an operator sets the limit in [limits]"
                raise too_many(words, remedy, int(RECOUNT_S))
        user.jobs += jobs
        user.script_bytes += script_bytes

    def _user(self, name: str, now_s: float) -> _User:
        user = self._users.pop(name, None)
        if user is None:
            user = _User(self._limits, now_s)
            if len(self._users) >= USERS_MAX:
                del self._users[next(iter(self._users))]
        self._users[name] = user  # keeps the most recent user last
        return user

    async def _count(self, identity: Identity, user: _User, state: State, jobs: int, script_bytes: int) -> None:
        """Recount a user's unfinished work, in slices.

        `jobs` and `script_bytes` are the amounts assumed at `state`.
        """
        jobs, script_bytes = -jobs, -script_bytes
        async for job_id in iterate_paced(state.unfinished, self._work(identity), parts=1):
            request = state.jobs[job_id].request
            if request.user == identity.name:
                jobs += 1
                script_bytes += len(request.script)
        # Add submits that are newer than that state.
        user.jobs += jobs
        user.script_bytes += script_bytes
