"""One drill carried out: probes, the fault, stop conditions, what was measured, and its end in the ledger.

The client is outside of the cluster, as its users are: what it measures is when the cluster answers. First it looks for
a while without a fault (the control). A fault on a machine is done by its helper, under a lease that is renewed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.cli.drills.aftermath import answered_again, disagreement, happened
from cluster.cli.drills.copies.exercises import Exercise, Given
from cluster.cli.drills.copies.replicas import CopyFailed
from cluster.cli.drills.copies.room import look_at_room
from cluster.cli.drills.figures import latency_us, longest_gap_us, lost
from cluster.cli.drills.machines import Machines
from cluster.cli.drills.preconditions import DURATION_MORE_S, Found, Plan, Wanted, target_of
from cluster.cli.drills.probes import NotMeasured, Probes, Writer
from cluster.cli.drills.scenarios import SCENARIOS, Scenario
from cluster.cli.drills.stop_conditions import CONTROL_S, COPY_STATUS_S, LOOK_S, STATUS_S, Goals, Stops, during
from cluster.cli.exits import Failure
from cluster.client import ApiError, Client
from cluster.drill import RENEW_EVERY_S, Begin, Channel, End, HelperRefused, Renew
from cluster.schemas import Command
from cluster.schemas import operations as ops
from cluster.schemas.drills import DrillAnswer, EndDrillRequest, StartDrillRequest
from cluster.schemas.requests import TransferRequest
from cluster.system import Address, Clock
from replica.values import DRILL_S_MAX, MESSAGE_CHARACTERS_MAX, MICROSECONDS_PER_SECOND, plain

SETTLE_S: Final = 2.0
"""Seconds that are looked at after the fault."""

BACK_S: Final = 60.0
"""Seconds in which a target has to be back once its fault is undone: a replica replays its journal meanwhile."""

SECOND_S: Final = 300
"""Seconds in which another operator has to agree where a machine wants that."""

ALIVE_EVERY_S: Final = 1.0
"""Seconds between two words of this client that it is there."""

LEASE_MORE_S: Final = 5
"""Seconds for which the cluster waits for one beyond the time that writes may stop."""

LASTS_S: Final = 120
"""Seconds, beside the hold of a fault and what waits for its end, after which the ledger takes a drill for over."""

END_S: Final = 30.0
"""Seconds in which its end is to be in the ledger."""

_AGAIN: Final = {
    "stage_retried": "stages_again",
    "job_requeued": "runs_again",
    "run_requeued": "runs_again",
    "node_went_down": "nodes_lost",
}
"""Events that a drill should not lead to -> the figure that counts them."""


class Aborted(Exception):
    """A drill that has to end before its time; why, in a sentence."""


class Fault(msgspec.Struct):
    """What was seen of a fault on a machine. Moments are seconds of the monotonic clock."""

    done_s: float = 0.0
    undone_s: float = 0.0
    took_over: str = ""
    """Who led while the target could not."""
    was_down: bool = False
    """Whether the target's node was DOWN."""
    agents_back_us: int | None = None
    """After how long the leader had heard of all other agents, µs."""
    back_us: int | None = None
    """How long the target needed to be there again once it was undone, µs."""


class Coordinator:
    """Who carries out drills of a cluster."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        replicas: dict[str, Address],
        machines: Machines,
        writer: Writer,
        tell: Callable[[str], None],
        *,
        require_second: bool = False,
        exercise: Callable[..., Exercise] = Exercise,
        alarm: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`replicas`: where each is asked about itself; `writer` measures for how long writes stop; `tell` is called
        with what is done, a sentence each.

        `alarm` is asked each second why a drill has to end, and says nothing while it has not.
        """
        self._client = client
        self._clock = clock
        self._replicas = replicas
        self._machines = machines
        self._writer = writer
        self._tell = tell
        self._require_second = require_second
        self._stops = Stops(client, clock, replicas, machines, alarm)
        self._exercise = exercise
        self._drill: DrillAnswer | None = None
        self._began_s = clock.monotonic_s()
        """When the ledger had its beginning."""
        self._figures: dict[str, int] = {}
        """What was measured so far of a copy."""

    async def look(self, wanted: Wanted) -> Found:
        """Ask the cluster and the target's machine what a plan needs; ApiError."""
        members, drills, nodes, moving = await asyncio.gather(
            self._client.call(ops.LIST_MEMBERS),
            self._client.call(ops.LIST_DRILLS),
            self._client.call(ops.LIST_NODES),
            self._client.call(ops.LIST_TRANSFERS),
        )
        statuses, digests, certificates_s = await asyncio.gather(
            self._stops.statuses(), self._stops.digests(), self._machines.certificates_s()
        )
        found = Found(
            members=members,
            statuses=statuses,
            digests=digests,
            drills=drills,
            nodes=nodes.nodes,
            stage_outs=tuple(one.job_id for one in moving.transfers if one.stage == "stage_out"),
            certificates_s=certificates_s,
            site=self._machines.site(),
        )
        if SCENARIOS[wanted.scenario].on_copy:
            size_bytes = await self._snapshot_bytes(wanted, target_of(found, wanted))
            return msgspec.structs.replace(found, room=look_at_room(wanted.place, size_bytes))
        if not SCENARIOS[wanted.scenario].needs:
            return found
        helper, off_s = await self._machines.look(wanted.scenario, target_of(found, wanted))
        if not isinstance(helper, str):
            until_us = helper.figures.get("certificate_until_us", 0)
            left_s = (until_us - self._clock.now()) / MICROSECONDS_PER_SECOND
            found = msgspec.structs.replace(found, certificates_s={**certificates_s, "its helper": left_s})
        return msgspec.structs.replace(found, helper=helper, helper_clock_s=off_s)

    async def _snapshot_bytes(self, wanted: Wanted, target: str) -> int:
        """Return the size of what a copy would be made of, as far as is known; ApiError where it may not be read."""
        if wanted.backup is not None:
            with contextlib.suppress(OSError):
                return wanted.backup.stat().st_size
            return 0
        at = self._replicas.get(target)
        if at is None:
            return 0
        try:
            rows = (await self._client.call(ops.LIST_SNAPSHOTS, replica=at, deadline_s=STATUS_S)).snapshots
        except ApiError as error:
            if error.status == HTTPStatus.FORBIDDEN:
                raise
            return 0
        return rows[0].size_bytes if rows else 0

    async def run(self, plan: Plan, goals: Goals) -> DrillAnswer:
        """Carry out a plan, and return the drill as it ended; ApiError where it could not begin or its end not be said.

        However this ends, but for the end of the process, the ledger hears of it; without that the drill is lost.
        """
        waits_s = SECOND_S if self._require_second else 0
        lasts_s = LASTS_S + plan.hold_s + (round(BACK_S) if plan.hold_s else 0) + waits_s
        if SCENARIOS[plan.scenario].on_copy:
            lasts_s = DRILL_S_MAX
        request = StartDrillRequest(
            command_id=self._client.new_command_id(),
            scenario=plan.scenario,
            target=plan.target,
            lasts_s=lasts_s,
            forced=plan.forced,
            plan=plan.id,
            lease_s=lease_of(goals),
        )
        drill = self._drill = await self._client.call(ops.START_DRILL, request)
        self._began_s = self._clock.monotonic_s()
        self._tell(f"drill {drill.drill} began: {plan.scenario} of {plan.target}")
        verdict, sentence, figures = "aborted", "ended from the keyboard", dict[str, int]()
        alive = asyncio.create_task(self._alive(drill.drill))
        try:
            async with asyncio.timeout(lasts_s - END_S / 2):
                if self._require_second:
                    await self._seconded(drill.drill)
                verdict, sentence, figures = await self._carried_out(plan, goals)
        except Aborted as error:
            sentence = str(error)
        except CopyFailed as error:
            verdict, sentence, figures = "failed", str(error), self._figures
        except HelperRefused as error:
            sentence = f"its helper: {error}"
        except NotMeasured as error:
            sentence = str(error)
        except TimeoutError:
            sentence = "it was not over in its time"
        except ApiError as error:
            sentence = f"it could not go on: {error}"
        except (Failure, OSError) as error:
            sentence = f"no copy could be made: {error}"
        finally:
            alive.cancel()
            ending = asyncio.ensure_future(self._end(drill.drill, verdict, sentence, figures))
            # Also where the keyboard ended it: once more, and nobody waits.
            ended = await asyncio.shield(ending)
        return ended

    async def _alive(self, drill: int) -> None:
        """Have the cluster know that somebody carries it out."""
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            request = Command(command_id=self._client.new_command_id())
            # Why a probe is refused is found by those that are measured.
            with contextlib.suppress(ApiError):
                await self._client.call(ops.PROBE_DRILL, request, drill=drill, deadline_s=STATUS_S)

    async def _seconded(self, drill: int) -> None:
        """Wait for another operator; Aborted."""
        self._tell(f"another operator has to agree within {SECOND_S} s: forebay drill confirm {drill}")
        until_s = self._clock.monotonic_s() + SECOND_S
        while self._clock.monotonic_s() < until_s:
            known = await self._client.call(ops.SHOW_DRILL, drill=drill)
            if known.abort:
                raise Aborted(known.abort)
            if known.second:
                self._tell(f"{known.second} agreed")
                return
            await asyncio.sleep(1.0)
        raise Aborted(f"no other operator agreed within {SECOND_S} s")

    async def _end(self, drill: int, verdict: str, sentence: str, figures: dict[str, int]) -> DrillAnswer:
        # What somebody else has said may be as long as a sentence may be, with a name before it.
        said = plain(sentence)[:MESSAGE_CHARACTERS_MAX]
        request = EndDrillRequest(
            command_id=self._client.new_command_id(), verdict=verdict, sentence=said, figures=figures
        )
        return await self._client.call(ops.END_DRILL, request, drill=drill, deadline_s=END_S)

    # ---- what is done

    async def _carried_out(self, plan: Plan, goals: Goals) -> tuple[str, str, dict[str, int]]:
        scenario = SCENARIOS[plan.scenario]
        nodes = (await self._client.call(ops.LIST_NODES)).nodes
        self._stops.up = frozenset(one.name for one in nodes if one.state == "UP")
        if scenario.on_copy:
            return await self._on_a_copy(plan, goals)
        probes = Probes(self._client, self._clock, self._replicas, self._number(), self._writer)
        async with probes.running(), self._stops.watched(self._stops.watch(probes, goals)):
            began_s = self._clock.monotonic_s()
            self._tell(f"for {CONTROL_S:g} s nothing is done, to see what is normal")
            await self._while_well(CONTROL_S)
            fault_s = self._clock.monotonic_s()
            if scenario.needs:
                seen = await self._on_its_machine(plan, scenario, fault_s)
                faults, more = _faults_of(seen, plan, scenario), _figures_of(seen, fault_s)
            else:
                self._tell(f"{plan.target} is to take the leadership over from {plan.leader}")
                led = await self._handed_over(plan.target)
                more = {"handover_us": round((self._clock.monotonic_s() - fault_s) * MICROSECONDS_PER_SECOND)}
                faults = [] if led == plan.target else [f"{led or 'nobody'} leads, not {plan.target}"]
            await self._while_well(SETTLE_S)
            # Not what it takes to end those who measure.
            over_s = self._clock.monotonic_s()
        figures = _measured(probes, began_s, fault_s, over_s) | more
        figures |= {"fault_at_us": round((fault_s - self._began_s) * MICROSECONDS_PER_SECOND)}
        figures |= {"goal_us": goals.write_stop_us, "watched_us": round((over_s - fault_s) * MICROSECONDS_PER_SECOND)}
        self._tell("every acknowledged write is asked for again, and all states are compared")
        writes = [*probes.writes, *probes.user_writes]
        gone = lost(writes, await answered_again(self._client, self._number(), writes))
        differ = await disagreement(self._client, self._replicas, self._clock)
        meanwhile = await self._meanwhile(plan.target)
        figures |= {"writes_lost": len(gone), "states_agree": int(not differ), **meanwhile}
        twice, others = meanwhile["runs_again"], meanwhile["nodes_lost"]
        faults = [
            *([f"{len(gone)} acknowledged writes are gone"] if gone else ()),
            *([differ] if differ else ()),
            *faults,
            *([f"{twice} jobs began to run again"] if twice and scenario.needs else ()),
            *([f"{others} other nodes were lost"] if others > 0 and scenario.needs else ()),
            *_late(figures),
        ]
        if faults:
            return "failed", "; ".join(faults), figures
        what = f"{plan.target} is back" if scenario.needs else f"{plan.target} leads"
        return (
            "passed",
            f"{what}; writes stopped for {figures['write_stop_us'] / 1000:.1f} ms, and none of "
            f"{figures['writes_acknowledged']} acknowledged ones is gone",
            figures,
        )

    async def _on_a_copy(self, plan: Plan, goals: Goals) -> tuple[str, str, dict[str, int]]:
        """Have a copy made and exercised; Aborted, and what that raises. Nothing is left of it."""
        given = Given(
            scenario=plan.scenario,
            target=plan.target,
            base=Path(plan.scratch or tempfile.gettempdir()),
            backup=Path(plan.backup) if plan.backup else None,
            release=Path(plan.release) if plan.release else None,
            away_s=plan.hold_s,
        )
        machines = self._machines
        exercise = self._exercise(
            given, self._client, machines.config, machines.identity, self._clock, self._tell, self._began_s
        )
        self._figures, self._stops.status_s = exercise.figures, COPY_STATUS_S
        making = asyncio.create_task(exercise.run())
        async with during(making), self._stops.watched(self._stops.watch_copy(exercise, self._number())):
            while not making.done():
                if self._stops.reason:
                    raise Aborted(self._stops.reason)
                await asyncio.wait({making}, timeout=LOOK_S)
            outcome = making.result()
        figures = outcome.figures | {"goal_us": goals.write_stop_us}
        faults = [*outcome.faults, *_late(figures)]
        return ("failed", "; ".join(faults), figures) if faults else ("passed", outcome.sentence, figures)

    async def _on_its_machine(self, plan: Plan, scenario: Scenario, fault_s: float) -> Fault:
        """Have the fault done, held and undone, and wait until its target is back; Aborted, HelperRefused, ApiError."""
        channel = await self._machines.channel(plan.target)
        seen, drill = Fault(), self._number()
        self._stops.spared = frozenset({plan.target})
        tasks = list[asyncio.Task[None]]()
        try:
            begin = Begin(drill, plan.id, plan.scenario, plan.target, plan.hold_s + DURATION_MORE_S)
            await channel.ask(begin)
            seen.done_s = self._clock.monotonic_s()
            tasks.append(asyncio.create_task(self._renew(channel, drill)))
            tasks.append(asyncio.create_task(self._observe_leaders(plan, seen)))
            tasks.append(asyncio.create_task(self._observe_nodes(plan, seen)))
            self._tell(f"{plan.target} {scenario.does} after {plan.hold_s} s")
            await self._while_well(plan.hold_s)
            await channel.ask(End(drill))
            self._tell("the fault is undone")
        finally:
            for task in tasks:
                task.cancel()
            # Where it was not undone above: now, and if that does not go through, when the lease ends.
            ending = asyncio.ensure_future(_undone(channel, drill))
            await asyncio.shield(ending)
        seen.undone_s = self._clock.monotonic_s()
        await self._back(plan.target, scenario, seen)
        self._stops.spared = frozenset()
        return seen

    async def _renew(self, channel: Channel, drill: int) -> None:
        try:
            while True:
                await asyncio.sleep(RENEW_EVERY_S)
                await channel.ask(Renew(drill))
        except HelperRefused as error:
            self._stops.stop(f"the fault ended before its time: {error}")

    async def _observe_leaders(self, plan: Plan, seen: Fault) -> None:
        """Note who leads while the target cannot; asks the others themselves, for a leader that hangs tells nobody."""
        while not seen.took_over:
            await asyncio.sleep(LOOK_S)
            leads = {one.leader for one in (await self._stops.statuses()).values() if one.ready} - {plan.target, None}
            seen.took_over = next((one for one in leads if one), "")

    async def _observe_nodes(self, plan: Plan, seen: Fault) -> None:
        """Note what the leader says of nodes for as long as a fault is held; a leader that hangs says it late."""
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(ApiError):
                nodes = (await self._client.call(ops.LIST_NODES, deadline_s=STATUS_S)).nodes
                now_s, others = self._clock.monotonic_s(), self._stops.up - self._stops.spared
                seen.was_down |= any((one.name, one.state) == (plan.target, "DOWN") for one in nodes)
                heard_s = [
                    now_s - one.last_contact_s - seen.done_s
                    for one in nodes
                    if one.name in others and one.last_contact_s is not None
                ]
                if seen.agents_back_us is None and others and len(heard_s) == len(others) and min(heard_s) > 0:
                    seen.agents_back_us = round(max(heard_s) * MICROSECONDS_PER_SECOND)

    async def _back(self, target: str, scenario: Scenario, seen: Fault) -> None:
        """Wait until the target is there again; it may stay away. Aborted."""
        while self._clock.monotonic_s() < seen.undone_s + BACK_S:
            await self._while_well(LOOK_S)
            with contextlib.suppress(ApiError):
                if scenario.is_of_agent:
                    nodes = (await self._client.call(ops.LIST_NODES, deadline_s=STATUS_S)).nodes
                    mine = next((one for one in nodes if one.name == target), None)
                    heard_s = None if mine is None else mine.last_contact_s
                    since_s = self._clock.monotonic_s() - seen.undone_s
                    is_back = mine is not None and mine.state == "UP" and heard_s is not None and heard_s < since_s
                else:
                    at = self._replicas[target]
                    is_back = (
                        await self._client.call(ops.SHOW_STATUS, replica=at, deadline_s=self._stops.status_s)
                    ).ready
                if is_back:
                    took_s = self._clock.monotonic_s() - seen.undone_s
                    seen.back_us = round(took_s * MICROSECONDS_PER_SECOND)
                    self._tell(f"{target} is back")
                    return

    async def _handed_over(self, target: str) -> str | None:
        """Return who leads once that was done; what is asked for cannot be taken back, but nobody waits for it."""
        request = TransferRequest(command_id=self._client.new_command_id(), name=target)
        handing = asyncio.create_task(self._client.call(ops.TRANSFER_LEADERSHIP, request))
        try:
            while not handing.done():
                if self._stops.reason:
                    raise Aborted(self._stops.reason)
                await asyncio.wait({handing}, timeout=LOOK_S)
            return handing.result().leader
        finally:
            handing.cancel()

    async def _meanwhile(self, target: str) -> dict[str, int]:
        """Return how often things happened since the drill began that it should not lead to; a target may be lost."""
        assert self._drill is not None
        since: dict[str, Any] = {"from": self._drill.revision}
        counts = Counter(dict.fromkeys(_AGAIN.values(), 0))
        async for row in happened(self._client, kind=",".join(_AGAIN), **since):
            if row.detail.get("node") != target or row.event != "node_went_down":
                counts[_AGAIN[row.event]] += 1
        return dict(counts)

    async def _while_well(self, length_s: float) -> None:
        until_s = self._clock.monotonic_s() + length_s
        while not self._stops.reason and (left_s := until_s - self._clock.monotonic_s()) > 0:
            await asyncio.sleep(min(LOOK_S, left_s))
        if self._stops.reason:
            raise Aborted(self._stops.reason)

    def _number(self) -> int:
        assert self._drill is not None
        return self._drill.drill


def lease_of(goals: Goals) -> int:
    """Return after how long without a word of this client a drill is over, seconds: longer than writes may stop."""
    return round(goals.abort_after_us / MICROSECONDS_PER_SECOND) + LEASE_MORE_S


async def _undone(channel: Channel, drill: int) -> None:
    """Have a fault undone that may be, and give the connection up."""
    with contextlib.suppress(HelperRefused):
        await channel.ask(End(drill))
    await channel.close()


def _late(figures: dict[str, int]) -> list[str]:
    """Return that writes stopped for longer than they may, if they did."""
    took_ms, goal_ms = figures["write_stop_us"] / 1000, figures["goal_us"] / 1000
    return [f"writes stopped for {took_ms:.1f} ms, and {goal_ms:g} ms is the goal"] if took_ms > goal_ms else []


def _measured(probes: Probes, began_s: float, fault_s: float, over_s: float) -> dict[str, int]:
    """Return what users meet, before the fault and from it on."""
    writes, reads = probes.writes, probes.reads
    settled_s = began_s + CONTROL_S / 4
    return {
        **probes.stops(fault_s, over_s),
        "control_write_gap_us": longest_gap_us(writes, settled_s, fault_s),
        "control_read_gap_us": longest_gap_us(reads, settled_s, fault_s),
        "control_write_p50_us": latency_us(writes, began_s, fault_s, 0.5),
        "write_p99_us": latency_us(writes, fault_s, over_s, 0.99),
        "client_late_us": round(probes.late_s * MICROSECONDS_PER_SECOND),
        "writes_acknowledged": sum(one.answered_s is not None for one in writes),
        "writes_unanswered": sum(one.answered_s is None for one in writes),
    }


def _figures_of(seen: Fault, fault_s: float) -> dict[str, int]:
    """Return what was seen of a fault on a machine."""
    held_us = round((seen.undone_s - seen.done_s) * MICROSECONDS_PER_SECOND)
    figures = {"begun_us": round((seen.done_s - fault_s) * MICROSECONDS_PER_SECOND), "held_us": held_us}
    more = {"agents_back_us": seen.agents_back_us, "target_back_us": seen.back_us}
    return figures | {name: value for name, value in more.items() if value is not None}


def _faults_of(seen: Fault, plan: Plan, scenario: Scenario) -> list[str]:
    """Return what did not come as a fault on a machine should have it."""
    led = scenario.takes_over and plan.target == plan.leader
    return [
        *([f"nobody else led while {plan.target} could not"] if led and not seen.took_over else ()),
        *([f"{plan.target} was not DOWN"] if scenario.name == "node-down" and not seen.was_down else ()),
        *([f"{plan.target} was not back within {BACK_S:g} s"] if seen.back_us is None else ()),
    ]
