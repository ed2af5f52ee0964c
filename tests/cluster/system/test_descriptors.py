"""Descriptors: a reported sync has happened, and no descriptor stays open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.cluster.system.descriptors import sync_directory


def test_directory_is_synced_and_its_descriptor_always_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
