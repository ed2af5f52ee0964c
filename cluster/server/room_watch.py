"""Room on the disk that the journal is on: who leads has some, and where nobody has, what needs it is refused in time.

All replicas store the same, so their disks fill up at the same time, and a failed write stops a replica: done to all of
them, it stops the cluster. Where one disk alone is scarce, what is asked for goes on, led by another replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from cluster.consensus import ChangeRefused, Engine, NotLeader
from cluster.schemas import StatusView
from cluster.server.feature_levels import Ask
from cluster.server.pending import USERS
from cluster.system import Clock, free_bytes
from cluster.system.eventloop import failure_logged

LOGGER = logging.getLogger(__name__)

BETTER: Final = 0.1
"""How much less full another replica's disk has to be for it to lead instead, share: no handing to and fro."""

ASKED_S: Final = 2.0
"""How long a peer may take to say how full its disk is, seconds."""

ASKED_EVERY_S: Final = 10.0
"""Between two questions to all, seconds, and so between two times that the leadership is handed over for this."""


class Room(msgspec.Struct, frozen=True):
    """What a journal takes of its disk, and what is free beside it, bytes."""

    used_bytes: int
    free_bytes: int

    def fill_with(self, size_bytes: int) -> float:
        """How full what the disk has for the journal would be with so many bytes more, from 0 to 1."""
        return (self.used_bytes + size_bytes) / max(1, self.used_bytes + self.free_bytes)


def room_of(directory: Path, used_bytes: int) -> Room | None:
    """Return the room on the disk of a directory; None where the file system does not say."""
    try:
        return Room(used_bytes, free_bytes(directory))
    except OSError:
        return None


class RoomWatch:
    """A leader's look at its disk, and at those of others where that is nearly full."""

    def __init__(
        self, engine: Engine, *, measure: Callable[[], Room | None], map_size_bytes: int, ask: Ask, clock: Clock
    ) -> None:
        """`ask` returns the status of a peer; `map_size_bytes` is that of all of them."""
        self._engine = engine
        self._measure = measure
        self._map_size_bytes = map_size_bytes
        self._ask = ask
        self._clock = clock
        self._room: Room | None = None
        self._due_s = clock.monotonic_s()
        self._task: asyncio.Task[None] | None = None
        self.is_scarce = False
        """Whether this disk is nearly full, and no other replica's has room either."""

    def fill_with(self, size_bytes: int) -> float:
        """How full the disk would be with so many bytes more, where that is to keep anybody from anything; else 0."""
        return self._room.fill_with(size_bytes) if self.is_scarce and self._room is not None else 0.0

    def poll(self) -> None:
        """Look at the disk, and ask the others where it is nearly full: a duty of whoever leads."""
        self._room = self._measure()
        if self._room is None or self._room.fill_with(0) <= USERS.fill_max:
            if self.is_scarce:
                LOGGER.info("there is room on the disk again")
            self.is_scarce = False
        elif (self._task is None or self._task.done()) and self._clock.monotonic_s() >= self._due_s:
            self._due_s = self._clock.monotonic_s() + ASKED_EVERY_S
            self._task = asyncio.get_running_loop().create_task(self._look(self._room))
            self._task.add_done_callback(failure_logged(LOGGER, "the leadership could not be handed over"))

    def stop(self) -> None:
        """Give up what is under way."""
        self.is_scarce = False
        if self._task is not None:
            self._task.cancel()

    async def _look(self, room: Room) -> None:
        """Hand the leadership to whoever has room, or have what needs some be refused."""
        voters = [peer.name for peer in self._engine.peers() if peer.votes]
        found = dict(zip(voters, await asyncio.gather(*map(self._fill_of, voters)), strict=True))
        best = min(found, key=found.__getitem__, default=None)
        if best is not None and found[best] <= min(room.fill_with(0), USERS.fill_max) - BETTER:
            with suppress(NotLeader, ChangeRefused):
                leader = await self._engine.transfer(best)
                LOGGER.warning("the leadership goes to %s: the disk here is nearly full", leader or "somebody else")
            return
        if not self.is_scarce:
            LOGGER.error(
                "the disk is %.0f%% full for the journal, and no other replica has room: what users ask for is refused "
                "from now on; make room on the disks, or forebay ledger prune",
                100 * room.fill_with(0),
            )
        self.is_scarce = True

    async def _fill_of(self, peer: str) -> float:
        """Return how full a peer's disk is; 1 for who does not say, and is none to hand anything to."""
        try:
            async with asyncio.timeout(ASKED_S):
                status: StatusView = await self._ask(peer)
        except Exception as error:
            LOGGER.info("%s did not say how full its disk is: %s", peer, error)
            return 1.0
        if status.replica != peer or status.room_bytes is None:
            return 1.0
        return Room(round(status.journal_fill * self._map_size_bytes), status.room_bytes).fill_with(0)
