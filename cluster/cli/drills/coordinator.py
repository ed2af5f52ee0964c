"""One drill carried out: probes, the fault, stop conditions, what was measured, and its end in the ledger.

The client is outside of the cluster, as its users are: what it measures is what they meet. It sends a write every few
milliseconds without waiting for earlier ones, and reads beside them, first for a while without a fault (the control).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from cluster.cli.drills.figures import Probe, latency_us, longest_gap_us, lost
from cluster.cli.drills.preconditions import Found, Plan
from cluster.client import ApiError, Client
from cluster.schemas import Command, StatusView
from cluster.schemas import operations as ops
from cluster.schemas.drills import DrillAnswer, EndDrillRequest, StartDrillRequest
from cluster.schemas.requests import TransferRequest
from cluster.system import Address, Clock
from replica.values import MESSAGE_CHARACTERS_MAX, MICROSECONDS_PER_SECOND, plain

PROBE_EVERY_S: Final = 0.01
"""Between two writes, and between two reads, seconds: the resolution of the figures."""

PROBE_S: Final = 5.0
"""Seconds after which a probe is given up."""

UNDER_WAY_MAX: Final = 2_000
"""Probes that wait for an answer, count: those of ten seconds without one."""

CONTROL_S: Final = 2.0
"""Seconds without a fault, before it: what is normal here."""

SETTLE_S: Final = 2.0
"""Seconds that are looked at after the fault."""

LOOK_S: Final = 0.1
"""Seconds between two looks at the stop conditions."""

MEMBERS_EVERY: Final = 10
"""Looks between two questions to all members."""

STATUS_S: Final = 2.0
"""Seconds in which a member says how it stands."""

LASTS_S: Final = 60
"""Seconds after which the ledger takes a drill for over: several times what one takes."""

END_S: Final = 30.0
"""Seconds in which its end is to be in the ledger."""

AGREE_S: Final = 10.0
"""Seconds in which all replicas are to hold the same state afterwards."""

AGAIN_AT_ONCE: Final = 32
"""Acknowledged writes that are sent again at a time, count."""

HISTORY_ROWS: Final = 10_000
"""What happened meanwhile, rows that are read of it."""

_AGAIN: Final = {
    "stage_retried": "stages_again",
    "job_requeued": "runs_again",
    "run_requeued": "runs_again",
    "node_went_down": "nodes_lost",
}
"""Events that a drill should not lead to -> the figure that counts them."""

_T = TypeVar("_T")


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """What a drill has to keep to."""

    write_stop_us: int
    """For how long writes may stop, µs, for it to be passed."""
    abort_after_us: int
    """After how long without an acknowledged write it is aborted, µs."""


class Aborted(Exception):
    """A drill that has to end before its time; why, in a sentence."""


class Coordinator:
    """Who carries out drills of a cluster."""

    def __init__(self, client: Client, clock: Clock, replicas: dict[str, Address], tell: Callable[[str], None]) -> None:
        """`replicas`: where each is asked about itself; `tell` is called with what is done, a sentence each."""
        self._client = client
        self._clock = clock
        self._replicas = replicas
        self._tell = tell
        self._writes: list[Probe] = []
        self._reads: list[Probe] = []
        self._drill: DrillAnswer | None = None
        self._stop = ""
        """Why it has to end before its time."""

    async def look(self) -> Found:
        """Ask the cluster what a plan needs; ApiError."""
        members, drills, statuses, digests = await asyncio.gather(
            self._client.call(ops.LIST_MEMBERS),
            self._client.call(ops.LIST_DRILLS),
            self._statuses(),
            self._of_each(lambda at: self._client.call(ops.LIST_DIGESTS, replica=at, deadline_s=STATUS_S)),
        )
        return Found(members=members, statuses=statuses, digests=digests, drills=drills)

    async def _statuses(self) -> dict[str, StatusView]:
        return await self._of_each(lambda at: self._client.call(ops.SHOW_STATUS, replica=at, deadline_s=STATUS_S))

    async def _of_each(self, ask: Callable[[Address], Awaitable[_T]]) -> dict[str, _T]:
        async def one(at: Address) -> _T | None:
            try:
                return await ask(at)
            except ApiError:
                return None

        answers = await asyncio.gather(*(one(at) for at in self._replicas.values()))
        return {name: answer for name, answer in zip(self._replicas, answers, strict=True) if answer is not None}

    async def run(self, plan: Plan, goals: Goals) -> DrillAnswer:
        """Carry out a plan, and return the drill as it ended; ApiError where it could not begin or its end not be said.

        However this ends, but for the end of the process, the ledger hears of it; without that the drill is lost.
        """
        request = StartDrillRequest(
            command_id=self._client.new_command_id(),
            scenario=plan.scenario,
            target=plan.target,
            lasts_s=LASTS_S,
            forced=plan.forced,
            plan=plan.id,
        )
        drill = self._drill = await self._client.call(ops.START_DRILL, request)
        self._tell(f"drill {drill.drill} began: {plan.scenario} of {plan.target}")
        verdict, sentence, figures = "aborted", "ended from the keyboard", dict[str, int]()
        try:
            async with asyncio.timeout(LASTS_S - END_S / 2):
                verdict, sentence, figures = await self._carried_out(plan, goals)
        except Aborted as error:
            sentence = str(error)
        except TimeoutError:
            sentence = "it was not over in its time"
        except ApiError as error:
            sentence = f"it could not go on: {error}"
        finally:
            ending = asyncio.ensure_future(self._end(drill.drill, verdict, sentence, figures))
            # Also where the keyboard ended it: once more, and nobody waits.
            ended = await asyncio.shield(ending)
        return ended

    async def _end(self, drill: int, verdict: str, sentence: str, figures: dict[str, int]) -> DrillAnswer:
        # What somebody else has said may be as long as a sentence may be, with a name before it.
        said = plain(sentence)[:MESSAGE_CHARACTERS_MAX]
        request = EndDrillRequest(
            command_id=self._client.new_command_id(), verdict=verdict, sentence=said, figures=figures
        )
        return await self._client.call(ops.END_DRILL, request, drill=drill, deadline_s=END_S)

    # ---- what is done

    async def _carried_out(self, plan: Plan, goals: Goals) -> tuple[str, str, dict[str, int]]:
        began_s = self._clock.monotonic_s()
        async with self._probing(goals):
            self._tell(f"for {CONTROL_S:g} s nothing is done, to see what is normal")
            await self._while_well(CONTROL_S)
            fault_s = self._clock.monotonic_s()
            self._tell(f"{plan.target} is to take the leadership over from {plan.leader}")
            led = await self._handed_over(plan.target)
            done_s = self._clock.monotonic_s()
            await self._while_well(SETTLE_S)
        over_s = self._clock.monotonic_s()
        figures = {
            "write_stop_us": longest_gap_us(self._writes, fault_s, over_s),
            "read_stop_us": longest_gap_us(self._reads, fault_s, over_s),
            "control_write_gap_us": longest_gap_us(self._writes, began_s + CONTROL_S / 4, fault_s),
            "control_read_gap_us": longest_gap_us(self._reads, began_s + CONTROL_S / 4, fault_s),
            "control_write_p50_us": latency_us(self._writes, began_s, fault_s, 0.5),
            "write_p99_us": latency_us(self._writes, fault_s, over_s, 0.99),
            "handover_us": round((done_s - fault_s) * MICROSECONDS_PER_SECOND),
            "writes_acknowledged": sum(one.answered_s is not None for one in self._writes),
            "writes_unanswered": sum(one.answered_s is None for one in self._writes),
        }
        self._tell("every acknowledged write is asked for again, and all states are compared")
        gone = lost(self._writes, await self._answered_again())
        agrees = await self._states_agree()
        figures |= {"writes_lost": len(gone), "states_agree": int(agrees), **await self._meanwhile()}
        took_ms, goal_ms = figures["write_stop_us"] / 1000, goals.write_stop_us / 1000
        faults = [
            *([f"{len(gone)} acknowledged writes are gone"] if gone else ()),
            *([] if agrees else ["not all replicas hold the same state"]),
            *([] if led == plan.target else [f"{led or 'nobody'} leads, not {plan.target}"]),
            *([f"writes stopped for {took_ms:.1f} ms, and {goal_ms:g} ms is the goal"] if took_ms > goal_ms else ()),
        ]  # fmt: skip
        if faults:
            return "failed", "; ".join(faults), figures
        return (
            "passed",
            f"{plan.target} leads; writes stopped for {took_ms:.1f} ms, and none of "
            f"{figures['writes_acknowledged']} acknowledged ones is gone",
            figures,
        )

    async def _handed_over(self, target: str) -> str | None:
        """Return who leads once that was done; what is asked for cannot be taken back, but nobody waits for it."""
        request = TransferRequest(command_id=self._client.new_command_id(), name=target)
        handing = asyncio.create_task(self._client.call(ops.TRANSFER_LEADERSHIP, request))
        try:
            while not handing.done():
                if self._stop:
                    raise Aborted(self._stop)
                await asyncio.wait({handing}, timeout=LOOK_S)
            return handing.result().leader
        finally:
            handing.cancel()

    async def _answered_again(self) -> dict[str, int]:
        """Return the revision that each acknowledged write is answered with when it is sent again, by command id."""
        drill, found, room = self._number(), dict[str, int](), asyncio.Semaphore(AGAIN_AT_ONCE)

        async def again(command_id: str) -> None:
            async with room:
                with contextlib.suppress(ApiError):
                    answer = await self._client.call(ops.PROBE_DRILL, Command(command_id=command_id), drill=drill)
                    found[command_id] = answer.revision

        await asyncio.gather(*(again(one.command_id) for one in self._writes if one.answered_s is not None))
        return found

    async def _states_agree(self) -> bool:
        until_s = self._clock.monotonic_s() + AGREE_S
        while self._clock.monotonic_s() < until_s:
            statuses = await self._of_each(lambda at: self._client.call(ops.SHOW_STATUS, replica=at, digest=True))
            states = {(status.revision, status.state_digest) for status in statuses.values()}
            if len(statuses) == len(self._replicas) and len({revision for revision, _ in states}) == 1:
                return len(states) == 1
            await asyncio.sleep(LOOK_S)
        return False

    async def _meanwhile(self) -> dict[str, int]:
        """Return how often things happened since the drill began that it should not lead to."""
        assert self._drill is not None
        since: dict[str, Any] = {"from": self._drill.revision}
        story = await self._client.call(ops.SHOW_HISTORY, kind=",".join(_AGAIN), limit=HISTORY_ROWS, **since)
        return dict.fromkeys(_AGAIN.values(), 0) | Counter(_AGAIN[row.event] for row in story.rows)

    # ---- probes and stop conditions

    @contextlib.asynccontextmanager
    async def _probing(self, goals: Goals) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self._probe_on(self._write)),
            asyncio.create_task(self._probe_on(self._read)),
            asyncio.create_task(self._watch(goals)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _while_well(self, length_s: float) -> None:
        until_s = self._clock.monotonic_s() + length_s
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            if self._stop:
                raise Aborted(self._stop)
            await asyncio.sleep(min(LOOK_S, left_s))

    async def _probe_on(self, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        under_way = set[asyncio.Task[None]]()
        began_s, sent = self._clock.monotonic_s(), 0
        try:
            while True:
                if len(under_way) < UNDER_WAY_MAX:
                    task = asyncio.create_task(ask())
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                sent += 1
                # By the clock, not one interval after the last: what sending costs must not thin them out.
                await asyncio.sleep(max(0.0, began_s + sent * PROBE_EVERY_S - self._clock.monotonic_s()))
        finally:
            for task in list(under_way):
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _write(self) -> None:
        probe = Probe(self._clock.monotonic_s(), command_id=self._client.new_command_id())
        self._writes.append(probe)
        try:
            answer = await self._client.call(
                ops.PROBE_DRILL, Command(command_id=probe.command_id), drill=self._number(), deadline_s=PROBE_S
            )
        except ApiError as error:
            if 400 <= error.status < 500 and error.outcome == "refused" and not self._stop:
                self._stop = f"a write was refused: {error.sentence}"
            return
        probe.answered_s, probe.revision = self._clock.monotonic_s(), answer.revision

    async def _read(self) -> None:
        probe = Probe(self._clock.monotonic_s())
        self._reads.append(probe)
        with contextlib.suppress(ApiError):
            drill = await self._client.call(ops.SHOW_DRILL, drill=self._number(), deadline_s=PROBE_S)
            probe.answered_s, probe.revision = self._clock.monotonic_s(), drill.revision
            if drill.abort and not self._stop:
                self._stop = drill.abort

    async def _watch(self, goals: Goals) -> None:
        began_s, looks = self._clock.monotonic_s(), 0
        while not self._stop:
            await asyncio.sleep(LOOK_S)
            last_s = max((one.answered_s for one in self._writes if one.answered_s is not None), default=began_s)
            if (self._clock.monotonic_s() - last_s) * MICROSECONDS_PER_SECOND > goals.abort_after_us:
                self._stop = f"no write was acknowledged for {goals.abort_after_us / MICROSECONDS_PER_SECOND:g} s"
            looks += 1
            if looks % MEMBERS_EVERY == 0:
                self._stop = self._stop or await self._unwell()

    async def _unwell(self) -> str:
        """Return what of the cluster says that a drill has to end, empty for nothing."""
        with contextlib.suppress(ApiError):
            for lock in (await self._client.call(ops.LIST_DRILLS, deadline_s=STATUS_S)).locks[:1]:
                return f"{lock.by} wants no drills: {lock.reason}"
        silent = sorted(set(self._replicas) - set(await self._statuses()))
        return f"{', '.join(silent)} did not answer for {STATUS_S:g} s" if silent else ""

    def _number(self) -> int:
        assert self._drill is not None
        return self._drill.drill
