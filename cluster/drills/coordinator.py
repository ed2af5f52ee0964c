"""Coordinator of one drill: probes, fault, stop conditions, measurements, and the result in the ledger.

The client runs outside the cluster, as users do, and measures when the cluster answers: first without a fault (the
control), then with the fault. A machine's helper injects the fault, under a lease that the coordinator renews.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.cluster.client import ApiError, Client
from forebay.cluster.drills.copies.exercises import Exercise, ExerciseInputs, SnapshotUnavailable
from forebay.cluster.drills.copies.replicas import CopyFailed
from forebay.cluster.drills.copies.resources import measure_resources
from forebay.cluster.drills.figures import Probe, find_lost, latency_us, longest_gap_us
from forebay.cluster.drills.final_checks import (
    CheckImpossible,
    find_disagreement,
    read_events,
    resend_writes,
    terms_since,
)
from forebay.cluster.drills.helper import (
    RENEW_EVERY_S,
    BeginRequest,
    EndRequest,
    HelperChannel,
    HelperRefused,
    RenewRequest,
)
from forebay.cluster.drills.machines import Machines
from forebay.cluster.drills.preconditions import DURATION_MORE_S, ClusterFacts, DrillRequest, Plan, choose_target
from forebay.cluster.drills.probes import MeasurementFailed, Probes, Writer
from forebay.cluster.drills.scenarios import SCENARIOS, Scenario
from forebay.cluster.drills.stop_conditions import (
    CONTROL_S,
    COPY_STATUS_S,
    LOOK_S,
    STATUS_S,
    Goals,
    StopConditions,
    run_during,
)
from forebay.cluster.schemas import Command
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.drills import DrillAnswer, EndDrillRequest, StartDrillRequest
from forebay.cluster.schemas.requests import TransferRequest
from forebay.cluster.system import Address, Clock, parse_instant
from forebay.replica.values import DRILL_S_MAX, MESSAGE_CHARACTERS_MAX, MICROSECONDS_PER_SECOND, plain

SETTLE_S: Final = 2.0
"""Seconds of measurement after the fault."""

BACK_S: Final = 60.0
"""Time limit for the target's return after its fault, seconds: a replica replays its journal first."""

LATE_S: Final = 5.0
"""Seconds to watch a switchover whose request failed: the target may still take over."""

SECOND_S: Final = 300
"""Time limit for a second operator's approval, seconds."""

ALIVE_EVERY_S: Final = 1.0
"""Seconds between two keep-alive requests of the coordinator."""

LEASE_MORE_S: Final = 5
"""Seconds by which the drill's lease exceeds the permitted stop of writes."""

LASTS_S: Final = 120
"""Seconds, in addition to the fault and the waits after it, after which the ledger itself ends a drill."""

END_S: Final = 30.0
"""Time limit for recording the end of the drill, seconds."""

_AGAIN: Final = {
    "stage_retried": "stages_again",
    "job_requeued": "runs_again",
    "run_requeued": "runs_again",
    "node_went_down": "nodes_lost",
}
"""Events that a drill should not cause -> the figure that counts them."""


WRITES: Final = "acknowledged writes"
STATES: Final = "replica states"
EVENTS: Final = "events"
LEADERS: Final = "leaders"
CHECKS: Final = (WRITES, STATES, EVENTS, LEADERS)
"""Checks after every fault in the cluster, in their order."""


WHY_CHARACTERS_MAX: Final = 150
"""Longest recorded reason of a check that could not be made, characters: all reasons fit beside the verdict."""


class DrillAborted(Exception):
    """Drill that was aborted; its text is the reason."""


class FaultRecord(msgspec.Struct):
    """Observations of a fault or switchover. Times are seconds of the monotonic clock, None if not reached."""

    done_s: float | None = None
    undone_s: float = 0.0
    took_over: str = ""
    """Replica that led during the fault; empty if none did."""
    was_down: bool = False
    """True if the target's node was DOWN."""
    agents_back_us: int | None = None
    """Time until the leader had received polls of all other agents, µs."""
    handover_us: int | None = None
    """Time until the switchover request was answered, µs."""
    rejection: str = ""
    """Error of the switchover request."""
    back_us: int | None = None
    """Time from the end of the fault until the target was back, µs."""


class Coordinator:
    """Runner of drills on a cluster."""

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
        exercise: Callable[..., Exercise] | None = None,
        alarm: Callable[[], Awaitable[str]] | None = None,
        user: Callable[[], AbstractAsyncContextManager[Client]] | None = None,
    ) -> None:
        """Create a coordinator.

        `replicas` has each replica's API address. `writer` sends the measured writes. `tell` receives a sentence for
        each step. `exercise` creates a drill on a copy; without it, drills on copies are not possible. `user` creates
        the client of a user's program; `client` by default. `alarm` is called every second and returns the reason to
        abort, or an empty string.
        """
        self._client = client
        self._clock = clock
        self._replicas = replicas
        self._machines = machines
        self._writer = writer
        self._tell = tell
        self._require_second = require_second
        self._user = user
        self._stops = StopConditions(client, clock, replicas, machines, alarm)
        self._exercise = exercise
        self._drill: DrillAnswer | None = None
        self._began_s = clock.monotonic_s()
        """Time at which the ledger recorded the drill's start."""
        self._figures: dict[str, int] = {}
        """Measurements so far, which are recorded however the drill ends."""
        self._faults: list[str] = []
        self._unchecked: dict[str, str] = {}
        """Checks that were not made, each with the reason for its failure.

        The reason is empty if the check was not reached.
        """

    async def look(self, wanted: DrillRequest) -> ClusterFacts:
        """Return the facts that a plan needs, from the cluster and the target's machine.

        Raises:
            ApiError: if the cluster did not answer.
        """
        members, drills, nodes, moving = await asyncio.gather(
            self._client.call(ops.LIST_MEMBERS),
            self._client.call(ops.LIST_DRILLS),
            self._client.call(ops.LIST_NODES),
            self._client.call(ops.LIST_TRANSFERS),
        )
        statuses, digests, certificates_s = await asyncio.gather(
            self._stops.statuses(), self._stops.digests(), self._machines.certificates_s()
        )
        found = ClusterFacts(
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
            size_bytes = await self._snapshot_bytes(wanted, choose_target(found, wanted))
            return msgspec.structs.replace(found, room=measure_resources(wanted.place, size_bytes))
        if not SCENARIOS[wanted.scenario].needed_capability:
            return found
        helper, off_s = await self._machines.look(wanted.scenario, choose_target(found, wanted))
        if not isinstance(helper, str):
            until_us = helper.figures.get("certificate_until_us", 0)
            left_s = (until_us - self._clock.now()) / MICROSECONDS_PER_SECOND
            found = msgspec.structs.replace(found, certificates_s={**certificates_s, "its helper": left_s})
        return msgspec.structs.replace(found, helper=helper, helper_clock_s=off_s)

    async def _snapshot_bytes(self, wanted: DrillRequest, target: str) -> int:
        """Return the size of the snapshot or backup for a copy; 0 if it is unknown.

        Raises:
            ApiError: if this identity may not read snapshots.
        """
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
        """Run a plan and return the ended drill.

        The result is recorded in the ledger even after an error, unless this process is killed.

        Raises:
            ApiError: if the drill's start or end could not be recorded.
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
        self._tell(f"drill {drill.drill} started: {plan.scenario} of {plan.target}")
        verdict, sentence = "aborted", "interrupted by Ctrl-C or SIGTERM"
        alive = asyncio.create_task(self._keep_alive(drill.drill))
        try:
            async with asyncio.timeout(lasts_s - END_S / 2):
                if self._require_second:
                    await self._wait_for_second(drill.drill)
                verdict, sentence = await self._carry_out(plan, goals)
        except DrillAborted as error:
            sentence = str(error)
        except CopyFailed as error:
            verdict, sentence = "failed", str(error)
        except HelperRefused as error:
            sentence = f"the helper failed: {error}"
        except MeasurementFailed as error:
            sentence = str(error)
        except TimeoutError:
            sentence = "the drill exceeded its time limit"
        except ApiError as error:
            sentence = f"the cluster did not answer: {error}"
        except (SnapshotUnavailable, OSError) as error:
            sentence = f"the copy could not be made: {error}"
        finally:
            alive.cancel()
            ending = asyncio.ensure_future(self._end(drill.drill, verdict, sentence))
            # Record the end even after Ctrl-C; a second Ctrl-C stops waiting for it.
            ended = await asyncio.shield(ending)
        return ended

    async def _keep_alive(self, drill: int) -> None:
        """Send keep-alive requests until cancelled."""
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            request = Command(command_id=self._client.new_command_id())
            # The measured probes report rejections.
            with contextlib.suppress(ApiError):
                await self._client.call(ops.PROBE_DRILL, request, drill=drill, deadline_s=STATUS_S)

    async def _wait_for_second(self, drill: int) -> None:
        """Wait for a second operator's approval.

        Raises:
            DrillAborted: if none approved in time, or the drill was aborted.
        """
        self._tell(f"waiting {SECOND_S} s for a second operator: forebay drill confirm {drill}")
        until_s = self._clock.monotonic_s() + SECOND_S
        while self._clock.monotonic_s() < until_s:
            known = await self._client.call(ops.SHOW_DRILL, drill=drill)
            if known.abort:
                raise DrillAborted(known.abort)
            if known.second:
                self._tell(f"{known.second} approved the drill")
                return
            await asyncio.sleep(1.0)
        raise DrillAborted(f"no second operator approved the drill within {SECOND_S} s")

    async def _end(self, drill: int, verdict: str, sentence: str) -> DrillAnswer:
        """Record the end of the drill with all figures and missing checks."""
        unchecked = _unchecked_sentence(self._unchecked)
        # Shorten the sentence: an operator's reason alone may have its maximum length.
        said = plain(sentence)[: MESSAGE_CHARACTERS_MAX - len(unchecked)] + unchecked
        request = EndDrillRequest(
            command_id=self._client.new_command_id(), verdict=verdict, sentence=said, figures=self._figures
        )
        try:
            return await self._client.call(ops.END_DRILL, request, drill=drill, deadline_s=END_S)
        except ApiError:
            figures = ", ".join(f"{name} {value}" for name, value in sorted(self._figures.items()))
            measured = f"; measured: {figures}" if figures else ""
            self._tell(f"the end of drill {drill} could not be recorded: {verdict}: {said}{measured}")
            raise

    # ---- steps

    async def _carry_out(self, plan: Plan, goals: Goals) -> tuple[str, str]:
        """Perform the drill and return its verdict and sentence.

        `_figures` and `_unchecked` are valid at any time, even after an exception.

        Raises:
            DrillAborted: if a stop condition holds.
            MeasurementFailed: if writes could not be measured.
            ApiError: if the cluster did not answer.
            CopyFailed: if a copy failed; SnapshotUnavailable or OSError if it could not be made.
        """
        scenario = SCENARIOS[plan.scenario]
        nodes = (await self._client.call(ops.LIST_NODES)).nodes
        self._stops.up = frozenset(one.name for one in nodes if one.state == "UP")
        if scenario.on_copy:
            return await self._exercise_copy(plan, goals)
        probes = Probes(self._client, self._clock, self._replicas, self._number(), self._writer, self._user)
        seen, began_s, fault_s, over_s = FaultRecord(), self._clock.monotonic_s(), None, None
        try:
            async with probes.running(), self._stops.run_watches(self._stops.watch(probes, goals)):
                began_s = self._clock.monotonic_s()
                self._tell(f"measuring for {CONTROL_S:g} s without a fault")
                await self._watch_conditions(CONTROL_S)
                fault_s = self._clock.monotonic_s()
                self._unchecked = dict.fromkeys(CHECKS, "")
                if scenario.needed_capability:
                    await self._inject_fault(plan, scenario, seen)
                else:
                    await self._transfer_leadership(plan, seen)
                await self._watch_conditions(SETTLE_S)
                # Measure before the clients end, because ending them takes time.
                over_s = self._clock.monotonic_s()
        finally:
            over_s = over_s or self._clock.monotonic_s()
            self._figures |= _measurements(probes, began_s, fault_s, over_s) | {"goal_us": goals.write_stop_us}
            if fault_s is not None:
                since_us = round((fault_s - self._began_s) * MICROSECONDS_PER_SECOND)
                self._figures |= _fault_figures(seen, fault_s) | {"fault_at_us": since_us}
        await self._check_all(plan, scenario, seen, probes)
        faults = [*self._faults, *_goal_missed(self._figures, plan)]
        if faults or self._unchecked:
            return "failed", "; ".join(faults) or "the completed checks found no fault"
        what = f"{plan.target} is back" if scenario.needed_capability else f"{plan.target} took over"
        return (
            "passed",
            f"{what}; writes stopped for {self._figures['write_stop_us'] / 1000:.1f} ms, and none of "
            f"{self._figures['writes_acknowledged']} acknowledged writes is lost",
        )

    # ---- checks: the clients' observations, compared with the cluster and its history

    async def _check_all(self, plan: Plan, scenario: Scenario, seen: FaultRecord, probes: Probes) -> None:
        """Run every check, even if others fail."""
        if scenario.needed_capability and seen.back_us is None:
            self._faults.append(f"{plan.target} was not back within {BACK_S:g} s")
        self._tell("checking every acknowledged write and the replicas' states")
        await self._check(WRITES, self._check_writes([*probes.writes, *probes.user_writes]))
        await self._check(STATES, self._check_states())
        await self._check(EVENTS, self._check_events(plan, scenario, seen))
        await self._check(LEADERS, self._check_leaders(plan, scenario, seen))

    async def _check(self, name: str, check: Awaitable[None]) -> None:
        try:
            await check
        except (ApiError, CheckImpossible) as error:
            self._unchecked[name] = str(error)
        else:
            del self._unchecked[name]

    async def _check_writes(self, writes: list[Probe]) -> None:
        again = await resend_writes(self._client, self._number(), writes)
        gone = find_lost(writes, again.revisions, again.unanswered)
        self._figures["writes_lost"] = len(gone)
        if gone:
            self._faults.append(f"{len(gone)} acknowledged writes are lost")
        again.require_all()

    async def _check_states(self) -> None:
        differ = await find_disagreement(self._client, self._replicas, self._clock)
        self._figures["states_agree"] = int(not differ)
        if differ:
            self._faults.append(differ)

    async def _check_events(self, plan: Plan, scenario: Scenario, seen: FaultRecord) -> None:
        assert self._drill is not None
        since: dict[str, Any] = {"from": self._drill.revision}
        counts = Counter(dict.fromkeys(_AGAIN.values(), 0))
        async for row in read_events(self._client, kind=",".join(_AGAIN), **since):
            if row.event == "node_went_down" and row.detail.get("node") == plan.target:
                seen.was_down = True
            else:
                counts[_AGAIN[row.event]] += 1
        self._figures |= counts
        if scenario.needed_capability and counts["runs_again"]:
            self._faults.append(f"{counts['runs_again']} jobs were rerun")
        if scenario.needed_capability and counts["nodes_lost"]:
            self._faults.append(f"{counts['nodes_lost']} other nodes went DOWN")
        if scenario.name == "node-down" and not seen.was_down:
            self._faults.append(f"{plan.target} did not go DOWN")

    async def _check_leaders(self, plan: Plan, scenario: Scenario, seen: FaultRecord) -> None:
        """Check that another replica led, if the scenario requires this.

        The history is used if this client saw no other leader.
        """
        has_to_move = not scenario.needed_capability or (scenario.takes_over and plan.target == plan.leader)
        if seen.took_over or not has_to_move:
            return
        terms = await terms_since(self._client, self._clock, plan.term)
        if not scenario.needed_capability:
            if not any(one.leader == plan.target for one in terms):
                led = next((one.leader for one in reversed(terms) if one.leader), plan.leader)
                why = f": {seen.rejection}" if seen.rejection else ""
                self._faults.append(f"{led} leads, not {plan.target}{why}")
            return
        others = [one for one in terms if one.leader not in (None, plan.target)]
        assert self._drill is not None and self._drill.began is not None
        until = parse_instant(self._drill.began) + round((seen.undone_s - self._began_s) * MICROSECONDS_PER_SECOND)
        if not any(one.from_at is not None and parse_instant(one.from_at) <= until for one in others):
            later = f"; {others[0].leader} led afterwards" if others else ""
            self._faults.append(f"no other replica led while {plan.target} could not{later}")

    async def _exercise_copy(self, plan: Plan, goals: Goals) -> tuple[str, str]:
        """Make a copy, exercise it, and remove it.

        Raises:
            DrillAborted: if a stop condition holds; also the exceptions of `Exercise.run`.
        """
        given = ExerciseInputs(
            scenario=plan.scenario,
            target=plan.target,
            base=Path(plan.scratch or tempfile.gettempdir()),
            backup=Path(plan.backup) if plan.backup else None,
            release=Path(plan.release) if plan.release else None,
            away_s=plan.hold_s,
        )
        machines = self._machines
        assert self._exercise is not None  # the caller plans drills on copies only with it
        exercise = self._exercise(
            given, self._client, machines.config, machines.identity, self._clock, self._tell, self._began_s
        )
        self._figures, self._stops.status_s = exercise.figures, COPY_STATUS_S
        making = asyncio.create_task(exercise.run())
        async with run_during(making), self._stops.run_watches(self._stops.watch_copy(exercise, self._number())):
            while not making.done():
                if self._stops.reason:
                    raise DrillAborted(self._stops.reason)
                await asyncio.wait({making}, timeout=LOOK_S)
            outcome = making.result()
        self._figures |= {**outcome.figures, "goal_us": goals.write_stop_us}
        self._unchecked = outcome.unchecked
        faults = [*outcome.faults, *_goal_missed(self._figures, plan)]
        if faults or self._unchecked:
            return "failed", "; ".join(faults) or "the completed checks found no fault"
        return "passed", outcome.sentence

    async def _inject_fault(self, plan: Plan, scenario: Scenario, seen: FaultRecord) -> None:
        """Inject the fault, hold it, undo it, and wait until the target is back.

        Raises:
            DrillAborted: if a stop condition holds.
            HelperRefused: if the helper rejects the fault.
            ApiError: if the cluster did not answer.
        """
        channel = await self._machines.channel(plan.target)
        drill = self._number()
        self._stops.spared = frozenset({plan.target})
        tasks = list[asyncio.Task[None]]()
        try:
            begin = BeginRequest(drill, plan.id, plan.scenario, plan.target, plan.hold_s + DURATION_MORE_S)
            await channel.ask(begin)
            seen.done_s = self._clock.monotonic_s()
            tasks.append(asyncio.create_task(self._renew(channel, drill)))
            tasks.append(asyncio.create_task(self._observe_leaders(plan, seen)))
            tasks.append(asyncio.create_task(self._observe_nodes(plan, seen)))
            self._tell(f"{plan.target} {scenario.fault_for(plan.hold_s)}")
            await self._watch_conditions(plan.hold_s)
            await channel.ask(EndRequest(drill))
            self._tell("the fault is undone")
        finally:
            for task in tasks:
                task.cancel()
            # After an exception, undo the fault; if this fails, the helper undoes it when the lease ends.
            ending = asyncio.ensure_future(_undo_fault(channel, drill))
            await asyncio.shield(ending)
            seen.undone_s = self._clock.monotonic_s()
        await self._wait_for_target(plan.target, scenario, seen)
        self._stops.spared = frozenset()

    async def _renew(self, channel: HelperChannel, drill: int) -> None:
        try:
            while True:
                await asyncio.sleep(RENEW_EVERY_S)
                await channel.ask(RenewRequest(drill))
        except HelperRefused as error:
            self._stops.stop(f"the fault ended early: {error}")

    async def _observe_leaders(self, plan: Plan, seen: FaultRecord) -> None:
        """Record the leader during the fault.

        Only the other replicas are asked, because a hung leader does not answer.
        """
        while not seen.took_over:
            await asyncio.sleep(LOOK_S)
            leads = {one.leader for one in (await self._stops.statuses()).values() if one.ready} - {plan.target, None}
            seen.took_over = next((one for one in leads if one), "")

    async def _observe_nodes(self, plan: Plan, seen: FaultRecord) -> None:
        """Record the nodes' states, as the leader reports them, while the fault is held."""
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(ApiError):
                nodes = (await self._client.call(ops.LIST_NODES, deadline_s=STATUS_S)).nodes
                assert seen.done_s is not None
                now_s, others = self._clock.monotonic_s(), self._stops.up - self._stops.spared
                seen.was_down |= any((one.name, one.state) == (plan.target, "DOWN") for one in nodes)
                heard_s = [
                    now_s - one.last_contact_s - seen.done_s
                    for one in nodes
                    if one.name in others and one.last_contact_s is not None
                ]
                if seen.agents_back_us is None and others and len(heard_s) == len(others) and min(heard_s) > 0:
                    seen.agents_back_us = round(max(heard_s) * MICROSECONDS_PER_SECOND)

    async def _wait_for_target(self, target: str, scenario: Scenario, seen: FaultRecord) -> None:
        """Wait until the target is back, BACK_S at most.

        Raises:
            DrillAborted: if a stop condition holds.
        """
        while self._clock.monotonic_s() < seen.undone_s + BACK_S:
            await self._watch_conditions(LOOK_S)
            with contextlib.suppress(ApiError):
                if scenario.targets_agent:
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

    async def _transfer_leadership(self, plan: Plan, seen: FaultRecord) -> None:
        """Request the switchover and record whether the target led.

        A failed request does not end the drill, because the target may still take over.

        Raises:
            DrillAborted: if a stop condition holds.
        """
        self._tell(f"transferring the leadership from {plan.leader} to {plan.target}")
        asked_s = self._clock.monotonic_s()
        try:
            led = await self._wait_for_successor(plan.target)
        except ApiError as error:
            seen.rejection = str(error)
            self._tell(f"the transfer request failed ({error}); watching {plan.target}")
            await self._observe_takeover(plan.target, seen)
            return
        if led == plan.target:
            seen.took_over = led
            seen.handover_us = round((self._clock.monotonic_s() - asked_s) * MICROSECONDS_PER_SECOND)

    async def _wait_for_successor(self, target: str) -> str | None:
        """Transfer the leadership and return the new leader.

        The request cannot be cancelled, but an aborted drill does not wait for its answer.

        Raises:
            DrillAborted: if a stop condition holds.
            ApiError: if the request failed.
        """
        request = TransferRequest(command_id=self._client.new_command_id(), name=target)
        handing = asyncio.create_task(self._client.call(ops.TRANSFER_LEADERSHIP, request))
        try:
            while not handing.done():
                if self._stops.reason:
                    raise DrillAborted(self._stops.reason)
                await asyncio.wait({handing}, timeout=LOOK_S)
            return handing.result().leader
        finally:
            handing.cancel()

    async def _observe_takeover(self, target: str, seen: FaultRecord) -> None:
        """Wait until a replica reports the target as leader, LATE_S at most.

        Raises:
            DrillAborted: if a stop condition holds.
        """
        until_s = self._clock.monotonic_s() + LATE_S
        while not seen.took_over and self._clock.monotonic_s() < until_s:
            await self._watch_conditions(LOOK_S)
            leads = {one.leader for one in (await self._stops.statuses()).values() if one.ready}
            seen.took_over = target if target in leads else ""

    async def _watch_conditions(self, length_s: float) -> None:
        until_s = self._clock.monotonic_s() + length_s
        while not self._stops.reason and (left_s := until_s - self._clock.monotonic_s()) > 0:
            await asyncio.sleep(min(LOOK_S, left_s))
        if self._stops.reason:
            raise DrillAborted(self._stops.reason)

    def _number(self) -> int:
        assert self._drill is not None
        return self._drill.drill


def lease_of(goals: Goals) -> int:
    """Return the drill's lease, seconds: longer than writes may stop."""
    return round(goals.abort_after_us / MICROSECONDS_PER_SECOND) + LEASE_MORE_S


async def _undo_fault(channel: HelperChannel, drill: int) -> None:
    """Undo a fault, if there is one, and close the connection."""
    with contextlib.suppress(HelperRefused):
        await channel.ask(EndRequest(drill))
    await channel.close()


def _unchecked_sentence(unchecked: dict[str, str]) -> str:
    """Format the checks that were not made as the end of a sentence; empty if there are none."""
    named = ", ".join(f"{name} ({plain(why)[:WHY_CHARACTERS_MAX]})" if why else name for name, why in unchecked.items())
    return f"; not checked: {named}" if named else ""


def _goal_missed(figures: dict[str, int], plan: Plan) -> list[str]:
    """Return a fault if writes stopped for longer than the goal."""
    took_ms, goal_ms = figures["write_stop_us"] / 1000, figures["goal_us"] / 1000
    if took_ms <= goal_ms:
        return []
    planned = "" if plan.stops_writes else ", though the plan expects no stop"
    return [f"writes stopped for {took_ms:.1f} ms, and the goal is {goal_ms:g} ms{planned}"]


def _measurements(probes: Probes, began_s: float, fault_s: float | None, over_s: float) -> dict[str, int]:
    """Return the client's measurements before and after the start of the fault."""
    writes, reads = probes.writes, probes.reads
    settled_s, control_s = began_s + CONTROL_S / 4, over_s if fault_s is None else fault_s
    figures = {
        "control_write_gap_us": longest_gap_us(writes, settled_s, control_s),
        "control_read_gap_us": longest_gap_us(reads, settled_s, control_s),
        "control_write_p50_us": latency_us(writes, began_s, control_s, 0.5),
        "client_late_us": round(probes.late_s * MICROSECONDS_PER_SECOND),
        "writes_acknowledged": sum(one.answered_s is not None for one in writes),
        "writes_unanswered": sum(one.answered_s is None for one in writes),
    }
    if fault_s is None:
        return figures
    return {
        **figures,
        **probes.stops(fault_s, over_s),
        "write_p99_us": latency_us(writes, fault_s, over_s, 0.99),
        "watched_us": round((over_s - fault_s) * MICROSECONDS_PER_SECOND),
    }


def _fault_figures(seen: FaultRecord, fault_s: float) -> dict[str, int]:
    """Return the figures of a fault that were observed."""
    more = {
        "handover_us": seen.handover_us,
        "begun_us": None if seen.done_s is None else round((seen.done_s - fault_s) * MICROSECONDS_PER_SECOND),
        "held_us": None
        if seen.done_s is None or not seen.undone_s
        else round((seen.undone_s - seen.done_s) * MICROSECONDS_PER_SECOND),
        "agents_back_us": seen.agents_back_us,
        "target_back_us": seen.back_us,
    }
    return {name: value for name, value in more.items() if value is not None}
