"""Watch of the journal's disk: the leader should have free space and a fast disk.

All replicas store the same data, so their disks fill up together. A failed write stops a replica; failed writes on all
replicas would stop the cluster. If only the leader's disk is nearly full, another replica takes over leadership. If no
replica has space, users' commands are rejected.

A disk that has become slow without failing triggers no timeout. But each sync of the leader delays all its work, so the
whole cluster is slow although the other disks are fast.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from forebay.cluster.consensus import ChangeRefused, Engine, NotLeader, Role
from forebay.cluster.schemas import StatusView
from forebay.cluster.server.feature_levels import Ask
from forebay.cluster.server.pending import USERS
from forebay.cluster.system import SLOW_SYNC_S, Clock, free_bytes
from forebay.cluster.system.eventloop import failure_logged

LOGGER = logging.getLogger(__name__)

BETTER: Final = 0.1
"""Minimum advantage in free share of another disk for a transfer of leadership: prevents repeated transfers."""

QUICKER: Final = 4
"""Minimum speed ratio of another disk's sync for a transfer of leadership: prevents repeated transfers."""

ASKED_S: Final = 2.0
"""Time limit for a peer's report on its disk, seconds."""

ASKED_EVERY_S: Final = 10.0
"""Interval between two requests to all peers, seconds, and so between two transfers because of disks."""


class Room(msgspec.Struct, frozen=True):
    """Size of a journal on its disk, and the free space there, bytes."""

    used_bytes: int
    free_bytes: int

    def fill_with(self, size_bytes: int) -> float:
        """Return the used share of the journal's available space after adding this many bytes, from 0 to 1."""
        return (self.used_bytes + size_bytes) / max(1, self.used_bytes + self.free_bytes)


def room_of(directory: Path, used_bytes: int) -> Room | None:
    """Return the space on a directory's disk; None if the file system does not report it."""
    try:
        return Room(used_bytes, free_bytes(directory))
    except OSError:
        return None


class _Disk(NamedTuple):
    """Fill and speed of a replica's disk, if known."""

    fill: float | None = None
    sync_s: float | None = None


class DiskWatch:
    """Leader's check of its own disk, and of the peers' disks if its own is nearly full or slow."""

    def __init__(
        self, engine: Engine, *, measure: Callable[[], Room | None], map_size_bytes: int, ask: Ask, clock: Clock
    ) -> None:
        """Initialize. `ask` returns the status of a peer; `map_size_bytes` must be the same on all replicas."""
        self._engine = engine
        self._measure = measure
        self._map_size_bytes = map_size_bytes
        self._ask = ask
        self._clock = clock
        self._room: Room | None = None
        self._due_s = clock.monotonic_s()
        self._task: asyncio.Task[None] | None = None
        self.is_scarce = False
        """True if this disk is nearly full and no other replica's disk has space."""
        self._said_slow = False

    def fill_with(self, size_bytes: int) -> float:
        """Return the disk's used share after adding this many bytes, or 0 if space is not scarce."""
        return self._room.fill_with(size_bytes) if self.is_scarce and self._room is not None else 0.0

    def poll(self) -> None:
        """Check this disk, and request reports from the peers if it is nearly full or slow."""
        self._room = self._measure()
        sync_s = self._engine.sync_s or 0.0
        is_full = self._room is not None and self._room.fill_with(0) > USERS.fill_max
        is_slow = sync_s >= SLOW_SYNC_S
        if self.is_scarce and not is_full:
            LOGGER.info("the disk has enough free space again")
            self.is_scarce = False
        if self._said_slow and not is_slow:
            LOGGER.info("the disk is fast enough again: %.1f ms for a sync", 1000 * sync_s)
            self._said_slow = False
        if not (is_full or is_slow) or self._clock.monotonic_s() < self._due_s:
            return
        if self._task is None or self._task.done():
            self._due_s = self._clock.monotonic_s() + ASKED_EVERY_S
            self._task = asyncio.get_running_loop().create_task(self._look(self._room if is_full else None, sync_s))
            self._task.add_done_callback(failure_logged(LOGGER, "leadership could not be transferred"))

    def stop(self) -> None:
        """Abandon pending work."""
        self.is_scarce = False
        if self._task is not None:
            self._task.cancel()

    async def _look(self, room: Room | None, sync_s: float) -> None:
        """Transfer leadership to a replica with space, or to one with a faster disk; mark space as scarce if none has
        any.

        `room` is given if this disk is nearly full.
        """
        # Ask only replicas that may lead.
        voters = [peer.name for peer in self._engine.peers() if peer.votes and not peer.clock_off]
        found = dict(zip(voters, await asyncio.gather(*map(self._disk_of, voters)), strict=True))
        if room is not None and not await self._gone_for_room(room, found):
            if not self.is_scarce:
                LOGGER.error(
                    "the disk is %.0f%% full for the journal, and no other replica has space: users' commands are "
                    "rejected until there is space; free some on the disks, or run `forebay audit prune`",
                    100 * room.fill_with(0),
                )
            self.is_scarce = True
        if sync_s >= SLOW_SYNC_S and self._engine.role == Role.LEADER:
            await self._leave_to_quicker(sync_s, found)

    async def _gone_for_room(self, room: Room, found: dict[str, _Disk]) -> bool:
        """Transfer leadership to the replica with the emptiest disk; return False if no replica has space."""
        fills = {name: disk.fill for name, disk in found.items() if disk.fill is not None}
        best = min(fills, key=fills.__getitem__, default=None)
        if best is None or fills[best] > min(room.fill_with(0), USERS.fill_max) - BETTER:
            return False
        await self._hand_over(best, "the disk of this replica is nearly full")
        return True

    async def _leave_to_quicker(self, sync_s: float, found: dict[str, _Disk]) -> None:
        """Transfer leadership to the replica with the fastest disk if it is much faster and not nearly full."""
        times = {
            name: disk.sync_s
            for name, disk in found.items()
            if disk.sync_s is not None and (disk.fill is None or disk.fill <= USERS.fill_max)
        }
        best = min(times, key=times.__getitem__, default=None)
        if best is not None and times[best] * QUICKER <= sync_s:
            took_ms, takes_ms = 1000 * sync_s, 1000 * times[best]
            await self._hand_over(
                best, f"a sync takes {took_ms:.0f} ms on this replica's disk, and {takes_ms:.1f} ms there"
            )
        elif not self._said_slow:
            self._said_slow = True
            LOGGER.warning(
                "a disk sync takes %.0f ms, and no other replica's disk is much faster; every command waits that long",
                1000 * sync_s,
            )

    async def _hand_over(self, target: str, why: str) -> None:
        with suppress(NotLeader, ChangeRefused):
            leader = await self._engine.transfer(target)
            LOGGER.warning("leadership was transferred to %s: %s", leader or "another replica", why)

    async def _disk_of(self, peer: str) -> _Disk:
        """Return a peer's report on its disk."""
        try:
            async with asyncio.timeout(ASKED_S):
                status: StatusView = await self._ask(peer)
        except Exception as error:
            LOGGER.info("%s did not report the state of its disk: %s", peer, error)
            return _Disk()
        if status.replica != peer:
            return _Disk()
        if status.room_bytes is None:
            return _Disk(sync_s=status.sync_s)
        room = Room(round(status.journal_fill * self._map_size_bytes), status.room_bytes)
        return _Disk(room.fill_with(0), status.sync_s)
