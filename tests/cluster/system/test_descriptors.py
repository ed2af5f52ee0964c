"""Descriptors: what is said to be durable was synced, and nothing is left open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.cluster.system.descriptors import sync_directory


def test_a_directory_is_synced_itself_and_closed_whether_that_succeeds_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []

    def fsync(descriptor: int) -> None:
        synced.append((descriptor, os.fstat(descriptor).st_ino))
        if len(synced) == 2:
            raise OSError("the disk fails")

    monkeypatch.setattr(os, "fsync", fsync)
    sync_directory(tmp_path)
    with pytest.raises(OSError, match="the disk fails"):
        sync_directory(tmp_path)
    assert [inode for _, inode in synced] == [tmp_path.stat().st_ino] * 2
    for descriptor, _ in synced:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
