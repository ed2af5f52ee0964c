"""Choice of the replica that an agent polls: agents are spread over all replicas.

Each agent ranks the replicas by a hash of its name and their addresses (rendezvous hashing) and polls the first that
responds. Adding or removing a replica moves only its own share of agents. Random delays keep agents from switching
simultaneously, both away from a failed replica and back to it. Registrations and reports go to the leader.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import (
    FilesystemsAnswer,
    PollAnswer,
    PollRequest,
    RegisterAnswer,
    RegisterRequest,
    ReportsAnswer,
    ReportsRequest,
)
from forebay.cluster.schemas.operations import LIST_FILESYSTEMS
from forebay.cluster.system import Address, AddressError, Clock

logger = logging.getLogger(__name__)

AWAY_S: Final = (60.0, 180.0)
"""Seconds to avoid a replica that did not answer, at random: a restart takes less."""

SPREAD_S_MAX: Final = 10.0
"""Longest wait before polling another replica, seconds, whatever the last one requested: well below the 30 s of silence
after which a node is marked down.
"""

MEMBERS_S: Final = (300.0, 900.0)
"""Seconds between two requests for the member list, at random: replicas are added and removed by hand."""

STALE_INSTANCE: Final = "stale_instance"
UNKNOWN_NODE: Final = "unknown_node"
"""Error codes of a rejected poll (cluster.api): another agent registered under this name since, or none ever did."""

REPLICAS_MAX: Final = 32
"""Replica addresses accepted, count: a cluster has only a few replicas."""


class ReplicaChoice:
    """Replicas in one agent's order of preference."""

    def __init__(
        self,
        node: str,
        configured: Iterable[Address],
        clock: Clock,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Use the addresses in the agent's configuration, which remain the last resort.

        Raises:
            ValueError: `configured` is empty.
        """
        self._node = node
        self._configured = self._rank(configured)
        if not self._configured:
            raise ValueError("an agent needs the api address of at least one replica")
        self._members: tuple[Address, ...] = ()
        self._clock = clock
        self._uniform = uniform
        self._away_until_s: dict[Address, float] = {}
        self._spread_s = 0.0

    def renew(self, configured: Iterable[Address]) -> None:
        """Use newly configured addresses, and drop the member list until it is requested again."""
        self._configured = self._rank(configured) or self._configured
        self._members = ()

    @property
    def order(self) -> tuple[Address, ...]:
        """Addresses in order of preference, unavailable replicas last."""
        now_s = self._clock.monotonic_s()
        known = dict.fromkeys((*(self._members or self._configured), *self._configured))
        # The longest unavailable replica is the likeliest to be back.
        return tuple(sorted(known, key=lambda one: max(0.0, self._away_until_s.get(one, 0.0) - now_s)))

    def set_members(self, members: Iterable[Address]) -> None:
        """Set the current members; an empty list is ignored."""
        self._members = self._rank(members) or self._members

    def note_answer(self, replica: Address, spread_s: float) -> None:
        """Record an answer, and the seconds over which agents should spread their moves if the replica fails."""
        self._away_until_s.pop(replica, None)
        self._spread_s = min(max(0.0, spread_s), SPREAD_S_MAX)

    def note_failure(self, replica: Address) -> float:
        """Record a missing answer; return the seconds to wait before polling the next replica."""
        was_away = replica in self._away_until_s
        self._away_until_s[replica] = self._clock.monotonic_s() + self._uniform(*AWAY_S)
        # Only the failure of the polled replica affects other agents at the same time.
        return 0.0 if was_away else self._uniform(0.0, self._spread_s)

    def _rank(self, addresses: Iterable[Address]) -> tuple[Address, ...]:
        def weight(address: Address) -> bytes:
            return blake2b(f"{self._node}\0{address}".encode(), digest_size=8).digest()

        return tuple(sorted(set(addresses), key=weight)[:REPLICAS_MAX])


class AgentClient:
    """Client of one agent: registers and reports at the leader, polls any replica."""

    def __init__(
        self,
        client: Client,
        choice: ReplicaChoice,
        clock: Clock,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Use `client`, authenticated as the agent; `choice` selects the replica to poll."""
        self._client = client
        self._choice = choice
        self._clock = clock
        self._uniform = uniform
        self._members_due_s = clock.monotonic_s() + uniform(0.0, MEMBERS_S[1])

    def reach_at(self, configured: Iterable[Address]) -> None:
        """Use these API addresses from now on."""
        addresses = tuple(configured)
        self._client.reach_at(addresses)
        self._choice.renew(addresses)
        self._members_due_s = self._clock.monotonic_s()

    async def register(self, node: str, request: RegisterRequest) -> RegisterAnswer:
        """Register the agent.

        Raises:
            ApiError: The request failed.
        """
        return await self._client.register(node, request)

    async def filesystems(self) -> FilesystemsAnswer:
        """Return the cluster's shared filesystems."""
        return await self._client.call(LIST_FILESYSTEMS)

    async def report(self, node: str, request: ReportsRequest) -> ReportsAnswer:
        """Report results.

        Raises:
            ApiError: The request failed.
        """
        return await self._client.report(node, request)

    async def poll(self, node: str, request: PollRequest) -> PollAnswer:
        """Poll the preferred replica once for the node's orders.

        Raises:
            ApiError: The request failed; the next poll goes to another replica.
        """
        replica = self._choice.order[0]
        try:
            answer = await self._client.poll(node, request, replica)
            if self._clock.monotonic_s() > self._members_due_s:
                await self._learn(replica)
        except ApiError as error:
            if error.code not in (STALE_INSTANCE, UNKNOWN_NODE):
                await asyncio.sleep(self._choice.note_failure(replica))
                logger.info("the next poll goes to %s", self._choice.order[0])
            raise
        self._choice.note_answer(replica, answer.spread_s)
        return answer

    async def _learn(self, replica: Address) -> None:
        self._members_due_s = self._clock.monotonic_s() + self._uniform(*MEMBERS_S)
        try:
            self._choice.set_members(await self._client.members(replica))
        except (ApiError, AddressError) as error:
            logger.debug("the member list is unavailable: %s", error)
