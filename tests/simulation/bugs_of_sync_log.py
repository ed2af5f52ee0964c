"""Bugs to plant in the sync log: a flush left out, a torn record believed, a generation mixed up."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from forebay.wal import sectors
from forebay.wal.environment import Environment
from forebay.wal.records import LogMark
from forebay.wal.sync_log import SyncRecord


def record_not_synced() -> list[Any]:
    """A record is written to the log, and its promise leaves without waiting for the disk (H1)."""
    return [patch.object(SyncRecord, "commit", lambda self: self._file.write(self.data, self.offset))]


def torn_record_believed() -> list[Any]:
    """A record is taken for whole once its first sector is there; its checksum is not looked at."""

    def read_one(content: bytes, at: int, tag: bytes, generation: int, sequence: int) -> bytes | None:
        if content[at : at + sectors.TAG_BYTES] != tag:
            return None
        body_bytes = sectors._HEAD.unpack_from(content, at + sectors.TAG_BYTES)[3]
        starts = range(at, at + sectors.size_on_disk_bytes(body_bytes), sectors.SECTOR_BYTES)
        data = b"".join([content[start + sectors.TAG_BYTES : start + sectors.SECTOR_BYTES] for start in starts])
        return data[sectors._HEAD_BYTES : sectors._HEAD_BYTES + body_bytes]

    return [patch.object(sectors, "_read_one", read_one)]


def generation_ignored() -> list[Any]:
    """What the log holds is added to LMDB whether or not LMDB has it already."""
    original = sectors.read

    def read(content: bytes, identity: bytes, generation: int) -> list[bytes]:
        there: int = sectors._HEAD.unpack_from(content, sectors.BLOCK_BYTES + sectors.TAG_BYTES)[1]
        return original(content, identity, there or generation)

    return [patch.object(sectors, "read", read)]


def generation_kept() -> list[Any]:
    """The log begins at its first record again, but under the same generation: what stood behind it is valid again."""

    def next_mark(self: Any) -> LogMark:
        return LogMark(*self.log_mark())

    return [patch.object(Environment, "next_log_mark", next_mark)]


PLANTS_OF_SYNC_LOG = (record_not_synced, torn_record_believed, generation_ignored, generation_kept)
