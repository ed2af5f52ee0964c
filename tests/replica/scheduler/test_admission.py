"""Who may have space and CPUs: priority, bounded passing, and one function for dropping and naming."""

from __future__ import annotations

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.values.limits import EVENTS_PER_CYCLE_MAX
from tests.replica.reference import reference_scheduler
from tests.replica.reference.reference_scheduler import next_due, plan
from tests.replica.world import World


def test_higher_priority_goes_first_and_equal_priority_goes_by_number() -> None:
    world = World({"fast": 100})
    blocker = world.submit("capacity=100")
    low, high, same = (world.submit("capacity=100", priority=priority) for priority in (1, 9, 9))
    world.finish(blocker)
    assert world.state.buffers[high].state.word == "staging-in"
    world.finish(high)
    assert world.state.buffers[same].state.word == "staging-in"
    world.finish(same)
    assert world.state.buffers[low].state.word == "staging-in"


def test_a_large_request_is_passed_by_small_ones_only_so_often() -> None:
    world = World({"fast": 100}, max_passes=3)
    small = [world.submit("capacity=60", time_limit_s=3600)]
    large = world.submit("capacity=100", priority=9)
    rounds = 0
    while world.state.buffers[large].state.word == "pending":
        rounds += 1
        assert rounds < 50, "the large request starves"
        world.advance(1)
        small.append(world.submit("capacity=40", time_limit_s=360_000))
        for job in list(small):
            if world.state.buffers[job].held_bytes:
                world.finish(job)
                break
    assert world.state.jobs[large].passed == 3


def test_a_small_request_that_gives_back_in_time_passes_without_being_counted() -> None:
    world = World({"fast": 100}, max_passes=0)
    world.submit("capacity=60", time_limit_s=3600)
    large = world.submit("capacity=100", priority=9)
    brief = world.submit("capacity=40", time_limit_s=60)
    lengthy = world.submit("capacity=10", time_limit_s=36_000)
    assert world.state.buffers[brief].state.word == "staging-in"
    assert world.reason(lengthy) == "BurstBufferResources"
    assert world.state.jobs[large].passed == 0


def test_what_a_passed_request_was_first_promised_stays_when_it_is_expected_sooner() -> None:
    world = World({"fast": 100}, max_passes=9)
    blocker = world.submit("capacity=60", time_limit_s=3600)
    large = world.submit("capacity=100", priority=9)
    world.submit("capacity=10", time_limit_s=1)
    promised_at = world.state.jobs[large].promised_at
    assert promised_at > world.at
    # What only drains is expected to be gone in a moment.
    world.settle(c.CancelJob(blocker))
    world.submit("capacity=10", time_limit_s=1)
    events = [event for batch in world.ledger for entry in batch.entries for event in entry.events]
    passes = [event.promised_at for event in events if isinstance(event, e.BufferAllocated) and event.passed == large]
    assert len(passes) == 2 and passes[1] < passes[0] == promised_at
    assert world.state.jobs[large].promised_at == promised_at


def test_requests_for_one_pool_do_not_wait_behind_those_for_another() -> None:
    world = World({"fast": 100, "bulk": 100}, max_passes=0)
    world.submit("capacity=100")
    world.submit("capacity=100", priority=9)
    other = world.submit("capacity=100 pool=bulk")
    assert world.reason(other) == "BurstBufferStageIn"


def test_the_first_job_that_lacks_cpus_shows_resources_and_the_next_priority() -> None:
    world = World(cpus=1)
    world.submit()
    first, second = world.submit("capacity=10"), world.submit("capacity=10")
    world.done(first)
    world.done(second)
    assert world.reason(first) == "Resources"
    assert world.reason(second) == "Priority"


def test_a_held_job_neither_stages_nor_reserves() -> None:
    from forebay.replica.model.jobs import Hold

    world = World({"fast": 100})
    held = world.submit("capacity=100", hold=Hold.USER)
    other = world.submit("capacity=100")
    assert world.reason(held) == "JobHeldUser"
    assert world.reason(other) == "BurstBufferStageIn"


def test_at_most_the_configured_number_of_stage_ins_run_at_once() -> None:
    world = World({"fast": 100}, operations_per_stage_max=2)
    jobs = [world.submit("capacity=10") for _ in range(3)]
    states = [world.state.buffers[job].state.word for job in jobs]
    assert states == ["staging-in", "staging-in", "pending"]
    world.done(jobs[0])
    assert world.state.buffers[jobs[2]].state.word == "staging-in"


def test_a_pass_after_a_pass_does_nothing() -> None:
    world = World({"fast": 100})
    for size in (60, 60, 30, 10):
        world.submit(f"capacity={size}")
    assert plan(world.state, world.at).events == ()


def test_what_is_due_by_time_alone_is_known_beforehand() -> None:
    world = World(stage_in_timeout_s=10, retry_backoff_s=2, timeouts="fixed")
    assert next_due(world.state, world.at) is None
    job = world.submit("capacity=40")
    assert next_due(world.state, world.at) == world.at + 10_000_000
    world.report(job, c.OperationFailed("x"))
    assert next_due(world.state, world.at) == world.at + 2_000_000


def test_a_pass_is_bounded_and_the_next_ones_do_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    # Smaller than the real bound: a world of so many jobs is walked over at each submit.
    bound = 32
    assert bound < EVENTS_PER_CYCLE_MAX
    monkeypatch.setattr(reference_scheduler, "EVENTS_PER_CYCLE_MAX", bound)
    world = World({"fast": 10_000}, operations_per_stage_max=10_000, cpus=10_000)
    world.settle(c.DrainNode("n1", "x"))
    jobs = [world.submit("capacity=1") for _ in range(2 * bound + 10)]
    world.settle(c.ResumeNode("n1"))
    assert all(world.reason(job) == "BurstBufferStageIn" for job in jobs)
    sizes = [len(entry.events) for batch in world.ledger[-3:] for entry in batch.entries]
    assert sizes == [bound, bound, 10]


def test_space_is_given_only_where_a_node_is_up() -> None:
    world = World(nodes=1)
    world.settle(c.DrainNode("n1", "x"))
    job = world.submit("capacity=40")
    assert world.reason(job) == "BurstBufferResources"
    assert world.free() == 100
    world.settle(c.ResumeNode("n1"))
    assert world.reason(job) == "BurstBufferStageIn"


def test_more_cpus_than_any_node_has_are_refused_at_submit() -> None:
    from forebay.replica.values.errors import Rejection, RejectionCode

    world = World(cpus=2)
    rejection = world.try_submit(cpus=3)
    assert (
        isinstance(rejection, Rejection)
        and rejection.code is RejectionCode.LIMIT_EXCEEDED
        and rejection.place == "cpus"
    )


def test_a_job_that_no_node_which_is_up_could_hold_keeps_nobody_back() -> None:
    world = World({"fast": 100}, nodes=1, cpus=2, max_passes=0)
    world.register("n2", cpus=8)
    world.settle(c.DrainNode("n2", "maintenance"))
    large = world.submit(cpus=4, priority=9)
    large_with_buffer = world.submit("capacity=100", cpus=4, priority=9)
    small = world.submit("capacity=10")
    assert world.reason(large) == "ReqNodeNotAvail"
    assert world.reason(large_with_buffer) == "BurstBufferResources"
    assert world.reason(small) == "BurstBufferStageIn"
    world.finish(small)
    world.settle(c.ResumeNode("n2"))
    world.finish(large)
    world.finish(large_with_buffer)


def test_a_staged_job_whose_node_came_back_smaller_is_staged_elsewhere() -> None:
    world = World({"fast": 100}, nodes=1, cpus=4)
    blocker = world.submit(cpus=4)
    job = world.submit("capacity=10", cpus=3)
    world.done(job)
    world.register("n2", cpus=4)
    world.register("n1", cpus=2, instance="i2")
    assert world.state.buffers[job].state.word == "teardown"
    world.done(job)
    assert world.state.jobs[job].node == "n2"
    world.finish(blocker)
