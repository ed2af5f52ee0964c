"""Fetched snapshots are complete and synced before they are used."""

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
    """Sends a snapshot in pieces of limited size, and nothing after `ends_at`."""

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
def test_a_fetched_snapshot_is_synced_before_it_is_reported(
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
def test_a_snapshot_of_an_unexpected_size_is_rejected(tmp_path: Path, replica: Replica, size_bytes: int) -> None:
    with pytest.raises(Failure) as refused:
        receive(replica, tmp_path / ".part", size_bytes)
    assert refused.value.code is ExitCode.VERIFICATION_FAILED
