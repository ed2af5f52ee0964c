"""At most so many operations of a stage at once, the others in the order they came, and what is said of them."""

from __future__ import annotations

from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.model.stages import Stage
from forebay.replica.operations.outcomes import active_stage
from forebay.replica.views.orders import orders_for
from tests.replica.reference.reference_scheduler import next_due
from tests.replica.world import World, user


def ordered(world: World, stage: str) -> list[int]:
    return [order.job for node in world.state.nodes for order in orders_for(world.state, node) if order.stage == stage]


def run(world: World, job: int) -> None:
    """Take a job that is staged in through its run and post-run."""
    while world.state.buffers[job].state.word in ("staging-in", "pre-run", "running", "post-run"):
        world.done(job)


def test_only_so_many_stage_outs_are_ordered_and_the_others_follow_in_the_order_they_came() -> None:
    world = World({"fast": 100}, operations_per_stage_max=2)
    jobs = []
    for _ in range(4):
        jobs.append(world.submit("capacity=10"))
        run(world, jobs[-1])
        world.advance(1)
    assert {world.shown(job)[2] for job in jobs} == {"staging-out"}
    assert ordered(world, "stage_out") == jobs[:2]
    verdict = world.verdict(jobs[2])
    assert verdict.reason == "burst_buffer/native: Stage-out in progress"
    assert "waits for a slot" in verdict.sentence
    assert active_stage(world.state.jobs[jobs[2]], world.state.buffers[jobs[2]]) is None
    world.done(jobs[1])
    assert ordered(world, "stage_out") == [jobs[0], jobs[2]]
    world.done(jobs[0])
    assert ordered(world, "stage_out") == jobs[2:]


def test_the_time_of_an_operation_that_waits_for_its_slot_does_not_run() -> None:
    world = World({"fast": 100}, operations_per_stage_max=1, stage_out_timeout_s=50, stage_retries=0, timeouts="fixed")
    first, second = world.submit("capacity=10"), world.submit("capacity=10")
    run(world, first)
    run(world, second)
    world.advance(40)
    assert next_due(world.state, world.at) == world.at + 10 * 10**6
    world.done(first)
    world.advance(40)
    assert not world.state.jobs[second].stuck
    world.advance(11)
    assert world.state.jobs[second].stuck


def test_teardowns_have_slots_too_and_a_report_without_a_slot_is_refused() -> None:
    world = World({"fast": 100}, operations_per_stage_max=1, cpus=1)
    world.submit()  # the others wait for its CPU
    # One after the other: stage-in has one slot as well.
    jobs = []
    for _ in range(2):
        jobs.append(world.submit("capacity=10"))
        world.done(jobs[-1])
    first, second = jobs
    world.settle(c.CancelJob(first), user())
    world.settle(c.CancelJob(second), user())
    assert ordered(world, "teardown") == [first]
    job = world.state.jobs[second]
    report = c.ReportOperation(job.node, second, job.attempt, Stage.TEARDOWN, c.OperationDone())
    rejection = world.settle(report, c.Actor(c.ActorRole.AGENT, job.node))
    assert not isinstance(rejection, int)
    world.done(first)
    assert ordered(world, "teardown") == [second]
    world.finish(second)


def test_only_so_many_pre_runs_are_under_way_and_the_next_keeps_its_node() -> None:
    world = World({"fast": 100}, operations_per_stage_max=1, cpus=2)
    first, second = world.submit("capacity=10", cpus=1), world.submit("capacity=10", cpus=1)
    world.done(first)
    world.done(second)
    third = world.submit(cpus=1)
    assert world.shown(first)[2] == "pre-run" and world.shown(second)[2] == "staged-in"
    assert world.reason(second) == "BurstBufferOperation"
    assert world.state.jobs[third].state is JobState.PENDING
    world.report(first, c.ScriptStarted())
    assert world.shown(second)[2] == "pre-run"


def test_a_failed_stage_in_that_somebody_must_release_gives_up_its_slot() -> None:
    world = World({"fast": 100}, operations_per_stage_max=1, stage_retries=0)
    first, second = world.submit("capacity=10"), world.submit("capacity=10")
    assert world.reason(second) == "BurstBufferResources"
    world.report(first, c.OperationFailed("no such file"))
    assert world.shown(first)[2] == "staging-in" and world.shown(second)[2] == "staging-in"
    world.settle(c.ReleaseJob(first), user())
    assert ordered(world, "stage_in") == [second]
    assert "waits for a slot" in world.verdict(first).sentence
    world.done(second)
    assert ordered(world, "stage_in") == [first]


def test_an_operation_keeps_its_slot_while_it_waits_for_its_retry() -> None:
    world = World({"fast": 100}, operations_per_stage_max=1)
    first, second = world.submit("capacity=10"), world.submit("capacity=10")
    world.report(first, c.OperationFailed("try again"))
    assert world.reason(second) == "BurstBufferResources"
    world.advance(5)
    assert ordered(world, "stage_in") == [first]
