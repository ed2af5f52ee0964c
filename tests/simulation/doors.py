"""Admission of commands by the API, with command IDs from wrong clocks.

Each simulated replica uses the real `cluster.api.service.Service`. This module simulates its clients: users who follow
the remedies of rejections, and agents, which must never be rejected.
"""

from __future__ import annotations

import random
import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from forebay.cluster.api.web import Problem
from forebay.cluster.security import Identity, Role
from forebay.replica.messages import commands as c
from forebay.replica.values import MICROSECONDS_PER_SECOND
from tests.simulation.loop import EPOCH_US, Timeline

if TYPE_CHECKING:
    from tests.simulation.replicas import SimReplica
    from tests.simulation.world import World

CLOCKED: Final = ("all", "deep")
"""The profiles in which clocks of people and agents are wrong."""

OFF_S: Final = (0.0, 0.0, 0.5, 3.0, 60.0, 600.0, 7200.0)
"""Largest error of a clock when it is set, seconds."""

DRIFTS: Final = (0.0, 0.0, 0.001, 0.05)
"""How much faster or slower than the truth one goes at most, seconds a second."""

SET_AGAIN: Final = 0.02
"""How often somebody sets the clock between two commands."""

RIGHT_S: Final = 1.0
"""Up to where a clock counts as right, seconds."""


class OwnClock:
    """Wall clock of a client machine, with its own random source."""

    def __init__(self, world: World, name: str) -> None:
        self._timeline = world.timeline
        self._rng = random.Random(f"clock/{world.seed}/{name}") if world.profile in CLOCKED else None
        self._off_s = self._drift = self._since_s = 0.0
        self._set()

    @property
    def off_s(self) -> float:
        """How far it is ahead of the truth, seconds."""
        return self._off_s + self._drift * (self._timeline.now_s - self._since_s)

    def now_ms(self) -> int:
        """Return what it shows, milliseconds since 1970; now and then somebody has just set it."""
        if self._rng is not None and self._rng.random() < SET_AGAIN:
            self._set()
        return round((EPOCH_US / MICROSECONDS_PER_SECOND + self._timeline.now_s + self.off_s) * 1000)

    def set_back(self, by_s: float) -> None:
        """Set it back, as a rejection said."""
        self._off_s, self._since_s = self.off_s - by_s, self._timeline.now_s

    def _set(self) -> None:
        rng = self._rng
        if rng is not None:
            self._off_s = rng.choice(OFF_S) * rng.uniform(-1.0, 1.0)
            self._drift = rng.choice(DRIFTS) * rng.uniform(-1.0, 1.0)
            self._since_s = self._timeline.now_s


def command_id(name: str, number: int, ms: int) -> bytes:
    """Return a UUIDv7 as clients make them: the time, then what is unique."""
    rest = bytearray(blake2b(f"{name}/{number}".encode(), digest_size=10).digest())
    rest[0], rest[2] = 0x70 | rest[0] & 0x0F, 0x80 | rest[2] & 0x3F
    return ms.to_bytes(6, "big") + rest


def off_s(timeline: Timeline, made: bytes) -> float:
    """Return how far ahead of the truth an id is, seconds."""
    return int.from_bytes(made[:6], "big") / 1000 - EPOCH_US / MICROSECONDS_PER_SECOND - timeline.now_s


def pass_the_door(replica: SimReplica, what: c.Request) -> bytes:
    """Return the command ID of an admitted request; raise Problem if this replica rejects it."""
    service, actor = replica.service, what.actor
    assert service is not None
    if actor.role is c.ActorRole.AGENT:
        return service.fenced_id(Identity(Role.AGENT, actor.name), what.id.hex())
    roles = {c.ActorRole.OPERATOR: Role.OPERATOR, c.ActorRole.SCHEDULER: Role.SCHEDULER}
    role = roles.get(actor.role, Role.USER)
    return service.check_age(Identity(role, actor.name), what.id.hex())


def seconds_off(problem: Problem) -> float:
    """Return by how many seconds the rejection says that an id's time is off."""
    found = re.search(r"made (\d+) s ", problem.view.sentence)
    assert found is not None, problem.view.sentence
    return float(found[1])
