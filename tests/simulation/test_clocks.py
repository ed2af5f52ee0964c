"""One wrong clock: regression tests for its former effects on the cluster's time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from forebay.cluster.consensus.peer_clocks import OFF_S
from forebay.cluster.server.agreed_time import SLEW
from forebay.replica.messages import commands as c
from forebay.replica.model import JobState, Reservation, ReservedSpace
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant
from tests.simulation import whole
from tests.simulation.loop import EPOCH_US
from tests.simulation.replicas import SimReplica
from tests.simulation.scenarios import Story
from tests.simulation.world import World

HOUR_S = 3600
FAST_S = 10.0
"""How long the leader's clock is an hour ahead, virtual seconds."""

CLOSE_S = 0.5
"""How far the agreed time may be from the truth in these stories: clocks begin up to 0.3 s off."""


@contextmanager
def telling(replicas: int = 3) -> Iterator[Story]:
    with World(5, replicas=replicas, profile="net") as world:
        yield Story(world)
        assert world.violations == []


def truth(world: World) -> int:
    return EPOCH_US + round(world.timeline.now_s * MICROSECONDS_PER_SECOND)


def ahead_s(story: Story) -> float:
    """Return how far the ledger's time would be ahead of the true time at a request now, seconds."""
    told = settle(story, story.user.request(story.user.submission()))
    assert told["settled"].rejection is None
    return (story.world.oracle.state.at - truth(story.world)) / MICROSECONDS_PER_SECOND


def settle(story: Story, request: c.Request) -> dict[str, Any]:
    told: dict[str, Any] = {}

    def asked() -> bool:
        leader = story.world.leader()
        if leader is not None and ("asked" not in told or told["asked"] is not leader):
            told["asked"] = leader
            told["answer"] = story.ask(leader, request)
        return "answer" in told and "settled" in told["answer"]

    story.must(asked)
    answer: dict[str, Any] = told["answer"]
    return answer


def set_clock(replica: SimReplica, ahead_s: float) -> None:
    replica.clock.set(round(ahead_s * MICROSECONDS_PER_SECOND))


def lead_an_hour_ahead(story: Story, replica: SimReplica) -> None:
    """Let the leader's clock be an hour ahead for FAST_S, with commands meanwhile, and be set right."""
    set_clock(replica, HOUR_S)
    for _ in range(round(FAST_S)):
        settle(story, story.user.request(story.user.submission()))
        story.wait(1.0)
    set_clock(replica, 0.0)


def test_the_agreed_time_ignores_one_leader_an_hour_ahead() -> None:
    with telling() as story:
        first = story.elect()
        lead_an_hour_ahead(story, first)
        assert abs(ahead_s(story)) < CLOSE_S
        for replica in story.world.replicas.values():
            replica.crash()
        story.wait(0.1)
        for replica in story.world.replicas.values():
            replica.start()
        story.elect()
        before = story.world.oracle.state.at
        story.wait(5.0)
        assert abs(ahead_s(story)) < CLOSE_S
        assert story.world.oracle.state.at - before > 4 * MICROSECONDS_PER_SECOND


def test_timers_follow_the_agreed_time_not_a_leaders_clock() -> None:
    with telling() as story:
        world, leader = story.world, story.elect()
        half_an_hour = Instant(truth(world) + HOUR_S // 2 * MICROSECONDS_PER_SECOND)
        begun = story.user.submission()
        begun = replace(begun, request=replace(begun.request, begin_at=half_an_hour))
        job = settle(story, story.user.request(begun))["settled"].job
        reserved = Reservation(
            "maintenance", Instant(truth(world)), half_an_hour, ("user1",), space=(ReservedSpace("fast", 1 << 20),)
        )
        settle(story, story.user.request(c.SetReservation(reserved), operator=True))
        lead_an_hour_ahead(story, leader)
        assert world.oracle.state.jobs[job].state is JobState.PENDING
        assert "maintenance" in world.oracle.state.reservations


def test_a_retry_is_on_time_after_a_leader_was_an_hour_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(whole.OPERATIONS, "stage_in", ("",))
    with telling() as story:
        world, leader = story.world, story.elect()
        world.failing_stages = 1.0
        for agent in world.agents:
            monkeypatch.setattr(agent.rng, "random", lambda: 0.5)  # a worker died: nothing that is final
            agent.start()
        set_clock(leader, HOUR_S)
        story.wait(2.0)
        submitted = story.user.submission()
        while submitted.request.buffer is None or not submitted.request.buffer.stage_in or submitted.hold.value:
            submitted = story.user.submission()
        job = settle(story, story.user.request(submitted))["settled"].job
        story.must(lambda: world.oracle.state.jobs[job].failures > 0)
        set_clock(leader, 0.0)
        world.failing_stages = 0.0
        story.must(lambda: world.oracle.state.jobs[job].state is JobState.COMPLETED, within_s=10.0)


def test_a_short_run_is_not_charged_an_hour_after_a_clock_error() -> None:
    with telling() as story:
        world, leader = story.world, story.elect()
        world.failing_stages = 0.0
        for agent in world.agents:
            agent.start()
        submitted = replace(story.user.submission(), hold=c.Hold.NONE)
        job = settle(story, story.user.request(submitted))["settled"].job
        story.must(lambda: world.oracle.state.jobs[job].started_at > 0)
        set_clock(leader, HOUR_S)
        story.must(lambda: world.oracle.state.jobs[job].ended_at > 0)
        ended = world.oracle.state.jobs[job]
        assert ended.ended_at - ended.started_at < 10 * MICROSECONDS_PER_SECOND


@pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S, 31.0, -31.0, OFF_S + 1.0])
def test_a_leader_with_a_wrong_clock_transfers_leadership_for_good(off_s: float) -> None:
    with telling() as story:
        world, wrong = story.world, story.elect()
        set_clock(wrong, off_s)
        story.must(lambda: world.leader() not in (None, wrong), within_s=10.0)
        assert wrong.engine.clock_off
        second = world.leader()
        assert second is not None
        second.crash()
        story.must(lambda: world.leader() not in (None, second))
        assert world.leader() is not wrong or not wrong.engine.clock_off
        second.start()
        story.must(lambda: world.leader() not in (None, wrong), within_s=20.0)
        assert abs(ahead_s(story)) < CLOSE_S


def test_replicas_with_different_clocks_still_have_a_leader() -> None:
    with telling() as story:
        world = story.world
        first = story.elect()
        for number, replica in enumerate(world.replicas.values()):
            set_clock(replica, 100.0 * number)
        story.wait(15.0)
        first.crash()
        story.must(lambda: world.leader() is not None, within_s=30.0)
        settle(story, story.user.request(story.user.submission()))


def test_a_restarted_cluster_adopts_the_time_of_a_majority() -> None:
    with telling() as story:
        world = story.world
        story.elect()
        for replica in world.replicas.values():
            replica.crash()
        story.wait(100.0)
        for number, replica in enumerate(world.replicas.values()):
            if number == 0:
                set_clock(replica, HOUR_S)
            replica.start()
        story.elect()
        story.wait(3.0)
        assert abs(ahead_s(story)) < CLOSE_S


def test_an_operator_sets_the_time_back_on_every_replica() -> None:
    with telling() as story:
        world = story.world
        story.elect()
        for replica in world.replicas.values():
            set_clock(replica, HOUR_S)
        story.wait(5.0)
        assert ahead_s(story) > HOUR_S - CLOSE_S
        for replica in world.replicas.values():
            set_clock(replica, 0.0)
        story.wait(3.0)
        many = [story.ask(story.elect()) for _ in range(3)]
        settle(story, story.user.request(c.SetClock(Instant(truth(world))), operator=True))
        assert all("settled" in told for told in many)
        assert abs(ahead_s(story)) < CLOSE_S
        for replica in world.replicas.values():
            replica.crash()
        story.wait(0.1)
        for replica in world.replicas.values():
            replica.start()
        story.elect()
        assert abs(ahead_s(story)) < CLOSE_S
        story.must(world.converged)


def test_an_advanced_time_slows_down_until_the_clocks_catch_up() -> None:
    with telling() as story:
        world = story.world
        story.elect()
        for replica in world.replicas.values():
            set_clock(replica, 20.0)
        story.wait(5.0)
        assert ahead_s(story) > 20.0 - CLOSE_S
        for replica in world.replicas.values():
            set_clock(replica, 0.0)
        story.wait(5.0)
        assert 10.0 < ahead_s(story) < 20.0
        before, asked_s = world.oracle.state.at, world.timeline.now_s
        story.wait(10.0)
        ahead_s(story)
        passed_s = (world.oracle.state.at - before) / MICROSECONDS_PER_SECOND
        assert passed_s == pytest.approx(SLEW * (world.timeline.now_s - asked_s), rel=0.05)
        story.wait(40.0)
        assert abs(ahead_s(story)) < CLOSE_S
