"""Which replica an agent polls: every replica has its share, and only those move that must, not in step."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.agent.replica_choice import AWAY_S, SPREAD_S_MAX, AgentClient, ReplicaChoice
from forebay.cluster.client import ApiError
from forebay.cluster.schemas.agents import PollRequest
from forebay.cluster.schemas.jobs import PollAnswer
from forebay.cluster.system.address import Address
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock

NODES = [f"n{number}" for number in range(3_000)]
A, B, C, D = (Address("127.0.0.1", port) for port in (1, 2, 3, 4))


def choice(node: str, *replicas: Address, clock: ManualClock | None = None, draw: float = 0.5) -> ReplicaChoice:
    return ReplicaChoice(node, replicas, clock or ManualClock(Instant(1)), lambda low, high: low + draw * (high - low))


def first(*replicas: Address) -> dict[str, Address]:
    return {node: choice(node, *replicas).order[0] for node in NODES}


def test_agents_spread_evenly_and_alike_whatever_the_order_in_which_replicas_are_named() -> None:
    found = first(A, B, C)
    assert found == first(C, A, B)
    assert all(850 < count < 1_150 for count in Counter(found.values()).values())


def test_a_replica_that_is_added_or_removed_moves_only_its_own_agents_and_to_all_others_alike() -> None:
    three, four = first(A, B, C), first(A, B, C, D)
    assert {four[node] for node in NODES if four[node] != three[node]} == {D}
    two = first(A, B)
    assert all(two[node] == three[node] for node in NODES if three[node] != C)
    moved = Counter(two[node] for node in NODES if three[node] == C)
    assert min(moved.values()) > 0.4 * moved.total()


def test_who_is_a_member_is_learned_and_the_file_stays_the_last_resort() -> None:
    one = choice("n1", A, B)
    one.set_members([C, D])
    assert set(one.order[:2]) == {C, D}
    assert set(one.order[2:]) == {A, B}
    one.set_members([])
    assert set(one.order[:2]) == {C, D}


@given(st.floats(0, 1), st.floats(0, 1e6))
def test_an_agent_moves_within_the_time_that_it_was_told_and_comes_back_later(draw: float, spread_s: float) -> None:
    clock = ManualClock(Instant(1))
    one = choice("n1", A, B, C, clock=clock, draw=draw)
    best, second, third = one.order
    one.note_answer(best, spread_s)
    assert one.note_failure(best) == pytest.approx(draw * min(spread_s, SPREAD_S_MAX))
    assert one.order == (second, third, best)
    # The next one is away, too: it has waited once already where it is the same event that the others see.
    one.note_failure(second)
    assert one.order[0] == third
    clock.advance(AWAY_S[1] + 1)
    assert one.order == (best, second, third)


class Cluster:
    """Replicas, of which some are away."""

    def __init__(self, *away: Address) -> None:
        self.away = set(away)
        self.asked: list[Address] = []

    async def poll(self, node: str, request: PollRequest, replica: Address) -> PollAnswer:
        self.asked.append(replica)
        if replica in self.away:
            raise ApiError(0, "unreachable", "away")
        return PollAnswer(revision=1, orders=())


def test_a_poll_asks_each_replica_once_in_turn_until_one_answers_and_stays_there() -> None:
    async def story() -> None:
        clock = ManualClock(Instant(1))
        chosen = choice("n1", A, B, C, clock=clock)
        order = chosen.order
        cluster: Any = Cluster(*order[:2])
        client = AgentClient(cluster, chosen, clock, lambda low, high: high)
        request = PollRequest(instance="i")
        for _ in range(2):
            with pytest.raises(ApiError):
                await client.poll("n1", request)
        for _ in range(2):
            await client.poll("n1", request)
        assert cluster.asked == [*order, order[2]]
        clock.advance(AWAY_S[1] + 1)
        cluster.away.clear()
        await client.poll("n1", request)
        assert cluster.asked[-1] == order[0]

    asyncio.run(story())
