"""An estimate by an index, which walks over nobody, is the one that goes over all jobs."""

from __future__ import annotations

from random import Random

import pytest

from forebay.replica.fold.fold import fold
from forebay.replica.model.job_states import JobState
from forebay.replica.scheduler import estimates
from forebay.replica.scheduler.estimates import estimate, jobs_ahead_in
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.values.units import NEVER, Instant, seconds
from tests.replica.reference.reference_scheduler import ahead_by_walk
from tests.replica.reference.reference_scheduler import run_cycle as reference_events
from tests.replica.scheduler.test_index import START, crowd, happening, submitted
from tests.replica.world import World


@pytest.mark.parametrize("seed", range(4))
def test_an_index_says_of_everybody_s_start_what_a_walk_over_all_jobs_says(seed: int) -> None:
    random = Random(seed)
    state, at = crowd(random, 0), START
    for number in range(1, 200):
        # Without arrays: of those an index knows what has room.
        state = fold(state, (submitted(random, number),), at)
    index, known, kinds = SchedulingIndex(state), 0, set()
    for _ in range(12):
        batch = list(reference_events(state, at))
        state = fold(state, batch, at)
        for job_id in random.sample(sorted(state.unfinished), min(20, len(state.unfinished))):
            events = happening(random, state, job_id, at)
            state = fold(state, events, at)
            batch += events
        index.advance(state, batch)
        while not index.prepare(1_000):
            pass
        pending = [job_id for job_id in state.unfinished if state.jobs[job_id].state is JobState.PENDING]
        for job_id in random.sample(sorted(pending), min(25, len(pending))):
            found = estimate(state, job_id, at, jobs_ahead_in(index))
            assert found == estimate(state, job_id, at, ahead_by_walk(state))
            known += found.is_known
            kinds |= {step.what for step in found.steps}
        at = Instant(at + seconds(20))
    assert known
    assert {"space", "cpus"} <= kinds


def test_a_throttled_task_is_not_waited_for_by_those_behind_it() -> None:
    world = World({"fast": 100}, cpus=64)
    tasks = world.submit("capacity=60", time_limit_s=3600, array=(1, 2, 3), throttle=1)
    behind = world.submit("capacity=60", time_limit_s=60)
    index = SchedulingIndex(world.state)
    index.prepare(1_000)
    by_index, by_walk = (
        estimate(world.state, behind, world.at, ahead) for ahead in (jobs_ahead_in(index), ahead_by_walk(world.state))
    )
    assert tasks in world.state.arrays
    assert NEVER < by_index.start_at < by_walk.start_at


def test_with_too_many_before_it_or_too_many_nodes_to_ask_nobody_says_when_a_job_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World({"fast": 100}, cpus=2)
    for _ in range(4):
        world.submit("capacity=60")
    last, bare = world.submit("capacity=60"), [world.submit(cpus=2) for _ in range(5)]
    index = SchedulingIndex(world.state)
    index.prepare(1_000)
    for ahead in (jobs_ahead_in(index), ahead_by_walk(world.state)):
        monkeypatch.setattr(estimates, "AHEAD_MAX", 3)
        assert estimate(world.state, last, world.at, ahead).is_known
        monkeypatch.setattr(estimates, "AHEAD_MAX", 2)
        found = estimate(world.state, last, world.at, ahead)
        assert not found.is_known
        assert "more than 2 jobs are ahead in the queue of pool fast" in found.steps[-1].sentence
        monkeypatch.undo()
    monkeypatch.setattr(estimates, "NODE_QUERIES_MAX", 0)
    found = estimate(world.state, bare[-1], world.at, jobs_ahead_in(index))
    assert not found.is_known
    assert "too many for an estimate" in found.steps[-1].sentence
