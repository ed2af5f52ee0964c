"""Disk that the journal is on: who leads has room on it and is not slower than others; where nobody has room, what
needs some is refused in time.

All replicas store the same, so their disks fill up at the same time, and a failed write stops a replica: done to all of
them, it stops the cluster. Where one disk alone is scarce, what is asked for goes on, led by another replica.

A disk that has become slow, but fails nothing, is a fault that no timeout sees: each of a leader's syncs holds up
whatever it does, so all of the cluster is as slow, while the others' disks are well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cluster.consensus import ChangeRefused, Engine, NotLeader, Role
from cluster.schemas import StatusView
from cluster.server.feature_levels import Ask
from cluster.server.pending import USERS
from cluster.system import SLOW_SYNC_S, Clock, free_bytes
from cluster.system.eventloop import failure_logged

LOGGER = logging.getLogger(__name__)

BETTER: Final = 0.1
"""How much less full another replica's disk has to be for it to lead instead, share: no handing to and fro."""

QUICKER: Final = 4
"""How many times quicker a sync of another replica's disk has to be for it to lead instead: no handing to and fro."""

ASKED_S: Final = 2.0
"""How long a peer may take to say how its disk is, seconds."""

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


class _Disk(NamedTuple):
    """What a replica says of its disk: how full and how slow it is, where that is known."""

    fill: float | None = None
    sync_s: float | None = None


class DiskWatch:
    """A leader's look at its disk, and at those of others where that is nearly full, or slow."""

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
        self._said_slow = False

    def fill_with(self, size_bytes: int) -> float:
        """How full the disk would be with so many bytes more, where that is to keep anybody from anything; else 0."""
        return self._room.fill_with(size_bytes) if self.is_scarce and self._room is not None else 0.0

    def poll(self) -> None:
        """Look at the disk, and ask the others where it is nearly full, or slow: a duty of whoever leads."""
        self._room = self._measure()
        sync_s = self._engine.sync_s or 0.0
        is_full = self._room is not None and self._room.fill_with(0) > USERS.fill_max
        is_slow = sync_s >= SLOW_SYNC_S
        if self.is_scarce and not is_full:
            LOGGER.info("there is room on the disk again")
            self.is_scarce = False
        if self._said_slow and not is_slow:
            LOGGER.info("the disk is quick enough again: %.1f ms for a sync", 1000 * sync_s)
            self._said_slow = False
        if not (is_full or is_slow) or self._clock.monotonic_s() < self._due_s:
            return
        if self._task is None or self._task.done():
            self._due_s = self._clock.monotonic_s() + ASKED_EVERY_S
            self._task = asyncio.get_running_loop().create_task(self._look(self._room if is_full else None, sync_s))
            self._task.add_done_callback(failure_logged(LOGGER, "the leadership could not be handed over"))

    def stop(self) -> None:
        """Give up what is under way."""
        self.is_scarce = False
        if self._task is not None:
            self._task.cancel()

    async def _look(self, room: Room | None, sync_s: float) -> None:
        """Hand the leadership to whoever has room, or have what needs some be refused; else to whose disk is quicker.

        `room` where this disk is nearly full.
        """
        # Who cannot lead has no disk that would help.
        voters = [peer.name for peer in self._engine.peers() if peer.votes and not peer.clock_off]
        found = dict(zip(voters, await asyncio.gather(*map(self._disk_of, voters)), strict=True))
        if room is not None and not await self._gone_for_room(room, found):
            if not self.is_scarce:
                LOGGER.error(
                    "the disk is %.0f%% full for the journal, and no other replica has room: what users ask for is "
                    "refused from now on; make room on the disks, or forebay audit prune",
                    100 * room.fill_with(0),
                )
            self.is_scarce = True
        if sync_s >= SLOW_SYNC_S and self._engine.role == Role.LEADER:
            await self._leave_to_quicker(sync_s, found)

    async def _gone_for_room(self, room: Room, found: dict[str, _Disk]) -> bool:
        """Hand over to whose disk is the emptiest; return whether somebody has room."""
        fills = {name: disk.fill for name, disk in found.items() if disk.fill is not None}
        best = min(fills, key=fills.__getitem__, default=None)
        if best is None or fills[best] > min(room.fill_with(0), USERS.fill_max) - BETTER:
            return False
        await self._hand_over(best, "the disk here is nearly full")
        return True

    async def _leave_to_quicker(self, sync_s: float, found: dict[str, _Disk]) -> None:
        """Hand over to whose disk is the quickest, if it is much quicker, and not nearly full."""
        times = {
            name: disk.sync_s
            for name, disk in found.items()
            if disk.sync_s is not None and (disk.fill is None or disk.fill <= USERS.fill_max)
        }
        best = min(times, key=times.__getitem__, default=None)
        if best is not None and times[best] * QUICKER <= sync_s:
            took_ms, takes_ms = 1000 * sync_s, 1000 * times[best]
            await self._hand_over(best, f"the disk here takes {took_ms:.0f} ms for a sync, and its {takes_ms:.1f} ms")
        elif not self._said_slow:
            self._said_slow = True
            LOGGER.warning(
                "the disk takes %.0f ms for a sync, no other replica's is much quicker; every command waits as long",
                1000 * sync_s,
            )

    async def _hand_over(self, target: str, why: str) -> None:
        with suppress(NotLeader, ChangeRefused):
            leader = await self._engine.transfer(target)
            LOGGER.warning("the leadership goes to %s: %s", leader or "somebody else", why)

    async def _disk_of(self, peer: str) -> _Disk:
        """Return what a peer says of its disk."""
        try:
            async with asyncio.timeout(ASKED_S):
                status: StatusView = await self._ask(peer)
        except Exception as error:
            LOGGER.info("%s did not say how its disk is: %s", peer, error)
            return _Disk()
        if status.replica != peer:
            return _Disk()
        if status.room_bytes is None:
            return _Disk(sync_s=status.sync_s)
        room = Room(round(status.journal_fill * self._map_size_bytes), status.room_bytes)
        return _Disk(room.fill_with(0), status.sync_s)
