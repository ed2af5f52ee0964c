"""Conditions that abort a drill, each with a name and a sentence.

Local conditions are evaluated ten times a second, and conditions that need requests to the cluster once a second. The
first condition that holds or cannot be evaluated aborts the drill.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from forebay.cluster.client import ApiError, Client
from forebay.cluster.drills.copies.exercises import Exercise
from forebay.cluster.drills.figures import SLOWER_MAX, latency_us, longest_gap_us
from forebay.cluster.drills.final_checks import ask_each
from forebay.cluster.drills.machines import Machines
from forebay.cluster.drills.probes import Probes
from forebay.cluster.schemas import DigestsAnswer, StatusView
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Address, Clock
from forebay.replica.values import MICROSECONDS_PER_SECOND

CONTROL_S: Final = 2.0
"""Seconds of measurement before the fault, for comparison."""

LOOK_S: Final = 0.1
"""Seconds between two evaluations of local conditions."""

MEMBERS_EVERY_S: Final = 1.0
"""Seconds between two requests to all members."""

STATUS_S: Final = 2.0
"""Time limit for a member's status, seconds."""

COPY_STATUS_S: Final = 15.0
"""Time limit for a member's status during a drill on a copy, seconds: this machine is busy then."""

SLOW_US_LEAST: Final = 100_000
"""Write latency that never counts as slow, µs."""

CALM_S: Final = 1.0
"""Period of writes that is compared, seconds; the same period of uninterrupted writes must precede it."""

_T = TypeVar("_T")


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """Goals and limits of a drill."""

    write_stop_us: int
    """Longest stop of writes for a passed drill, µs."""
    abort_after_us: int
    """Time without an acknowledged write after which the drill is aborted, µs."""
    slower_max: int = SLOWER_MAX
    """Ratio of write latencies, after to before the fault, that aborts the drill; 0 for never."""


class Observations(msgspec.Struct):
    """Input of the local conditions."""

    probes: Probes
    goals: Goals
    halt: str
    """Path of the file that forbids drills; empty if it does not exist."""
    now_s: float
    normal_us: int
    """99th percentile of write latency before the fault, µs; 0 if not known yet."""


class StopConditions:
    """Evaluates the conditions and holds the first reason to abort the drill."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        replicas: dict[str, Address],
        machines: Machines,
        alarm: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """Create the conditions for the replicas at these API addresses.

        `alarm`, such as the site's Prometheus query, returns the reason to abort, or an empty string.
        """
        self.client = client
        self._clock = clock
        self._replicas = replicas
        self._machines = machines
        self.alarm = alarm
        self.reason = ""
        self.status_s = STATUS_S
        """Time limit for a member's status, seconds."""
        self.spared: frozenset[str] = frozenset()
        """Targets of the fault, which need not answer."""
        self.up: frozenset[str] = frozenset()
        """Nodes that were UP before the fault."""

    def stop(self, reason: str) -> None:
        """Record the reason to abort, unless there is one already; ignore an empty reason."""
        self.reason = self.reason or reason

    async def ask_members(self, ask: Callable[[Address], Awaitable[_T]]) -> dict[str, _T]:
        """Return the answers of all replicas, except the target of a fault and those without an answer."""
        return await ask_each({name: at for name, at in self._replicas.items() if name not in self.spared}, ask)

    async def statuses(self) -> dict[str, StatusView]:
        """Return the status of each member that answers in time."""
        return await self.ask_members(
            lambda at: self.client.call(ops.SHOW_STATUS, replica=at, deadline_s=self.status_s)
        )

    async def digests(self) -> dict[str, DigestsAnswer]:
        """Return the state digests of each member that answers in time."""
        return await self.ask_members(lambda at: self.client.call(ops.LIST_DIGESTS, replica=at, deadline_s=STATUS_S))

    async def find_silent(self) -> str:
        """Return a sentence if a member other than the target does not answer."""
        # The target may change between the requests and the answers, so both sets are excluded.
        spared = self.spared
        statuses = await self.statuses()
        silent = sorted(set(self._replicas) - spared - self.spared - set(statuses))
        return f"{', '.join(silent)} did not answer within {self.status_s:g} s" if silent else ""

    async def watch(self, probes: Probes, goals: Goals) -> None:
        """Evaluate the local conditions ten times a second."""
        began_s, normal_us = self._clock.monotonic_s(), 0
        while not self.reason:
            await asyncio.sleep(LOOK_S)
            now_s = self._clock.monotonic_s()
            if not normal_us and now_s >= began_s + CONTROL_S:
                normal_us = latency_us(probes.writes, began_s, now_s, 0.99)
            seen = Observations(probes, goals, self._machines.halt_file, now_s, normal_us)
            for says in OF_WRITES.values():
                self.stop(says(seen))

    async def watch_copy(self, exercise: Exercise, drill: int) -> None:
        """Evaluate the conditions of a drill on a copy once a second."""
        while not self.reason:
            await asyncio.sleep(MEMBERS_EVERY_S)
            halt, abort = self._machines.halt_file, ""
            with contextlib.suppress(ApiError):
                abort = (await self.client.call(ops.SHOW_DRILL, drill=drill, deadline_s=STATUS_S)).abort
            for says in OF_COPIES.values():
                self.stop(says(exercise, abort, halt))

    async def watch_members(self) -> None:
        """Evaluate the conditions that need requests to the cluster once a second."""
        while not self.reason:
            await asyncio.sleep(MEMBERS_EVERY_S)
            for ask in OF_MEMBERS.values():
                # The first reason suffices.
                if not self.reason:
                    self.stop(await ask(self))

    @contextlib.asynccontextmanager
    async def run_watches(self, *watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Run these coroutines and `watch_members` during the block."""
        async with run_during(*map(self._or_stop, (*watches, self.watch_members()))):
            yield

    async def _or_stop(self, watch: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; abort the drill if it raises an exception."""
        try:
            await watch
        except Exception as error:
            self.stop(f"a stop condition could not be evaluated ({type(error).__name__}: {error})")


async def _lock(stops: StopConditions) -> str:
    with contextlib.suppress(ApiError):
        for lock in (await stops.client.call(ops.LIST_DRILLS, deadline_s=STATUS_S)).locks[:1]:
            return f"drills are locked by {lock.by}: {lock.reason}"
    return ""


async def _node_down(stops: StopConditions) -> str:
    spared = stops.spared
    with contextlib.suppress(ApiError):
        nodes = (await stops.client.call(ops.LIST_NODES, deadline_s=STATUS_S)).nodes
        down = sorted({one.name for one in nodes if one.state == "DOWN"} & stops.up - spared - stops.spared)
        return f"{', '.join(down)} went DOWN and is not the target" if down else ""
    return ""


async def _differing_state(stops: StopConditions) -> str:
    odd = sorted(name for name, one in (await stops.digests()).items() if one.verdict in ("disputed", "odd"))
    return f"{', '.join(odd)} differ in state from the other replicas" if odd else ""


async def _alarm(stops: StopConditions) -> str:
    return await stops.alarm() if stops.alarm is not None else ""


def _writes_stopped(seen: Observations) -> str:
    after_s = seen.goals.abort_after_us / MICROSECONDS_PER_SECOND
    is_over = seen.now_s - seen.probes.answered_s > after_s
    return f"no write was acknowledged for {after_s:g} s" if is_over else ""


def _writes_slower(seen: Observations) -> str:
    """Return a sentence if writes that continue after the fault are many times slower than before."""
    now_s, normal_us, slower_max = seen.now_s, seen.normal_us, seen.goals.slower_max
    # Include earlier probes, whose late answers end a gap.
    last = [one for one in seen.probes.writes if one.sent_s >= now_s - 8 * CALM_S]
    if (
        not normal_us
        or not slower_max
        or longest_gap_us(last, now_s - 2 * CALM_S, now_s) > CALM_S / 4 * MICROSECONDS_PER_SECOND
    ):
        return ""
    taken_us = latency_us(last, now_s - 2 * CALM_S, now_s - CALM_S, 0.99)
    if taken_us <= max(slower_max * normal_us, SLOW_US_LEAST):
        return ""
    return f"the p99 write latency is {taken_us / 1000:.0f} ms, and was {normal_us / 1000:.0f} ms before the fault"


def _halt_reason(halt: str) -> str:
    return f"{halt} exists" if halt else ""


OF_WRITES: Final[dict[str, Callable[[Observations], str]]] = {
    "aborted by an operator": lambda seen: seen.probes.abort,
    "a write is rejected": lambda seen: (
        f"a write was rejected: {seen.probes.rejection}" if seen.probes.rejection else ""
    ),
    "measurement failed": lambda seen: seen.probes.unmeasured(),
    "writes stop": _writes_stopped,
    "the halt file exists": lambda seen: _halt_reason(seen.halt),
    "writes are slower": _writes_slower,
}
"""Local conditions of a drill on the cluster, by name."""

OF_MEMBERS: Final[dict[str, Callable[[StopConditions], Awaitable[str]]]] = {
    "drills are locked": _lock,
    "a member is silent": StopConditions.find_silent,
    "a node is down": _node_down,
    "states differ": _differing_state,
    "the site's query": _alarm,
}
"""Conditions of every drill that need requests to the cluster, by name."""

OF_COPIES: Final[dict[str, Callable[[Exercise, str, str], str]]] = {
    "aborted by an operator": lambda exercise, abort, halt: abort,
    "the halt file exists": lambda exercise, abort, halt: _halt_reason(halt),
    "too little disk space": lambda exercise, abort, halt: exercise.room_fault(),
}
"""Conditions of a drill on a copy, by name. Arguments are the exercise, an operator's abort reason, the halt file."""


@contextlib.asynccontextmanager
async def run_during(*running: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> AsyncIterator[None]:
    """Run tasks during the block; cancel them at its end and wait until they have ended."""
    tasks = [asyncio.ensure_future(one) for one in running]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
