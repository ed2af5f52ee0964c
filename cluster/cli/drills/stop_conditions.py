"""The conditions that end a drill before its time: each has a name, and says why in a sentence.

Those that ask nobody are looked at ten times a second, those that ask the cluster each second. The first that holds
ends the drill; one that cannot be looked at ends it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from cluster.cli.drills.copies.exercises import Exercise
from cluster.cli.drills.figures import SLOWER_MAX, latency_us, longest_gap_us
from cluster.cli.drills.final_checks import ask_each
from cluster.cli.drills.machines import Machines
from cluster.cli.drills.probes import Probes
from cluster.client import ApiError, Client
from cluster.schemas import DigestsAnswer, StatusView
from cluster.schemas import operations as ops
from cluster.system import Address, Clock
from replica.values import MICROSECONDS_PER_SECOND

CONTROL_S: Final = 2.0
"""Seconds without a fault, before it: what is normal here."""

LOOK_S: Final = 0.1
"""Seconds between two looks at what asks nobody."""

MEMBERS_EVERY_S: Final = 1.0
"""Seconds between two questions to all members."""

STATUS_S: Final = 2.0
"""Seconds in which a member says how it stands."""

COPY_STATUS_S: Final = 15.0
"""And while a copy is exercised, which is no reason for a member to be silent but that this machine is busy."""

SLOW_US_LEAST: Final = 100_000
"""What is never slow, µs: the leader's clock of a second may be out of step with a client's for that long."""

CALM_S: Final = 1.0
"""Seconds of writes that are judged so, and for how long they have to go on again before."""

_T = TypeVar("_T")


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """What a drill has to keep to."""

    write_stop_us: int
    """For how long writes may stop, µs, for it to be passed."""
    abort_after_us: int
    """After how long without an acknowledged write it is aborted, µs."""
    slower_max: int = SLOWER_MAX
    """How many times as long as before writes may take; 0: that aborts nothing."""


class Observations(msgspec.Struct):
    """What is looked at without asking anybody."""

    probes: Probes
    goals: Goals
    halt: str
    """The file that says that there shall be no drill; empty: it is not there."""
    now_s: float
    normal_us: int
    """What writes took before the fault, at their 99th percentile, µs; 0: not known yet."""


class StopConditions:
    """Why a drill has to end: the first reason that any condition gave."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        replicas: dict[str, Address],
        machines: Machines,
        alarm: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`replicas`: where each is asked about itself. `alarm` says why a drill has to end, nothing while it has not.

        The site's own condition, a query of Prometheus, is such an alarm.
        """
        self.client = client
        self._clock = clock
        self._replicas = replicas
        self._machines = machines
        self.alarm = alarm
        self.reason = ""
        self.status_s = STATUS_S
        """Seconds in which a member says how it stands."""
        self.spared: frozenset[str] = frozenset()
        """Who may be silent or lost: the target of a fault."""
        self.up: frozenset[str] = frozenset()
        """Nodes that were UP."""

    def stop(self, reason: str) -> None:
        """Have the drill end, unless it has to already; empty: for nothing."""
        self.reason = self.reason or reason

    async def ask_members(self, ask: Callable[[Address], Awaitable[_T]]) -> dict[str, _T]:
        """Return what each replica answers that does, but for the target of a fault."""
        return await ask_each({name: at for name, at in self._replicas.items() if name not in self.spared}, ask)

    async def statuses(self) -> dict[str, StatusView]:
        """Return how members stand, of those who say so in time."""
        return await self.ask_members(
            lambda at: self.client.call(ops.SHOW_STATUS, replica=at, deadline_s=self.status_s)
        )

    async def digests(self) -> dict[str, DigestsAnswer]:
        """Return what members hold, of those who say so in time."""
        return await self.ask_members(lambda at: self.client.call(ops.LIST_DIGESTS, replica=at, deadline_s=STATUS_S))

    async def find_silent(self) -> str:
        """Return that a member which should does not answer."""
        # Who is the target when all are asked may be none any more when they have answered, and the other way round.
        spared = self.spared
        statuses = await self.statuses()
        find_silent = sorted(set(self._replicas) - spared - self.spared - set(statuses))
        return f"{', '.join(find_silent)} did not answer for {self.status_s:g} s" if find_silent else ""

    async def watch(self, probes: Probes, goals: Goals) -> None:
        """Look ten times a second at what asks nobody."""
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
        """Look each second at what ends one on a copy, beside what its cluster says."""
        while not self.reason:
            await asyncio.sleep(MEMBERS_EVERY_S)
            halt, abort = self._machines.halt_file, ""
            with contextlib.suppress(ApiError):
                abort = (await self.client.call(ops.SHOW_DRILL, drill=drill, deadline_s=STATUS_S)).abort
            for says in OF_COPIES.values():
                self.stop(says(exercise, abort, halt))

    async def watch_members(self) -> None:
        """Ask the cluster each second."""
        while not self.reason:
            await asyncio.sleep(MEMBERS_EVERY_S)
            for ask in OF_MEMBERS.values():
                # Not all where one has said why, or somebody else has meanwhile.
                if not self.reason:
                    self.stop(await ask(self))

    @contextlib.asynccontextmanager
    async def run_watches(self, *watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Have watches run during the block, beside what asks the cluster."""
        async with run_during(*map(self._or_stop, (*watches, self.watch_members()))):
            yield

    async def _or_stop(self, watch: Coroutine[Any, Any, None]) -> None:
        """Run a watch; without it there is no drill, whatever it met."""
        try:
            await watch
        except Exception as error:
            self.stop(f"what would stop it cannot be looked at ({type(error).__name__}: {error})")


async def _lock(stops: StopConditions) -> str:
    with contextlib.suppress(ApiError):
        for lock in (await stops.client.call(ops.LIST_DRILLS, deadline_s=STATUS_S)).locks[:1]:
            return f"{lock.by} wants no drills: {lock.reason}"
    return ""


async def _node_down(stops: StopConditions) -> str:
    spared = stops.spared
    with contextlib.suppress(ApiError):
        nodes = (await stops.client.call(ops.LIST_NODES, deadline_s=STATUS_S)).nodes
        down = sorted({one.name for one in nodes if one.state == "DOWN"} & stops.up - spared - stops.spared)
        return f"{', '.join(down)} is DOWN, and is not the target" if down else ""
    return ""


async def _differing_state(stops: StopConditions) -> str:
    odd = sorted(name for name, one in (await stops.digests()).items() if one.verdict in ("disputed", "odd"))
    return f"{', '.join(odd)} hold another state than the others" if odd else ""


async def _alarm(stops: StopConditions) -> str:
    return await stops.alarm() if stops.alarm is not None else ""


def _writes_stopped(seen: Observations) -> str:
    after_s = seen.goals.abort_after_us / MICROSECONDS_PER_SECOND
    is_over = seen.now_s - seen.probes.answered_s > after_s
    return f"no write was acknowledged for {after_s:g} s" if is_over else ""


def _writes_slower(seen: Observations) -> str:
    """Return that writes take many times as long as before, once they go on again."""
    now_s, normal_us, slower_max = seen.now_s, seen.normal_us, seen.goals.slower_max
    # Sent earlier, too: an answer of then ends no time without one.
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
    return f"of 100 writes one takes {taken_us / 1000:.0f} ms, before it were {normal_us / 1000:.0f} ms"


def _halt_reason(halt: str) -> str:
    return f"{halt} is there" if halt else ""


OF_WRITES: Final[dict[str, Callable[[Observations], str]]] = {
    "somebody aborts it": lambda seen: seen.probes.abort,
    "a write is refused": lambda seen: f"a write was refused: {seen.probes.refusal}" if seen.probes.refusal else "",
    "nobody measures": lambda seen: seen.probes.unmeasured(),
    "writes stop": _writes_stopped,
    "the file is there": lambda seen: _halt_reason(seen.halt),
    "writes are slower": _writes_slower,
}
"""What ends one in which writes are sent to the cluster, by what is the case."""

OF_MEMBERS: Final[dict[str, Callable[[StopConditions], Awaitable[str]]]] = {
    "drills are locked": _lock,
    "a member is silent": StopConditions.find_silent,
    "a node is down": _node_down,
    "states differ": _differing_state,
    "the site's query": _alarm,
}
"""What ends each drill."""

OF_COPIES: Final[dict[str, Callable[[Exercise, str, str], str]]] = {
    "somebody aborts it": lambda exercise, abort, halt: abort,
    "the file is there": lambda exercise, abort, halt: _halt_reason(halt),
    "a copy has no room": lambda exercise, abort, halt: exercise.room_fault(),
}
"""What ends one on a copy: of an exercise, who has aborted it, and the file."""


@contextlib.asynccontextmanager
async def run_during(*running: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> AsyncIterator[None]:
    """Have these run during the block; at its end they are cancelled, and have ended."""
    tasks = [asyncio.ensure_future(one) for one in running]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
