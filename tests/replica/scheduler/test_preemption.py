"""Staged buffers taken back for a job that should start sooner: when, for whom, how often, never in vain."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.jobs import Hold
from tests.replica.world import World, user


def staged_behind_a_full_node(**rules: str) -> tuple[World, int, int]:
    """A world where a staged job waits for the CPUs of n1, whose script runs long, while n2 is idle."""
    world = World({"fast": 100}, nodes=2, cpus=4)
    if rules:
        world.configure(**rules)
    world.settle(c.DrainNode("n2", "x"))
    long = world.submit(cpus=4, time_limit_s=100_000)
    world.report(long, c.ScriptStarted())
    waiting = world.submit("capacity=80", cpus=2)
    world.done(waiting)
    assert world.reason(waiting) == "Resources"
    world.settle(c.ResumeNode("n2"))
    return world, long, waiting


def revoked(world: World, job: int) -> bool:
    return world.state.buffers[job].state.word == "teardown"


def test_a_staged_job_that_does_not_start_gives_way_to_one_that_could_run_at_once_with_an_event_that_says_why() -> None:
    world, _, waiting = staged_behind_a_full_node()
    urgent = world.submit("capacity=60", priority=9)
    assert not revoked(world, waiting)
    world.advance(301)
    assert revoked(world, waiting)
    events = [event for batch in world.ledger for entry in batch.entries for event in entry.events]
    ((why, beneficiary),) = [
        (event.reason, event.beneficiary) for event in events if isinstance(event, e.AllocationRevoked)
    ]
    assert beneficiary == urgent
    assert why == f"preempted for job {urgent}"
    world.done(waiting)
    assert world.shown(urgent)[2] == "staging-in"
    assert world.shown(waiting)[2] == "pending"
    world.finish(urgent)
    world.done(waiting)
    assert world.state.jobs[waiting].state.name == "CONFIGURING"


def test_nobody_gives_way_to_the_same_priority_or_to_one_that_could_not_run_either() -> None:
    world, _, waiting = staged_behind_a_full_node()
    world.submit("capacity=60", priority=1)
    world.advance(400)
    assert not revoked(world, waiting)
    world, _, waiting = staged_behind_a_full_node()
    world.submit("capacity=60", priority=9, cpus=4)
    world.settle(c.DrainNode("n2", "x"))
    world.advance(400)
    assert not revoked(world, waiting)


def test_nothing_is_taken_back_in_vain_or_while_enough_is_on_its_way() -> None:
    world, _, waiting = staged_behind_a_full_node()
    other = world.submit("capacity=20", time_limit_s=100_000)
    world.submit("capacity=90", priority=9)
    world.advance(400)
    assert not revoked(world, waiting)
    assert world.state.buffers[other].held_bytes


def test_a_job_gives_way_only_so_often_in_its_whole_life() -> None:
    world, _, waiting = staged_behind_a_full_node(RevocationsMax="1", RevokeAfter="0")
    first = world.submit("capacity=60", priority=8)
    assert revoked(world, waiting)
    world.done(waiting)
    world.finish(first)
    blocker = world.submit(cpus=4, priority=9, time_limit_s=100_000)
    world.report(blocker, c.ScriptStarted())
    world.done(waiting)
    world.register("n3", cpus=4)
    world.submit("capacity=60", priority=9)
    world.advance(10_000)
    assert not revoked(world, waiting)
    assert world.state.jobs[waiting].effective_interruptions.revocations == 1


def test_a_held_job_s_staged_buffer_may_be_taken_back_for_a_higher_priority() -> None:
    world = World({"fast": 100}, nodes=1, cpus=4)
    held = world.submit("capacity=80")
    world.settle(c.HoldJob(held), user())
    urgent = world.submit("capacity=60", priority=9)
    world.advance(301)
    assert revoked(world, held)
    world.done(held)
    assert world.shown(urgent)[2] == "staging-in"
    world.settle(c.ReleaseJob(held), user())
    world.finish(urgent)
    world.finish(held)


def test_a_buffer_whose_stage_in_failed_is_kept_for_whoever_looks() -> None:
    world = World({"fast": 100}, stage_retries=0)
    failed = world.submit("capacity=80")
    world.report(failed, c.OperationFailed("x"))
    assert world.state.jobs[failed].hold is Hold.SYSTEM
    world.submit("capacity=60", priority=9)
    world.advance(1_000)
    assert not revoked(world, failed)


def test_a_site_that_wants_no_preemption_has_none() -> None:
    world, _, waiting = staged_behind_a_full_node(RevocationsMax="0")
    world.submit("capacity=60", priority=9)
    world.advance(400)
    assert not revoked(world, waiting)


def test_whoever_gives_way_no_job_starves() -> None:
    world = World({"fast": 100}, nodes=2, cpus=1)
    world.configure(RevocationsMax="2", RevokeAfter="0")
    jobs = [world.submit(f"capacity={40 + 20 * (n % 3)}", priority=n % 4, time_limit_s=50) for n in range(12)]
    for _ in range(400):
        for job in jobs:
            if job in world.state.unfinished and any(
                order.job == job for order in world.orders(world.state.jobs[job].node)
            ):
                world.done(job)
        world.advance(7)
    assert not world.state.unfinished
    assert all(job.effective_interruptions.revocations <= 2 for job in world.state.jobs.values())


def test_a_job_of_the_same_priority_gives_way_neither_to_an_earlier_job_nor_to_a_later_one() -> None:
    world = World({"fast": 100}, nodes=2, cpus=4)
    world.settle(c.DrainNode("n2", "x"))
    earlier = world.submit("capacity=60", hold=Hold.USER)
    long = world.submit(cpus=4, time_limit_s=100_000)
    world.report(long, c.ScriptStarted())
    waiting = world.submit("capacity=80", cpus=2)
    world.done(waiting)
    world.settle(c.ResumeNode("n2"))
    world.settle(c.ReleaseJob(earlier), user())
    world.advance(400)
    assert world.reason(earlier) == "BurstBufferResources"
    assert not revoked(world, waiting)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    chosen=st.sets(st.integers(0, 3), min_size=1),
    more=st.integers(-1, 1),
)
def test_of_the_buffers_that_are_taken_back_none_could_have_been_left(
    sizes: list[int], chosen: set[int], more: int
) -> None:
    world = World({"fast": 100}, nodes=2, cpus=4)
    world.settle(c.DrainNode("n2", "x"))
    long = world.submit(cpus=4, time_limit_s=100_000)
    world.report(long, c.ScriptStarted())
    staged = [world.submit(f"capacity={size}") for size in sizes]
    for job in staged:
        world.done(job)
    world.settle(c.ResumeNode("n2"))
    for job in staged:
        # They wait for the CPUs of n1, the urgent job could run on n2.
        assert world.state.buffers[job].state.word == "staged-in"
    free = world.free()
    wanted = min(100, free + more + sum(size for number, size in enumerate(sizes) if number in chosen))
    world.submit(f"capacity={wanted}", priority=9)
    world.advance(400)
    taken = [world.state.buffers[job].granted_bytes for job in staged if revoked(world, job)]
    if wanted <= free:
        assert not taken
    else:
        assert free + sum(taken) >= wanted
        assert all(free + sum(taken) - size < wanted for size in taken)
