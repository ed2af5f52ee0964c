"""Scheduling index: the facts about a State that a scheduling cycle needs, updated incrementally.

Theory of operation
===================

A scan of all jobs would produce the events of a cycle (the reference implementation of the tests does so). With the
index, a cycle produces the same events, but checks only the jobs that may get something. Its cost depends on the number
of its events, not on the number of pending jobs. The index is not part of the State. The leader advances one together
with its State; other callers build their own. It is built from a State, in portions if necessary, and then advanced by
the events that lead to the next State.

The index consists of component indexes: queues of candidates, arrays, nodes, timers, holders of pools, waits for
operation slots, candidates for preemption, reservations, dependencies and singletons. `index_row` returns what they
contain about one unfinished job. An event touches jobs and nodes (`TOUCHES`). The rows of touched jobs are computed
anew from the new State, and each component receives the old and the new row (`apply`). Two effects extend further: a
change of a node touches the jobs on it, and a job that reaches a milestone touches the jobs that wait for it. Facts
that depend on several jobs are computed last, once per batch (`refresh`): which tasks of an array may be queued, and
which nodes could run their first candidate.

A scheduling cycle (`scheduling_cycle`) merges the queues, and leaves a queue as soon as no later candidate in it can
get anything. To explain why a job waits, a cycle runs up to the position of the job; candidates that it skips would
change nothing.

Tests (tests/replica/scheduler/test_index.py) check that an advanced index and each of its components equal newly built
ones, and that events and next due time equal those of the reference implementation.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from operator import attrgetter

from forebay.replica.messages import events as e
from forebay.replica.model import BufferState, JobState
from forebay.replica.operations import jobs_of_peer_movers, reservation_instants
from forebay.replica.scheduler.admission import usable_bytes
from forebay.replica.scheduler.dependency_index import DependencyIndex, SingletonIndex
from forebay.replica.scheduler.gates import (
    REPLAN_S,
    buffer_gate,
    early_gate,
    external_job_verdict,
    later_reason,
    waits_for_space,
)
from forebay.replica.scheduler.index_row import (
    FINISHED_ROW,
    GONE_ROW,
    NO_RARE,
    NO_ROW,
    IndexRow,
    Key,
    SmallIndex,
    index_row,
)
from forebay.replica.scheduler.key_index import KeyIndex, TimerIndex
from forebay.replica.scheduler.node_index import NodeIndex
from forebay.replica.scheduler.preemption import PreemptionCandidate
from forebay.replica.scheduler.queue_index import ArrayIndex, QueueIndex
from forebay.replica.state import State
from forebay.replica.values import Instant, SortedKeys, Verdict, seconds


class Touches(Enum):
    """Jobs and nodes whose index rows may change with an event."""

    JOB = auto()
    """The event's job, and the head of the pool's queue that the job was backfilled past."""
    JOB_AND_NAME = auto()
    """The event's job, and the jobs that are or were the first of its name."""
    TASKS = auto()
    """The event's job, or the tasks of its array."""
    NODE = auto()
    """The event's node, the jobs on it, and the jobs that the event names."""
    POOL = auto()
    """Jobs that wait for more space than the event's pool has, or had, in service."""
    RESERVATION = auto()
    """The jobs of the event's reservation."""
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
    e.SinkAdvanced: Touches.NOTHING,
    e.SinkRemoved: Touches.NOTHING,
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
"""Event type -> touched jobs and nodes. Most events touch their job; these are not listed."""


_PASSES = (e.BufferAllocated, e.ExternalJobSpaceAllocated)
"""Events that may count toward the limit on passing the head of a pool's queue."""


class SchedulingIndex:
    """Index of one State for scheduling cycles; `advance` updates it to the next State."""

    def __init__(self, state: State) -> None:
        """Create the index of `state`; `prepare` or the first query checks every job once."""
        self.state = state
        self.queues = QueueIndex()
        self.nodes = NodeIndex()
        self.timers = TimerIndex()
        self.holders: KeyIndex[str, Key] = KeyIndex(attrgetter("holding"))
        """Pool -> its holders, by expected end of their runs."""
        self.slots: KeyIndex[tuple[int, str], tuple[Instant, int]] = KeyIndex(attrgetter("rare.slot"))
        """(stage, user) -> jobs that wait for an operation slot, in order of arrival."""
        self.preemptible: KeyIndex[str, PreemptionCandidate] = KeyIndex(attrgetter("rare.preemptible"))
        """Pool -> jobs whose buffers may be preempted, those last in the scheduling order first."""
        self.reservations: KeyIndex[str, int] = KeyIndex(attrgetter("rare.reservation"))
        """Reservation -> its unfinished jobs."""
        self.external_jobs: KeyIndex[str, int] = KeyIndex(attrgetter("rare.external_job"))
        """Pool -> external jobs whose setups wait for its space, in order of arrival."""
        self.lingering: KeyIndex[str, tuple[Instant, int]] = KeyIndex(attrgetter("rare.lingering"))
        """Pool -> lingering external jobs, oldest first."""
        self.pass_limit_reached: KeyIndex[str, int] = KeyIndex(attrgetter("rare.pass_limit_reached"))
        """Pool -> jobs that wait for its space and have been passed as often as allowed."""
        self.dependencies = DependencyIndex(state)
        self.singletons = SingletonIndex()
        self._rows: dict[int, IndexRow] = {}
        self.arrays = ArrayIndex(self.queues, self._rows)
        self._of_all: tuple[SmallIndex, ...] = (self.queues, self.nodes, self.timers, self.holders)
        self._of_few: tuple[SmallIndex, ...] = (
            *(self.arrays, self.slots, self.preemptible, self.reservations),
            *(self.external_jobs, self.lingering, self.pass_limit_reached),
        )
        """Components that ignore rows without rare fields."""
        self._touched: set[int] = set(state.unfinished)
        self._touched_nodes: set[str] = set(state.nodes)

    # Updates ---------------------------------------------------------------------------------------------------------

    def advance(self, state: State, events: Iterable[e.Event]) -> None:
        """Advance the index to `state`, which results from applying `events` to the current State."""
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
                self._touched.update(jobs_of_peer_movers(state, event.node))  # type: ignore[attr-defined]
                self._touched.update(jobs_of_peer_movers(former, event.node))  # type: ignore[attr-defined]
            if isinstance(event, e.NodeCameBack):
                self._touched.update(event.jobs)
        elif touches is Touches.POOL:
            pool = event.pool.name if isinstance(event, e.PoolSet) else event.pool  # type: ignore[attr-defined]
            low, high = sorted((usable_bytes(former, pool), usable_bytes(state, pool)))
            # Tasks blocked by their arrays are in no queue.
            self._touched |= self.queues.between(pool, low, high) | self.arrays.between(low, high)
        elif touches is Touches.RESERVATION:
            name = event.reservation.name if isinstance(event, e.ReservationSet) else event.reservation  # type: ignore[attr-defined]
            self._touched.update(self.reservations.keys.get(name, ()))
        else:
            self._touched_nodes.update(state.nodes)
            self._touched.update(state.unfinished)
            self.arrays.change_all()

    def prepare(self, jobs_max: int) -> bool:
        """Check at most `jobs_max` touched jobs; return whether none is left, so that a cycle is cheap now."""
        # Jobs are not checked when they are touched, because the next batch may touch them again.
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
        """Check all touched jobs."""
        while not self.prepare(len(self._touched)):
            pass

    def _check(self, job_id: int) -> set[int]:
        """Update the index for one job; return the jobs whose gates may have changed with it."""
        state, before = self.state, self._rows.get(job_id, NO_ROW)
        job = state.jobs.get(job_id)
        if job is not None and job_id in state.unfinished:
            after = self._rows[job_id] = index_row(state, job, state.buffers.get(job_id), self.queues.names)
            if before is NO_ROW:
                self.dependencies.note_unfinished(job_id)
        else:
            after = GONE_ROW if job is None else FINISHED_ROW
            self._rows.pop(job_id, None)
        # The first job of a name may change although this job's row does not.
        found = self.singletons.apply(state, job_id, before, after)
        if before == after:
            return found
        for index in self._of_all:
            index.apply(job_id, before, after)
        if before.rare is not NO_RARE or after.rare is not NO_RARE:
            for index in self._of_few:
                index.apply(job_id, before, after)
        return found | self.dependencies.apply(state, job_id, before, after)

    # Queries ---------------------------------------------------------------------------------------------------------

    def due_at(self, job_id: int) -> Instant:
        """Return the time of the next timed action of an unfinished job; NEVER if there is none."""
        return Instant(self._rows[job_id].due_at)

    def waiting_for_slot(self, stage: int) -> dict[str, SortedKeys[tuple[Instant, int]]]:
        """Return the jobs that wait for an operation slot of a stage: user -> positions, in order of arrival."""
        return {user: places for (of_stage, user), places in self.slots.keys.items() if of_stage == stage}

    def gate_verdict(self, job_id: int) -> Verdict | None:
        """Return the verdict on an unfinished job, if no scheduling cycle is needed to find it.

        Return None for candidates for space or CPUs, and for external jobs that wait for space.
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
        """Return the earliest time after `after` at which a cycle may have events without new commands, or None."""
        self.catch_up()
        first = self.timers.timers.first_after((after + 1, 0))
        due = [] if first is None else [first[0]]
        due.extend(instant for instant in reservation_instants(self.state) if instant > after)
        if self.queues.space_requests:
            due.append(after + seconds(REPLAN_S))
        return Instant(min(due)) if due else None
