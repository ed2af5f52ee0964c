"""Job counters of a replica: each event once, with ledger times, and nothing from before its start."""

from __future__ import annotations

from typing import Any

from forebay.cluster.server.totals.jobs import BOUNDS_S, Durations, JobTotals
from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages import commands as c
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.model.job_states import JobState
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.limits import POOLS_MAX
from forebay.replica.values.units import Instant
from tests.cluster.transitions import transition_of
from tests.replica.world import START, World

ONE = "#BB capacity=60 access=striped type=scratch"


class Counting(World):
    """World whose batches are counted as they are applied."""

    def __init__(self, **founding: Any) -> None:
        self.totals = JobTotals(START)
        super().__init__(**founding)

    def commit(self, entry: Entry) -> None:
        before = self.state
        super().commit(entry)
        self.totals.applied(transition_of(before, self.state, self.ledger[-1]))


def counted(durations: Durations) -> tuple[int, float]:
    return durations.count, durations.sum_s


def test_waits_runs_and_stages_are_timed_and_each_job_ends_once() -> None:
    world = Counting()
    first, second = world.submit(ONE), world.submit(ONE)
    world.advance(2)
    world.done(first)  # stage-in has ended
    world.advance(5)
    assert not isinstance(world.report(first, c.ScriptStarted()), Exception)
    world.advance(40)
    world.report(first, c.ScriptEnded(JobState.TIMEOUT))
    world.advance(1)
    world.finish(first)
    totals = world.totals
    assert (totals.submitted, counted(totals.start_waits), counted(totals.runs)) == (2, (1, 7.0), (1, 40.0))
    assert counted(totals.space_waits["fast"]) == (2, 48.0), "the first job got its space at once, the second after it"
    assert counted(totals.stages["stage_in"]) == (1, 2.0)
    assert {name: number for name, number in totals.ended.items() if number} == {"TIMEOUT": 1}
    world.settle(c.CancelJob(second, hurry=True))
    world.finish(second)
    world.advance(10_000_000)  # both jobs are purged, which counts no further end
    assert {name: number for name, number in totals.ended.items() if number} == {"TIMEOUT": 1, "CANCELLED": 1}


def test_failures_are_counted_by_stage_and_node_and_retries_by_stage() -> None:
    world = Counting()
    job = world.submit(ONE)
    world.report(job, c.OperationFailed("no such file"))
    world.advance(3_600)
    assert world.totals.failed == {("stage_in", "n1"): 1}
    assert world.totals.retried == {"stage_in": 1}
    world.advance(4)
    world.done(job)
    assert counted(world.totals.stages["stage_in"])[0] == 1
    assert counted(world.totals.stages["stage_in"])[1] < 3_600, "only the attempt that succeeded is timed"


def test_each_array_task_counts_as_a_submitted_job() -> None:
    world = Counting()
    world.submit(array=(1, 2, 5))
    assert world.totals.submitted == 3


def test_requeued_job_ends_again_and_its_first_start_is_timed_once() -> None:
    world = Counting()
    job = world.submit(ONE)
    for _ in range(2):
        world.done(job)
        world.report(job, c.ScriptStarted())
        world.advance(1)
        if world.totals.requeued == 0:
            world.settle(c.RequeueJob(job))
            while world.totals.requeued == 0:
                order = world.order(job)
                world.report(job, c.ScriptEnded(JobState.CANCELLED)) if order.stage == "run" else world.done(job)
    world.finish(job)
    assert (world.totals.requeued, world.totals.start_waits.count, world.totals.runs.count) == (1, 1, 2)
    assert world.totals.space_waits["fast"].count == 2


def test_events_before_the_process_start_are_not_counted_again() -> None:
    world = Counting()
    job = world.submit(ONE)
    world.advance(3)
    world.done(job)
    again = JobTotals(Instant(world.at + 1))
    _fold(world.ledger, again)
    assert again.submitted == 0
    assert sum(durations.count for durations in (again.start_waits, again.runs, *again.stages.values())) == 0
    assert not again.space_waits
    world.advance(1)
    world.finish(job)
    # Events applied from then on count once, as in a process that did not restart.
    _fold(world.ledger, again)
    assert counted(again.runs) == counted(world.totals.runs) == (1, 0.0)
    assert again.ended == world.totals.ended


def _fold(ledger: list[Batch], totals: JobTotals) -> None:
    before: State = EMPTY
    for batch in ledger:
        after = apply_batch(before, batch)
        assert after is not None
        totals.applied(transition_of(before, after, batch))
        before = after


def test_waits_of_deleted_pools_are_dropped_to_bound_their_number() -> None:
    world = Counting()
    for number in range(POOLS_MAX + 1):
        world.totals.space_waits[f"gone{number}"].add(1)
    world.submit(ONE)
    assert set(world.totals.space_waits) <= {"fast"}


def test_duration_counts_in_every_bucket_that_is_not_shorter() -> None:
    durations = Durations()
    for duration_s in (-5.0, 0.1, 0.2, 100_000.0):
        durations.add(int(duration_s * 1_000_000))
    found = dict(durations.buckets())
    assert found["0.1"] == 2
    assert found["0.3"] == found[str(float(BOUNDS_S[-1]))] == 3
    assert (found["+Inf"], durations.count, round(durations.sum_s, 3)) == (4, 4, 100_000.3)
