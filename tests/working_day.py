"""A day of a cluster for pages and reports to show: users, arrays, transfers, failures and a change of leaders.

It is decided and folded by the product's own functions, seeded, and written as the ledger of a replica.
"""

from __future__ import annotations

import heapq
import itertools
import random
from pathlib import Path
from typing import Final, NamedTuple

from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.model.arrays import parse_array
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.orders import Order
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import TransferReceipt
from forebay.replica.scheduler import SchedulingIndex, run_cycle
from forebay.replica.state.digest import state_digest
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, Revision
from forebay.wal.codec import encode_batch
from forebay.wal.configuration import Member, encode_configuration, initial
from forebay.wal.environment import Environment
from forebay.wal.journal import Entry as LedgerRow
from forebay.wal.journal import Journal
from tests.replica.world import World

GIB: Final = 1 << 30
POOLS: Final = {"fast": 96 * GIB, "wide": 768 * GIB}
CLUSTER: Final = "aurora"
NODES: Final = 4
CPUS: Final = 8
SPAN_S: Final = 6 * 3_600
MAP_SIZE_BYTES: Final = 256 << 20

_USERS: Final = ("alice", "bob", "carol", "dan")
_NAMES: Final = ("train-resnet", "cfd-wing", "genome-align", "render-scene", "climate-ens", "post-process")
_SPREAD: Final = {"stage_in": (15, 150), "run": (60, 1_300), "stage_out": (10, 90)}
"""Shortest and longest time of an operation, seconds; others take a second."""


class Reported(NamedTuple):
    """Report of an agent that is due; ordered by time."""

    at: int
    number: int
    job: int
    attempt: int
    started: bool
    """Whether it ends an operation that was reported to have started."""


class WorkingDay(World):
    """World with the product's own scheduling index, whose agents report by themselves; ends at `until`."""

    def __init__(self, until: Instant, jobs: int, *, cluster_id: str = "id", seed: int = 1) -> None:
        self._index: SchedulingIndex | None = None
        self._events: list[e.Event] = []
        self._random = random.Random(seed)
        self._due: list[Reported] = []
        self._ordered: set[tuple[int, int, str]] = set()
        self._numbers = itertools.count()
        span_s = SPAN_S if jobs > 100 else SPAN_S // 6
        begun = Instant(until - span_s * MICROSECONDS_PER_SECOND)
        super().__init__(dict(POOLS), 64 << 20, NODES, CPUS, cluster_id=cluster_id, name=CLUSTER, start=begun)
        if jobs:
            self._live(until, jobs)
        self.at = until

    def commit(self, entry: Entry) -> None:
        batch = Batch(Revision(self.state.revision), self.at, (entry,))
        following = apply_batch(self.state, batch)
        assert following is not None
        self.state, self.at = following, Instant(following.at)
        self.ledger.append(batch)
        self._events.extend(entry.events)

    def run_pass(self) -> None:
        while True:
            if self._index is None:
                self._index = SchedulingIndex(self.state)
            else:
                self._index.advance(self.state, self._events)
            self._events = []
            events = run_cycle(self._index, self.at)
            if not events:
                return
            self.commit_pass(events)

    def _live(self, until: Instant, jobs: int) -> None:
        """Submit the jobs one after the other, and let the agents report until the end."""
        begun, left = self.at, jobs
        while True:
            arrival = begun + (until - begun) * (jobs - left) // jobs if left else until
            while self._due and self._due[0].at < arrival:
                self._report(heapq.heappop(self._due))
            if arrival >= until:
                return
            self.at = Instant(max(self.at, arrival))
            self.run_pass()
            left -= self._submit(min(left, 40))
            self._follow()

    def _submit(self, most: int) -> int:
        """Submit a job or an array, and return the number of jobs."""
        chance, name, user = self._random, self._random.choice(_NAMES), self._random.choice(_USERS)
        pool = "wide" if chance.random() < 0.4 else "fast"
        size = chance.choice((1, 2, 4, 8, 12)) * (6 if pool == "wide" else 1)
        array = parse_array(f"0-{most - 1}")[0] if most > 8 and chance.random() < 0.04 else ()
        hold = Hold.USER if chance.random() < 0.01 else Hold.NONE
        limit_s = chance.choice((1_800, 3_600, 7_200))
        more = {"array": array} if array else {}
        self.submit(f"capacity={size * GIB} pool={pool}", who=user, name=name, time_limit_s=limit_s, hold=hold, **more)
        return max(1, len(array))

    def _follow(self) -> None:
        """Note when new orders will be reported."""
        for node in range(1, NODES + 1):
            for order in self.orders(f"n{node}"):
                key = (order.job, order.attempt, order.stage)
                if key not in self._ordered:
                    self._ordered.add(key)
                    self._note(order, 0.5, started=False)

    def _note(self, order: Order, wait_s: float, *, started: bool) -> None:
        at = self.at + int(wait_s * MICROSECONDS_PER_SECOND)
        heapq.heappush(self._due, Reported(at, next(self._numbers), order.job, order.attempt, started))

    def _report(self, due: Reported) -> None:
        self.at = Instant(max(self.at, due.at))
        self.run_pass()
        order = next((one for one in self.orders(self._agent(due.job)) if one.job == due.job), None)
        if order is None or order.attempt != due.attempt:
            return
        if not due.started:
            if order.stage == "run":
                self.report(due.job, c.ScriptStarted(), order)
            self._note(order, self._random.uniform(*_SPREAD.get(order.stage, (1, 2))), started=True)
        else:
            self.report(due.job, self._result(order), order)
        self._follow()

    def _agent(self, job: int) -> str:
        return self.agent_of(job) if job in self.state.jobs else "n1"

    def _result(self, order: Order) -> c.OperationResult:
        chance = self._random.random()
        if order.stage == "run":
            return c.ScriptEnded(JobState.FAILED, exit_code=1) if chance < 0.03 else c.ScriptEnded(JobState.COMPLETED)
        if order.stage == "stage_out" and chance < 0.004:
            return c.OperationFailed("destination /out/results is read-only", final=True)
        if order.stage == "stage_in" and chance < 0.004:
            return c.OperationFailed("input /in/mesh-7.h5 does not exist", final=True)
        if order.stage not in ("stage_in", "stage_out"):
            return c.OperationDone()
        buffer = self.state.buffers[order.job]
        size, began = int(buffer.granted_bytes * 0.8), self.at - int(60 * MICROSECONDS_PER_SECOND)
        receipt = TransferReceipt(
            Stage[order.stage.upper()], order.attempt, files=12, size_bytes=size, written_bytes=size,
            started_at=Instant(began), ended_at=self.at,
        )  # fmt: skip
        return c.OperationDone(12, size, receipt=receipt)


def write_ledger(day: WorkingDay, directory: Path, cluster_id: str, replica: str, api: str) -> None:
    """Write the ledger of a day into a directory that has none; the leader changes twice."""
    members = initial((Member(replica, "127.0.0.1:7401", api),), version=1)
    changes = {len(day.ledger) // 3, 2 * len(day.ledger) // 3}
    term, rows = 1, [LedgerRow(1, 1, encode_configuration(members))]
    for place, batch in enumerate(day.ledger):
        term += place in changes
        rows.append(LedgerRow(place + 2, term, encode_batch(batch)))
    with Environment.open(
        directory, cluster_id=cluster_id, replica=replica, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        journal = Journal(environment)
        journal.set_term(term, replica)
        journal.append(rows)
        journal.set_commit(len(rows))
        revision = 0
        for row, batch in zip(rows, [None, *day.ledger], strict=True):
            revision += 0 if batch is None else len(batch.entries)
            journal.record_applied(row, Revision(revision))
        journal.flush_hints()
    assert day.state.revision == revision, state_digest(day.state).hex()
