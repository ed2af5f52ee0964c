"""When a job should start: from the queue, the holders' time limits and measured transfers, with its reasons."""

from __future__ import annotations

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.jobs import Hold
from forebay.replica.model.pools import DRAIN_TIME_S, MEASURED_MAX, OperationStatistics
from forebay.replica.model.requests import Dependency, DependencyKind
from forebay.replica.scheduler import backfill
from forebay.replica.scheduler.estimates import Estimate, estimate, jobs_ahead_in
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.values.units import NEVER, seconds
from tests.replica.test_accounting import changed, given
from tests.replica.test_reservations import reserve
from tests.replica.world import World


def of(world: World, job: int) -> Estimate:
    index = SchedulingIndex(world.state)
    index.catch_up()
    return estimate(world.state, job, world.at, jobs_ahead_in(index))


def steps(found: Estimate) -> list[str]:
    return [step.what for step in found.steps]


def test_a_job_that_waits_for_space_starts_when_the_holder_s_time_is_over() -> None:
    world = World({"fast": 100})
    world.submit("capacity=60", time_limit_s=3600)
    second = world.submit("capacity=60", time_limit_s=600)
    third = world.submit("capacity=60")
    found = of(world, second)
    assert found.start_at == world.at + seconds(3600 + DRAIN_TIME_S)
    assert steps(found) == ["space", "cpus"]
    assert of(world, third).start_at == world.at + seconds(3600 + 600 + 2 * DRAIN_TIME_S)
    assert "1 jobs are ahead" in of(world, third).steps[0].sentence


def test_measured_transfers_take_the_place_of_the_constant() -> None:
    world = World({"fast": 100})
    script = "#!/bin/sh\n#DW jobdw capacity=60\n#DW stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a\n"
    job = world.submit(script=script)
    world.advance(20)
    world.report(job, c.OperationDone(1, 40))
    rates = world.state.rates["fast"].stage_in
    assert (rates.count, rates.bytes_per_s, rates.expected_us(30)) == (1, 2, seconds(10))
    world.done(job)
    world.done(job)
    world.advance(3)
    world.done(job)
    world.advance(4)
    world.done(job)
    assert world.state.rates["fast"].drain_us == seconds(7)
    world.submit(script=script, time_limit_s=100)
    waiting = world.submit(script=script)
    found = of(world, waiting)
    assert steps(found) == ["space", "stage_in", "cpus"]
    assert found.start_at == world.at + seconds(100 + 7 + 20)
    assert "2B/s" in found.steps[1].sentence or "2/s" in found.steps[1].sentence


def test_old_measurements_fade() -> None:
    sums = OperationStatistics()
    for _ in range(2 * MEASURED_MAX):
        sums = sums.with_operation(seconds(10), 100, 100)
    for _ in range(4 * MEASURED_MAX):
        sums = sums.with_operation(seconds(1), 100, 100)
    assert sums.count <= MEASURED_MAX
    assert sums.mean_us < seconds(2)


def test_a_job_that_waits_for_cpus_starts_after_those_before_it() -> None:
    world = World(cpus=2)
    first = world.submit(cpus=2, time_limit_s=100)
    world.report(first, c.ScriptStarted())
    world.advance(40)
    second, third = world.submit(cpus=2, time_limit_s=50), world.submit()
    assert of(world, second).start_at == world.at + seconds(60)
    assert of(world, third).start_at == world.at + seconds(60 + 50)


def test_begin_time_and_dependencies_are_counted_and_what_nobody_knows_is_said() -> None:
    world = World()
    later = world.at + seconds(500)
    found = of(world, world.submit(begin_at=later))
    assert (found.start_at, steps(found)) == (later, ["begin_time", "cpus"])
    running = world.submit(time_limit_s=100)
    world.report(running, c.ScriptStarted())
    after = world.submit(dependencies=(Dependency(DependencyKind.AFTER_OK, running),))
    assert of(world, after).start_at == world.at + seconds(100 + DRAIN_TIME_S)
    held = world.submit(hold=Hold.USER)
    assert (of(world, held).start_at, steps(of(world, held))) == (NEVER, ["hold"])
    behind = world.submit(dependencies=(Dependency(DependencyKind.AFTER_OK, held),))
    assert of(world, behind).start_at == NEVER


def test_an_estimate_is_never_before_now_and_holds_if_everybody_uses_his_time() -> None:
    world = World({"fast": 100}, cpus=100)
    jobs = [world.submit("capacity=70", time_limit_s=60) for _ in range(4)]
    said = [of(world, job).start_at for job in jobs]
    started: dict[int, int] = {}
    for _ in range(2_000):
        for job in jobs:
            if job in world.state.unfinished:
                job_state = world.state.jobs[job]
                over = job_state.started_at and world.at >= job_state.started_at + seconds(60)
                if world.state.buffers[job].state.word in ("staging-in", "pre-run") or over:
                    if world.state.buffers[job].state.word == "pre-run":
                        world.report(job, c.ScriptStarted())
                        started[job] = world.at
                    else:
                        world.done(job)
        world.advance(5)
    assert len(started) == 4
    for job, said_at in zip(jobs, said, strict=True):
        assert started[job] <= said_at + seconds(30)


def test_a_job_that_would_be_in_the_way_of_a_reservation_is_estimated_after_it() -> None:
    world = World({"fast": 100}, cpus=100)
    reserve(world, 1_000, 2_000)
    end_at = world.at + seconds(3_000)
    late = given(world, "capacity=50", time_limit_s=5_000)
    assert world.reason(late) == "BurstBufferResources"
    assert of(world, late).start_at == end_at
    assert "beside its reservations" in of(world, late).steps[0].sentence


def test_what_a_reservation_s_jobs_give_back_is_its_own_again_until_it_ends() -> None:
    world = World({"fast": 100}, cpus=100)
    reserve(world, 0, 90_000)
    end_at = world.at + seconds(90_000)
    given(world, "capacity=60", "eve", reservation="r", time_limit_s=600)
    own = given(world, "capacity=60", "eve", reservation="r", time_limit_s=600)
    others = given(world, "capacity=50", time_limit_s=600)
    assert of(world, own).start_at == world.at + seconds(600 + DRAIN_TIME_S)
    assert of(world, others).start_at == end_at


def test_those_who_wait_for_a_reservation_s_end_do_not_put_off_whom_they_do_not_hinder() -> None:
    world = World({"fast": 100}, cpus=100)
    reserve(world, 0, 90_000, size=50)
    holder = given(world, "capacity=45", time_limit_s=600)
    first = given(world, "capacity=60", time_limit_s=600)
    second = given(world, "capacity=40", time_limit_s=600)
    assert world.reason(holder) == "BurstBufferStageIn"
    assert of(world, first).start_at == world.at + seconds(90_000)
    assert of(world, second).start_at == world.at + seconds(600 + DRAIN_TIME_S)


def test_an_estimate_beside_a_reservation_holds_if_everybody_uses_his_time() -> None:
    world = World({"fast": 100}, cpus=100)
    reserve(world, 200, 1_000)
    jobs = [given(world, "capacity=30", time_limit_s=60 + 100 * index) for index in range(6)]
    said = {job: of(world, job).start_at for job in jobs}
    allocated: dict[int, int] = {}
    for _ in range(3_000):
        for job in jobs:
            buffer = world.state.buffers[job].state.word
            if buffer == "staging-in":
                allocated.setdefault(job, world.at)
                world.done(job)
            elif buffer == "pre-run":
                world.report(job, c.ScriptStarted())
            elif job in world.state.unfinished and buffer != "pending":
                started_at = world.state.jobs[job].started_at
                if buffer != "running" or world.at >= started_at + seconds(world.state.jobs[job].request.time_limit_s):
                    world.done(job)
        world.advance(5)
    assert sorted(allocated) == jobs
    for job in jobs:
        assert allocated[job] <= said[job] + seconds(60), job


def test_a_pool_that_shrank_gives_back_first_what_it_lacks() -> None:
    world = World({"fast": 100}, cpus=100)
    for time_limit_s in (100, 500):
        given(world, "capacity=50", time_limit_s=time_limit_s)
    waiting = given(world, "capacity=40")
    changed(world, c.ChangePool("fast", out_of_service=40))
    assert of(world, waiting).start_at == world.at + seconds(500 + DRAIN_TIME_S)


def test_a_line_that_is_too_long_to_say_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill, "STEPS_MAX", 10)
    world = World({"fast": 100}, cpus=100)
    reserve(world, 0, 90_000)
    jobs = [given(world, "capacity=40", time_limit_s=600) for _ in range(9)]
    assert of(world, jobs[-1]).start_at == NEVER
    assert "too many for an estimate" in of(world, jobs[-1]).steps[0].sentence
