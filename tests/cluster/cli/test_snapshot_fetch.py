"""A snapshot that is fetched: whole and on the disk before anything is done with it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.cluster.cli.commands.backup import receive_snapshot
from forebay.cluster.cli.exits import ExitCode, Failure

SNAPSHOT = bytes(range(256)) * 5


class Replica:
    """Answers with pieces of a snapshot, at most so many bytes at once, and with nothing after `ends_at`."""

    def __init__(self, most: int, ends_at: int = len(SNAPSHOT)) -> None:
        self.most = most
        self.ends_at = ends_at

    async def call(self, operation: object, *, offset: int, **_: object) -> bytes:
        return SNAPSHOT[offset : min(offset + self.most, self.ends_at)]


def receive(replica: Replica, part: Path, size_bytes: int = len(SNAPSHOT)) -> None:
    row: Any = SimpleNamespace(name="snapshot-1", size_bytes=size_bytes)
    config: Any = SimpleNamespace(name="r1", api="r1:1")
    asyncio.run(receive_snapshot(replica, config, row, part))  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1, 255, 256, 5000])
def test_all_of_a_fetched_snapshot_is_on_the_disk_when_it_is_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    part, synced = tmp_path / ".part", list[int]()
    really = os.fsync

    def fsync(descriptor: int) -> None:
        really(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    receive(Replica(most), part)
    assert part.read_bytes() == SNAPSHOT
    assert synced == [len(SNAPSHOT)], "it was synced once, with all of its bytes"


@pytest.mark.parametrize(("replica", "size_bytes"), [(Replica(100, 1000), 1280), (Replica(100), 1279)])
def test_a_snapshot_of_another_size_than_announced_is_refused(
    tmp_path: Path, replica: Replica, size_bytes: int
) -> None:
    with pytest.raises(Failure) as refused:
        receive(replica, tmp_path / ".part", size_bytes)
    assert refused.value.code is ExitCode.VERIFICATION_FAILED
