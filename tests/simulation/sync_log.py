"""The sync log of one replica on a disk that forgets what was not synced, sector by sector and in any order."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from forebay.wal import replay, sectors
from forebay.wal.records import LOG_KEY, STATE, unpack_log
from forebay.wal.sectors import BLOCK_BYTES, SECTOR_BYTES

if TYPE_CHECKING:
    from tests.simulation.disk import SimDisk

SIZES_BLOCKS = (4, 24, 64)
"""Small, so that it is full now and then: a record takes a block at least."""


class SimLog:
    """Stands in for a DiskStore and its DiskFile. What was written is read at once, and durable after `sync`."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.size_bytes = disk.rng.choice(SIZES_BLOCKS) * BLOCK_BYTES
        self.content: bytearray | None = None
        """As a process sees it; None if there is no file."""
        self.dies = False
        """The process dies before the next sync of a record that is longer than a sector: it may be torn."""
        self._before: dict[int, bytes] = {}
        """What the sectors that were written since the last sync held at that time."""
        self._written: list[tuple[int, int]] = []
        """Where records were written since the last sync: offset and size."""
        self._syncs: list[tuple[int, replay.Sync]] = []
        """What was synced, as far as LMDB may not have it: generation and content."""
        self._valid: tuple[object, list[replay.Sync]] = (None, [])
        """What `valid` said, and of what state of things."""

    @property
    def is_synced(self) -> bool:
        """Whether a power cut could lose nothing."""
        return not self._before

    def valid(self) -> list[replay.Sync]:
        """What it adds to LMDB's tables, oldest first."""
        if not self._syncs:
            return []
        stored = self._disk.tables[STATE].values[LOG_KEY]
        key = (stored, len(self._syncs))
        if self._valid[0] != key:
            now = unpack_log(stored).generation
            self._valid = key, [sync for generation, sync in self._syncs if generation == now]
            if not self._valid[1]:
                self._syncs.clear()  # LMDB has all of it
        return self._valid[1]

    # DiskStore

    def make(self, first_block: bytes) -> None:
        disk = self._disk
        disk.step("removing a sync log")
        self.content = None
        self._syncs.clear()
        disk.step("making the sync log")
        if disk.full:
            disk.raised = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.content = bytearray(first_block[: disk.rng.randrange(BLOCK_BYTES)])
        disk.step("filling the sync log")
        disk.work(disk.sync_s)
        self.content = bytearray(first_block.ljust(self.size_bytes, b"\0"))
        self._before.clear()
        self.sync_directory()

    def open(self) -> SimLog:
        if self.content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._written.clear()
        return self

    def sync_directory(self) -> None:
        self._disk.step("syncing the journal's directory")
        self._disk.work(self._disk.sync_s)

    # DiskFile

    def read(self, limit_bytes: int) -> bytes:
        assert self.content is not None
        return bytes(self.content[:limit_bytes])

    def write(self, data: bytes, offset: int) -> None:
        assert self.content is not None and offset % SECTOR_BYTES == len(data) % SECTOR_BYTES == 0
        self._disk.step("a write to the sync log")
        for at in range(offset, offset + len(data), SECTOR_BYTES):
            self._before.setdefault(at, bytes(self.content[at : at + SECTOR_BYTES]))
        self.content[offset : offset + len(data)] = data
        self._written.append((offset, len(data)))

    def sync(self) -> None:
        disk = self._disk
        disk.step("the sync of the sync log, before it")
        if self.dies and any(self._is_long(offset) for offset, _ in self._written):
            disk.die("the sync of the sync log, before it")
        disk.work(disk.sync_s + disk.stall_s)
        disk.stall_s = 0.0
        if disk.next_sync_fails:
            disk.next_sync_fails, disk.raised = False, True
            self.tear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        disk.syncs += 1
        if disk.sync:
            for offset, size_bytes in self._written:
                self._note(offset, size_bytes)
            self._before.clear()
            self._written.clear()
        disk.step("the sync of the sync log, after it")

    def close(self) -> None:
        pass

    def _is_long(self, offset: int) -> bool:
        assert self.content is not None
        body_bytes: int = sectors._HEAD.unpack_from(self.content, offset + sectors.TAG_BYTES)[3]
        return sectors._HEAD_BYTES + body_bytes > sectors.DATA_BYTES

    def _note(self, offset: int, size_bytes: int) -> None:
        assert self.content is not None
        starts = range(offset, offset + size_bytes, SECTOR_BYTES)
        data = b"".join([self.content[at + sectors.TAG_BYTES : at + SECTOR_BYTES] for at in starts])
        _, generation, _, body_bytes, _ = sectors._HEAD.unpack_from(data)
        begin = sectors._HEAD_BYTES
        self._valid = (None, [])
        self._syncs.append((generation, replay.unpack(data[begin : begin + body_bytes])))

    # What happens to it

    def tear(self) -> None:
        """Forget none, all, or any of the sectors that were not synced."""
        rng = self._disk.rng
        chance = rng.choice((0.0, 0.5, 0.7, 1.0)) if self._before else 0.0
        for at, before in sorted(self._before.items()):
            if rng.random() < chance:
                assert self.content is not None
                self.content[at : at + SECTOR_BYTES] = before
        self._before.clear()
        self._written.clear()
        self.dies = False

    def flip_a_bit(self) -> str:
        """Damage the first blocks, where the newest records are; return where."""
        assert self.content
        at = self._disk.rng.randrange(min(len(self.content), 6 * BLOCK_BYTES))
        self.content[at] ^= 1 << self._disk.rng.randrange(8)
        return f"the sync log, byte {at}"
