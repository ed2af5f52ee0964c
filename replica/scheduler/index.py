"""Scheduling index: what a pass needs to know of a State, kept up to date instead of being gathered each time.

Theory of operation
===================

A walk over all jobs would say what a pass does (the reference of the tests does so). The index gives the very same
events by checking only the jobs that may get something: the cost of a pass follows what it does, not how many jobs
wait. It is no part of the State: the leader keeps one in step with its State, whoever else asks builds one. It is built
from a State, a portion at a time if need be, and advanced by the events that lead to the next.

It is composed of small indexes: queues of candidates, arrays, nodes, timers, holders of pools, waits for operation
slots, candidates for preemption, reservations, dependencies and singletons. For each job that is not over,
`index_row` says what they hold of it. An event touches jobs and nodes (`TOUCHES`); the rows of those are computed anew
from the new State, and each small index is given the former row and the new one (`apply`). Two things reach further
than the jobs that an event names: a node that changes touches the jobs on it, and a job that passes a milestone touches
those that wait for it. What depends on several jobs at once is done last, once for a batch (`refresh`): which tasks of
an array have room in it, and which nodes could run their first candidate.

A scheduling pass (`scheduling_cycle`) merges the queues, and leaves one as soon as nothing further back can get
anything. Why a job waits is a pass that stops where it reaches the job: what it leaves out changes nothing.

Laws (tests/replica/scheduler/test_index.py): the advanced index equals one built afresh, and so does each small one;
its events and its next instant are those of the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from operator import attrgetter

from replica.messages import events as e
from replica.model import BufferState, JobState
from replica.operations import jobs_beside, reservation_instants
from replica.scheduler.admission import usable_bytes
from replica.scheduler.dependency_index import DependencyIndex, SingletonIndex
from replica.scheduler.gates import (
    REPLAN_S,
    buffer_gate,
    early_gate,
    external_job_verdict,
    later_reason,
    waits_for_space,
)
from replica.scheduler.index_row import FINISHED_ROW, GONE_ROW, NO_RARE, NO_ROW, IndexRow, Key, SmallIndex, index_row
from replica.scheduler.key_index import KeyIndex, TimerIndex
from replica.scheduler.node_index import NodeIndex
from replica.scheduler.preemption import PreemptionCandidate
from replica.scheduler.queue_index import ArrayIndex, QueueIndex
from replica.state import State
from replica.values import Instant, SortedKeys, Verdict, seconds


class Touches(Enum):
    """Jobs and nodes whose index rows may change with an event."""

    JOB = auto()
    """Its job, and the one that was first in line and passed by it."""
    JOB_AND_NAME = auto()
    """Its job, and who is or was the first of the job's name."""
    TASKS = auto()
    """Its job, or the tasks of its array."""
    NODE = auto()
    """Its node, the jobs on it, and those that it names."""
    POOL = auto()
    """Those who wait for more than its pool had, or now has, in service."""
    RESERVATION = auto()
    """The jobs of its reservation."""
    EVERYTHING = auto()
    NOTHING = auto()


TOUCHES: dict[type[e.Event], Touches] = {
    e.JobUpdated: Touches.JOB_AND_NAME,
    e.JobSubmitted: Touches.TASKS,
    e.NodeRegistered: Touches.NODE,
    e.NodeDrained: Touches.NODE,
    e.NodeResumed: Touches.NODE,
    e.NodeWentDown: Touches.NODE,
    e.NodeCameBack: Touches.NODE,
    e.NodeLost: Touches.NODE,
    e.PoolSet: Touches.POOL,
    e.PoolRemoved: Touches.POOL,
    e.FilesystemSet: Touches.EVERYTHING,
    e.FilesystemRemoved: Touches.EVERYTHING,
    e.ReservationSet: Touches.RESERVATION,
    e.ReservationDeleted: Touches.RESERVATION,
    e.ReservationStarted: Touches.RESERVATION,
    e.ReservationEnded: Touches.RESERVATION,
    e.ClusterFounded: Touches.EVERYTHING,
    e.ClusterRecovered: Touches.NOTHING,
    e.SiteConfigured: Touches.EVERYTHING,
    e.AccountSet: Touches.EVERYTHING,
    e.AccountDeleted: Touches.EVERYTHING,
    e.QosSet: Touches.EVERYTHING,
    e.QosDeleted: Touches.EVERYTHING,
    e.SchedulingRulesSet: Touches.EVERYTHING,
    e.PartitionSet: Touches.EVERYTHING,
    e.PartitionDeleted: Touches.EVERYTHING,
    e.TransferRulesSet: Touches.EVERYTHING,
    e.FeatureLevelRaised: Touches.EVERYTHING,
    e.ClockSet: Touches.EVERYTHING,
    e.SchedulerBound: Touches.NOTHING,
    e.SchedulerReleased: Touches.NOTHING,
    e.ExternalJobMissing: Touches.NOTHING,
    e.DrillStarted: Touches.NOTHING,
    e.DrillConfirmed: Touches.NOTHING,
    e.DrillRenewed: Touches.NOTHING,
    e.DrillAbortRequested: Touches.NOTHING,
    e.DrillEnded: Touches.NOTHING,
    e.DrillsLocked: Touches.NOTHING,
    e.DrillsUnlocked: Touches.NOTHING,
    e.MailSent: Touches.NOTHING,
    e.MailDropped: Touches.NOTHING,
    e.LicenseSet: Touches.NOTHING,
    e.LicenseDeleted: Touches.NOTHING,
    e.UsageReset: Touches.NOTHING,
    e.NodeAdmitted: Touches.NOTHING,
    e.CertificateRevoked: Touches.NOTHING,
    e.CertificatesUnrevoked: Touches.NOTHING,
    e.SessionOpened: Touches.NOTHING,
    e.SessionsEnded: Touches.NOTHING,
    e.CachedRepliesDropped: Touches.NOTHING,
    e.StateDigested: Touches.NOTHING,
    e.HistoriesCounted: Touches.NOTHING,
    e.DisclosureKeyDrawn: Touches.NOTHING,
}
"""Event type -> what it touches. Events that are not listed touch their job, as most events do."""


_PASSES = (e.BufferAllocated, e.ExternalJobSpaceAllocated)
"""Events that may count against the first in line for a pool."""


class SchedulingIndex:
    """Index of one State for scheduling passes; `advance` takes it to the next."""

    def __init__(self, state: State) -> None:
        """Begin the index of `state`; `prepare` or the first question checks every job once."""
        self.state = state
        self.queues = QueueIndex()
        self.nodes = NodeIndex()
        self.timers = TimerIndex()
        self.holders: KeyIndex[str, Key] = KeyIndex(attrgetter("holding"))
        """Pool -> who holds a part of it, by until when."""
        self.slots: KeyIndex[tuple[int, str], tuple[Instant, int]] = KeyIndex(attrgetter("rare.slot"))
        """(stage, user) -> who waits for an operation slot, first come first."""
        self.preemptible: KeyIndex[str, PreemptionCandidate] = KeyIndex(attrgetter("rare.preemptible"))
        """Pool -> jobs whose staged buffer may be taken back, the last ones in the order of candidates first."""
        self.reservations: KeyIndex[str, int] = KeyIndex(attrgetter("rare.reservation"))
        """Reservation -> its jobs that are not over."""
        self.external_jobs: KeyIndex[str, int] = KeyIndex(attrgetter("rare.external_job"))
        """Pool -> the external jobs whose setups wait for space of it, first come first."""
        self.lingering: KeyIndex[str, tuple[Instant, int]] = KeyIndex(attrgetter("rare.lingering"))
        """Pool -> the external jobs that linger there, the oldest first."""
        self.pass_limit_reached: KeyIndex[str, int] = KeyIndex(attrgetter("rare.pass_limit_reached"))
        """Pool -> jobs that wait for space of it and have been passed as often as may be."""
        self.dependencies = DependencyIndex(state)
        self.singletons = SingletonIndex()
        self._rows: dict[int, IndexRow] = {}
        self.arrays = ArrayIndex(self.queues, self._rows)
        self._of_all: tuple[SmallIndex, ...] = (self.queues, self.nodes, self.timers, self.holders)
        self._of_few: tuple[SmallIndex, ...] = (
            *(self.arrays, self.slots, self.preemptible, self.reservations),
            *(self.external_jobs, self.lingering, self.pass_limit_reached),
        )
        """Those that hold nothing of a row without rare fields."""
        self._touched: set[int] = set(state.unfinished)
        self._touched_nodes: set[str] = set(state.nodes)

    # From one State to the next --------------------------------------------------------------------------------------

    def advance(self, state: State, events: Iterable[e.Event]) -> None:
        """Become the index of `state`, which is what `events` made of the present one."""
        former, self.state = self.state, state
        for event in events:
            touches = TOUCHES.get(type(event), Touches.JOB)
            if touches is Touches.JOB:
                self._touched.add(event.job)  # type: ignore[attr-defined]  # a test holds that all others have one
                if isinstance(event, _PASSES) and event.passed:
                    self._touched.add(event.passed)
            elif touches is not Touches.NOTHING:
                self._touch(touches, event, former)

    def _touch(self, touches: Touches, event: e.Event, former: State) -> None:
        state = self.state
        if isinstance(event, e.JobUpdated):
            self._touched.add(event.job)
            if event.change.name is not None:
                self._touched |= self.singletons.apply_rename(former, state, event.job)
        elif touches is Touches.TASKS:
            self._touched.update(e.jobs_of(event))
        elif touches is Touches.NODE:
            self._touched_nodes.add(event.node)  # type: ignore[attr-defined]
            if state.filesystems:
                self._touched.update(jobs_beside(state, event.node))  # type: ignore[attr-defined]
                self._touched.update(jobs_beside(former, event.node))  # type: ignore[attr-defined]
            if isinstance(event, e.NodeCameBack):
                self._touched.update(event.jobs)
        elif touches is Touches.POOL:
            pool = event.pool.name if isinstance(event, e.PoolSet) else event.pool  # type: ignore[attr-defined]
            low, high = sorted((usable_bytes(former, pool), usable_bytes(state, pool)))
            # Tasks that their arrays keep back stand in no queue.
            self._touched |= self.queues.between(pool, low, high) | self.arrays.between(low, high)
        elif touches is Touches.RESERVATION:
            name = event.reservation.name if isinstance(event, e.ReservationSet) else event.reservation  # type: ignore[attr-defined]
            self._touched.update(self.reservations.keys.get(name, ()))
        else:
            self._touched_nodes.update(state.nodes)
            self._touched.update(state.unfinished)
            self.arrays.change_all()

    def prepare(self, jobs_max: int) -> bool:
        """Check up to so many jobs that were touched; return whether none is left, so that a pass is cheap now."""
        # Not as soon as they are touched: the next batch may touch them again.
        touched = self._touched
        if self._touched_nodes:
            for name in self._touched_nodes:
                touched |= self.nodes.jobs_on(name)
            self.nodes.change(self._touched_nodes)
            self._touched_nodes = set()
        for _ in range(min(jobs_max, len(touched))):
            touched |= self._check(touched.pop())
            if self.dependencies.has_watched:
                self.dependencies.has_watched = False
                break
        if touched:
            return False
        self.arrays.refresh(self.state)
        self.nodes.refresh(self.state, self.queues.heads)
        return True

    def catch_up(self) -> None:
        """Make the index true for every job that was touched, however many there are."""
        while not self.prepare(len(self._touched)):
            pass

    def _check(self, job_id: int) -> set[int]:
        """Make the index true for one job; return those whose gates may be others by what has changed about it."""
        state, before = self.state, self._rows.get(job_id, NO_ROW)
        job = state.jobs.get(job_id)
        if job is not None and job_id in state.unfinished:
            after = self._rows[job_id] = index_row(state, job, state.buffers.get(job_id), self.queues.names)
            if before is NO_ROW:
                self.dependencies.note_unfinished(job_id)
        else:
            after = GONE_ROW if job is None else FINISHED_ROW
            self._rows.pop(job_id, None)
        # Who is first of a name may be another one though nothing about the job is.
        found = self.singletons.apply(state, job_id, before, after)
        if before == after:
            return found
        for index in self._of_all:
            index.apply(job_id, before, after)
        if before.rare is not NO_RARE or after.rare is not NO_RARE:
            for index in self._of_few:
                index.apply(job_id, before, after)
        return found | self.dependencies.apply(state, job_id, before, after)

    # What it is asked ------------------------------------------------------------------------------------------------

    def due_at(self, job_id: int) -> Instant:
        """Return when something is due for a job that is not over, by time alone; NEVER for nothing."""
        return Instant(self._rows[job_id].due_at)

    def waiting_for_slot(self, stage: int) -> dict[str, SortedKeys[tuple[Instant, int]]]:
        """Return who waits for an operation slot of a stage: user -> places, first come first."""
        return {user: places for (of_stage, user), places in self.slots.keys.items() if of_stage == stage}

    def gate_verdict(self, job_id: int) -> Verdict | None:
        """Return what is said of a job that is not over, without a pass; None for a candidate for space or CPUs, and
        for an external job that waits for space.
        """
        state = self.state
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        if job.external_job is not None and buffer is not None:
            return None if buffer.state is BufferState.PENDING else external_job_verdict(state, job, buffer)
        if job.state is not JobState.PENDING:
            return later_reason(state, job, buffer)
        verdict = early_gate(state, job) or self.arrays.verdict(state, job_id)
        if verdict is not None or waits_for_space(job, buffer):
            return verdict
        return buffer_gate(state, job, buffer)

    def next_due(self, after: Instant) -> Instant | None:
        """Return the earliest instant after `after` at which a pass could do something by time alone, or None."""
        self.catch_up()
        first = self.timers.timers.first_after((after + 1, 0))
        due = [] if first is None else [first[0]]
        due.extend(instant for instant in reservation_instants(self.state) if instant > after)
        if self.queues.space_requests:
            due.append(after + seconds(REPLAN_S))
        return Instant(min(due)) if due else None
