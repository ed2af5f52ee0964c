"""Properties over random histories of external jobs beside native jobs: a scheduler that restarts, repeats and comes
late.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.buffers import HOLDING, BufferState
from forebay.replica.operations.external_jobs import ExternalJobPhase, external_job_phase
from forebay.replica.scheduler.backfill import BEING_REMOVED
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.scheduling_cycle import space_for_setups
from forebay.replica.values.errors import Rejection
from tests.replica.external_job_world import DATA, RESULTS, ExternalJobWorld, asked
from tests.replica.scheduler.test_index import IndexedWorld
from tests.replica.test_histories import Histories
from tests.replica.world import OPERATOR

JOBS = ("1", "2", "3", "4", "5")
SIZES = (5, 20, 45, 80)


class IndexedExternalJobWorld(ExternalJobWorld, IndexedWorld):
    """A world with external jobs whose index is held against the walk over all jobs at each step."""


class ExternalJobHistories(Histories):
    """As Histories, with external jobs of another scheduler in the same pools."""

    def new_world(self) -> ExternalJobWorld:
        made = IndexedExternalJobWorld(
            {"fast": 100, "bulk": 50}, granularity=5, nodes=3, cpus=2, stage_retries=1, max_passes=2
        )
        made.configure(FinishedJobsKept="3")
        return made

    @property
    def external_jobs(self) -> ExternalJobWorld:
        assert isinstance(self.world, ExternalJobWorld)
        return self.world

    @rule(
        job=st.sampled_from(JOBS),
        size=st.sampled_from(SIZES),
        pool=st.sampled_from(["fast", "bulk"]),
        results=st.booleans(),
        epoch=st.sampled_from([0, 0, 1, 2]),
    )
    def sets_up(self, job: str, size: int, pool: str, results: bool, epoch: int) -> None:
        request = asked(size, DATA, *([RESULTS] if results else []), pool=pool)
        self.external_jobs.setup(job, request, epoch=epoch)

    @rule(
        job=st.sampled_from(JOBS), what=st.sampled_from(["in", "begin", "end", "out"]), epoch=st.sampled_from([0, 0, 1])
    )
    def goes_on(self, job: str, what: str, epoch: int) -> None:
        world = self.external_jobs
        {"in": world.stage_in, "begin": world.begin, "end": world.end, "out": world.stage_out}[what](job, epoch)

    @rule(job=st.sampled_from(JOBS), size=st.sampled_from(SIZES), steps=st.integers(1, 6), fails=st.booleans())
    def comes_further(self, job: str, size: int, steps: int, fails: bool) -> None:
        """The external job takes some steps of a life in which all goes well, but perhaps its last operation."""
        world = self.external_jobs
        for step in range(steps):
            phase = world.phase(job)
            ordered = (ExternalJobPhase.STAGING_IN, ExternalJobPhase.STAGING_OUT, ExternalJobPhase.TEARDOWN)
            if phase in ordered:
                orders = [
                    order
                    for order in world.orders(world.external_job(job).mover)
                    if order.job == world.external_job(job).id
                ]
                if orders and not world.state.nodes[world.external_job(job).mover].down:
                    (world.fail if fails and step == steps - 1 else world.finish_operation)(job)
            elif phase in (ExternalJobPhase.NONE, ExternalJobPhase.OVER, ExternalJobPhase.LINGERING):
                world.setup(job, asked(size, DATA, RESULTS))
            elif phase in (ExternalJobPhase.SET_UP, ExternalJobPhase.STAGE_IN_FAILED):
                world.stage_in(job)
            else:
                {ExternalJobPhase.STAGED_IN: world.begin, ExternalJobPhase.RUNNING: world.end}.get(
                    phase, world.stage_out
                )(job)

    @rule(job=st.sampled_from(JOBS), hurry=st.booleans())
    def tears_down(self, job: str, hurry: bool) -> None:
        self.external_jobs.tear_down(job, hurry=hurry)

    @rule(linger=st.sampled_from(["0", "60", "300"]))
    def restarts(self, linger: str) -> None:
        """The scheduler starts: all that has not run is torn down with hurry, as Slurm does."""
        self.external_jobs.configure(ExternalJobLinger=linger)
        for job in JOBS:
            if self.external_jobs.phase(job) in (ExternalJobPhase.STAGING_IN, ExternalJobPhase.STAGED_IN):
                self.external_jobs.tear_down(job, hurry=True)

    @rule(data=st.data(), partial=st.booleans(), discard=st.booleans())
    def results_are_exported_or_discarded(self, data: st.DataObject, partial: bool, discard: bool) -> None:
        job = self.some_job(data)
        if job is not None:
            self.world.settle(c.ClearBuffer(job, discard=True) if discard else c.ExportBuffer(job, partial), OPERATOR)

    @invariant()
    def there_is_an_epoch_for_each_record_and_none_twice(self) -> None:
        seen: dict[str, set[int]] = {}
        for job in self.world.state.jobs.values():
            if job.external_job is not None:
                epochs = seen.setdefault(job.external_job.name, set())
                assert job.external_job.epoch not in epochs
                epochs.add(job.external_job.epoch)
        state = self.world.state
        assert {name: len(epochs) for name, epochs in seen.items()} == {
            n: g.jobs for n, g in state.external_jobs.items()
        }
        assert all(max(epochs) <= state.external_jobs[name].epoch for name, epochs in seen.items())

    @invariant()
    def what_ran_and_is_not_exported_is_there_unless_somebody_said_otherwise(self) -> None:
        for batch in self.world.ledger[-1:]:
            for entry in batch.entries:
                said = entry.command in ("tear_down_external_job", "clear_buffer")
                started = [event for event in entry.events if isinstance(event, e.TeardownStarted)]
                done = {event.job for event in entry.events if isinstance(event, e.StagedOut)}
                for event in started:
                    job = self.world.state.jobs[event.job]
                    ran = job.external_job is not None and job.started_at
                    has_results = job.request.buffer is not None and job.request.buffer.stage_out
                    assert not (ran and has_results) or said or event.job in done

    @invariant()
    def only_the_last_epoch_of_an_external_job_can_still_run(self) -> None:
        state = self.world.state
        for job_id in state.unfinished:
            job, buffer = state.jobs[job_id], state.buffers.get(job_id)
            if job.external_job is None or buffer is None or state.external_jobs[job.external_job.name].job == job_id:
                continue
            phase = external_job_phase(job, buffer)
            assert phase in (ExternalJobPhase.RETAINED, ExternalJobPhase.TEARDOWN, ExternalJobPhase.TEARDOWN_FAILED)

    @invariant()
    def who_waits_has_no_space_and_who_lingers_has(self) -> None:
        state = self.world.state
        for job_id in state.unfinished:
            job, buffer = state.jobs[job_id], state.buffers.get(job_id)
            if job.external_job is None or buffer is None:
                continue
            held = buffer.state in HOLDING
            assert held == (external_job_phase(job, buffer) is not ExternalJobPhase.WAITING)
            if external_job_phase(job, buffer) is ExternalJobPhase.LINGERING:
                assert buffer.state in (BufferState.STAGING_IN, BufferState.STAGED_IN)

    @invariant()
    def one_more_setup_is_given_what_is_shown_as_free_and_no_grain_more(self) -> None:
        state = self.world.state
        shared = [name for name, pool in state.pools.items() if pool.filesystem]
        for pool, free in space_for_setups(SchedulingIndex(state), shared, state.at).items():
            grain = state.pools[pool].granularity_bytes
            most = free // grain * grain
            if most:
                world = self.with_one_more(pool, most)
                if world.phase("more") is not ExternalJobPhase.SET_UP:
                    removed = [
                        buffer.held_bytes
                        for buffer in world.state.buffers.values()
                        if buffer.pool == pool and buffer.state in BEING_REMOVED
                    ]
                    assert most > world.free(pool) and most <= world.free(pool) + sum(removed)
            if most + grain <= state.pools[pool].usable_bytes:
                assert self.with_one_more(pool, most + grain).phase("more") is not ExternalJobPhase.SET_UP

    def with_one_more(self, pool: str, size: int) -> ExternalJobWorld:
        """Return how the world goes on with one more setup; this one stays as it is."""
        made = ExternalJobWorld.__new__(ExternalJobWorld)
        made.state, made.at, made.counter = self.world.state, self.world.at, self.world.counter
        made.ledger, made.reasons = [], []
        outcome = made.setup("more", asked(size, DATA, pool=pool))
        assert not isinstance(outcome, Rejection), outcome
        return made

    def teardown(self) -> None:
        """At the end the scheduler is done with all of its external jobs, and an operator with what they left."""
        world = self.external_jobs
        for job in JOBS:
            world.tear_down(job, hurry=True)
        for job_id in sorted(world.state.unfinished):
            if world.state.jobs[job_id].external_job is not None:
                outcome = world.settle(c.ClearBuffer(job_id, discard=True))
                assert isinstance(outcome, Rejection | int)
        super().teardown()


ExternalJobHistories.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestExternalJobHistories = ExternalJobHistories.TestCase
TestExternalJobHistories.pytestmark = [pytest.mark.campaign(3)]  # type: ignore[attr-defined]
