"""Which replica an agent polls: agents spread over all of them, and one that goes away moves its own agents alone.

Each agent ranks the replicas by a hash of its name and their addresses (rendezvous hashing), and polls the first of
them that is not away: every replica has its share, whoever is added takes only what is its own, and the agents of one
that is removed go to all the others alike. Nobody moves in step: an agent looks for another replica at a moment of its
own, and goes back to its first one at another. What an agent registers and reports goes to the leader.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final

from cluster.client import ApiError, Client
from cluster.schemas import (
    PlacesAnswer,
    PollAnswer,
    PollRequest,
    RegisterAnswer,
    RegisterRequest,
    ReportsAnswer,
    ReportsRequest,
)
from cluster.schemas.operations import LIST_PLACES
from cluster.system import Address, AddressError, Clock

logger = logging.getLogger(__name__)

AWAY_S: Final = (60.0, 180.0)
"""For how long a replica that did not answer is left alone, seconds, at random: a restart takes less."""

SPREAD_S_MAX: Final = 10.0
"""The longest that a wait before another replica is asked may be, seconds, whatever the last one said: well inside the
30 s of silence after which a node is marked down."""

MEMBERS_S: Final = (300.0, 900.0)
"""Seconds between two questions who is a member, at random: replicas are added and removed by hand."""

STALE_INSTANCE: Final = "stale_instance"
UNKNOWN_NODE: Final = "unknown_node"
"""Codes with which a poll is refused (cluster.api): another agent of this name registered since; none ever has."""

REPLICAS_MAX: Final = 32
"""Addresses that are believed, count: a cluster has at most a few replicas."""


class ReplicaChoice:
    """The replicas in the order in which one agent asks them."""

    def __init__(
        self,
        node: str,
        configured: Iterable[Address],
        clock: Clock,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`configured`: what the agent's file names; they stay the last resort. ValueError if there is none."""
        self._node = node
        self._configured = self._ranked(configured)
        if not self._configured:
            raise ValueError("an agent needs the api address of at least one replica")
        self._members: tuple[Address, ...] = ()
        self._clock = clock
        self._uniform = uniform
        self._away_until_s: dict[Address, float] = {}
        self._spread_s = 0.0

    def renew(self, configured: Iterable[Address]) -> None:
        """Take what the agent's file names now; who is a member is asked again, and is not believed until then."""
        self._configured = self._ranked(configured) or self._configured
        self._members = ()

    @property
    def order(self) -> tuple[Address, ...]:
        """All addresses: the best one first, those that are away last."""
        now_s = self._clock.monotonic_s()
        known = dict.fromkeys((*(self._members or self._configured), *self._configured))
        # Whoever has been away the longest is the likeliest to be back.
        return tuple(sorted(known, key=lambda one: max(0.0, self._away_until_s.get(one, 0.0) - now_s)))

    def learned(self, members: Iterable[Address]) -> None:
        """Take who is a member now; of nobody, nothing is learned."""
        self._members = self._ranked(members) or self._members

    def answered(self, replica: Address, spread_s: float) -> None:
        """Note that a replica answered, and within how long it wants agents to move when it is away, seconds."""
        self._away_until_s.pop(replica, None)
        self._spread_s = min(max(0.0, spread_s), SPREAD_S_MAX)

    def failed(self, replica: Address) -> float:
        """Note that a replica did not answer; return how long to wait before the next one is asked, seconds."""
        was_away = replica in self._away_until_s
        self._away_until_s[replica] = self._clock.monotonic_s() + self._uniform(*AWAY_S)
        # Only the death of the one that was polled is an event that others see too.
        return 0.0 if was_away else self._uniform(0.0, self._spread_s)

    def _ranked(self, addresses: Iterable[Address]) -> tuple[Address, ...]:
        def weight(address: Address) -> bytes:
            return blake2b(f"{self._node}\0{address}".encode(), digest_size=8).digest()

        return tuple(sorted(set(addresses), key=weight)[:REPLICAS_MAX])


class AgentClient:
    """The cluster as one agent asks it: the leader for what it registers and reports, any replica for its orders."""

    def __init__(
        self,
        client: Client,
        choice: ReplicaChoice,
        clock: Clock,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`client` asks as the agent; `choice` says which replica is polled."""
        self._client = client
        self._choice = choice
        self._clock = clock
        self._uniform = uniform
        self._members_due_s = clock.monotonic_s() + uniform(0.0, MEMBERS_S[1])

    def reach_at(self, configured: Iterable[Address]) -> None:
        """Look for the replicas at these API addresses from now on."""
        addresses = tuple(configured)
        self._client.reach_at(addresses)
        self._choice.renew(addresses)
        self._members_due_s = self._clock.monotonic_s()

    async def register(self, node: str, request: RegisterRequest) -> RegisterAnswer:
        """Announce the agent; ApiError."""
        return await self._client.register(node, request)

    async def places(self) -> PlacesAnswer:
        """Return the cluster's places."""
        return await self._client.call(LIST_PLACES)

    async def report(self, node: str, request: ReportsRequest) -> ReportsAnswer:
        """Report results; ApiError."""
        return await self._client.report(node, request)

    async def poll(self, node: str, request: PollRequest) -> PollAnswer:
        """Ask the best replica for the node's orders, once. ApiError, and the next poll goes to another one."""
        replica = self._choice.order[0]
        try:
            answer = await self._client.poll(node, request, replica)
            if self._clock.monotonic_s() > self._members_due_s:
                await self._learn(replica)
        except ApiError as error:
            if error.code not in (STALE_INSTANCE, UNKNOWN_NODE):
                await asyncio.sleep(self._choice.failed(replica))
                logger.info("the next poll goes to %s", self._choice.order[0])
            raise
        self._choice.answered(replica, answer.spread_s)
        return answer

    async def _learn(self, replica: Address) -> None:
        self._members_due_s = self._clock.monotonic_s() + self._uniform(*MEMBERS_S)
        try:
            self._choice.learned(await self._client.members(replica))
        except (ApiError, AddressError) as error:
            logger.debug("who is a member cannot be learned: %s", error)
