"""Snapshot store of a replica: newest valid snapshot, saving in the background, and pruning."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from forebay.snapshots import (
    SnapshotAbandoned,
    SnapshotFailed,
    SnapshotName,
    SnapshotStore,
    load_snapshot,
    write_snapshot,
)
from forebay.snapshots.finalize import SnapshotDisk
from tests.snapshots.disks import FailingDisk, TracingDisk
from tests.snapshots.states import many_jobs, small_image


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class GatedDisk(SnapshotDisk):
    """Disk that waits before the first sync until it is released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def sync(self, file: int) -> None:
        self.reached.set()
        assert self.go.wait(30)
        super().sync(file)


def test_missing_directory_is_created_and_has_no_snapshot(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "r1" / "snapshots")
    assert store.newest_usable() is None and store.newest() is None and store.skipped_snapshots == ()
    assert store.directory.stat().st_mode & 0o777 == 0o700


def test_newest_valid_snapshot_is_used_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    paths = [write_snapshot(tmp_path, small_image(index)) for index in (5, 6, 7, 100)]
    _damage(paths[3])
    paths[2].write_bytes(b"")
    store = SnapshotStore(tmp_path)
    assert store.newest_usable() == (paths[1], small_image(6))
    assert [skipped.path for skipped in store.skipped_snapshots] == [paths[3], paths[2]]
    assert "checksum" in store.skipped_snapshots[0].sentence and store.skipped_snapshots[1].sentence.endswith(
        "it is truncated"
    )


def test_snapshot_rejected_by_a_peer_is_read_again_once_and_not_sent_if_damaged(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    path = store.save_in_background(small_image(5)).result(30)
    read: list[SnapshotName] = []
    load = store.load
    store.load = lambda name: (read.append(name), load(name))[1]  # type: ignore[method-assign]

    def settle() -> None:
        store._executor.submit(lambda: None).result(30)

    for _ in range(3):
        store.doubt(5)
        settle()
    newest = store.newest()
    assert newest is not None and newest.path == path and len(read) == 1
    store.save_in_background(small_image(5)).result(30)
    _damage(path)
    store.doubt(4)
    settle()
    assert len(read) == 1
    store.doubt(5)
    settle()
    assert store.newest() is None and [skipped.path for skipped in store.skipped_snapshots] == [path]
    store.save_in_background(small_image(5)).result(30)
    assert store.newest() is not None and store.skipped_snapshots == ()
    store.close()


def test_newest_snapshot_has_the_largest_index_then_term(tmp_path: Path) -> None:
    for index, term in ((9, 1), (10, 1), (10, 2), (2, 7)):
        write_snapshot(tmp_path, small_image(index, term))
    found = SnapshotStore(tmp_path).newest_usable()
    assert found is not None and (found[1].index, found[1].term) == (10, 2)


def test_snapshot_of_another_cluster_is_skipped(tmp_path: Path) -> None:
    write_snapshot(tmp_path, small_image(5))
    write_snapshot(tmp_path, small_image(6, cluster_id="c2"))
    store = SnapshotStore(tmp_path, cluster_id="c1")
    found = store.newest_usable()
    assert found is not None and found[1].index == 5
    assert store.skipped_snapshots[0].sentence == "it belongs to cluster 'c2'; this replica belongs to 'c1'"


def test_leftovers_of_dead_writers_are_removed_at_start(tmp_path: Path) -> None:
    left = [f".{SnapshotName(7, 2)}.saving", f".{SnapshotName(9, 2)}.receiving"]
    kept = ["notes.txt", ".snapshot-7-2.fbs.saving", str(SnapshotName(7, 2)), f"{SnapshotName(8, 2)}.saving"]
    for name in left + kept:
        (tmp_path / name).write_bytes(b"x")
    SnapshotStore(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_file_of_a_live_writer_is_left_alone(tmp_path: Path) -> None:
    disk = GatedDisk()
    writer = SnapshotStore(tmp_path, disk=disk)
    saved = writer.save_in_background(small_image())
    assert disk.reached.wait(30)
    SnapshotStore(tmp_path).close()
    disk.go.set()
    assert load_snapshot(saved.result(30)) == small_image()
    writer.close()


def test_saving_keeps_the_newest_and_removes_older_snapshots(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, keep=2)
    for index in range(1, 6):
        store.save_in_background(small_image(index)).result(30)
    assert [name.index for name in store.names()] == [5, 4]
    newest = store.newest()
    assert newest is not None
    assert (newest.path, newest.index, newest.term) == (tmp_path / str(SnapshotName(5, 2)), 5, 2)
    assert newest.size_bytes == newest.path.stat().st_size
    store.close()


def test_rejected_snapshot_does_not_count_among_the_kept_ones(tmp_path: Path) -> None:
    for index in (5, 6, 7):
        write_snapshot(tmp_path, small_image(index))
    _damage(tmp_path / str(SnapshotName(7, 2)))
    store = SnapshotStore(tmp_path, keep=2)
    assert store.newest_usable() is not None
    assert store.prune() == []
    store.save_in_background(small_image(8)).result(30)
    assert [name.index for name in store.names()] == [8, 7, 6]
    store.save_in_background(small_image(9)).result(30)
    assert [name.index for name in store.names()] == [9, 8]
    assert store.skipped_snapshots == ()
    store.close()


def test_rewriting_a_damaged_snapshot_makes_it_valid(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, small_image())
    _damage(path)
    store = SnapshotStore(tmp_path)
    assert store.newest_usable() is None and store.newest() is None
    store.save_in_background(small_image()).result(30)
    assert store.skipped_snapshots == ()
    assert store.newest_usable() == (path, small_image())
    store.close()


def test_unverified_file_is_not_offered_to_peers(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, small_image())
    store = SnapshotStore(tmp_path)
    assert store.newest() is None
    store.newest_usable()
    newest = store.newest()
    assert newest is not None and newest.path == path
    path.unlink()
    assert store.newest() is None


def test_save_during_a_save_returns_the_running_save(tmp_path: Path) -> None:
    disk = GatedDisk()
    store = SnapshotStore(tmp_path, disk=disk)
    first = store.save_in_background(small_image(5))
    assert disk.reached.wait(30)
    assert store.saving
    assert store.save_in_background(small_image(6)) is first
    disk.go.set()
    first.result(30)
    assert not store.saving
    assert [name.index for name in store.names()] == [5]
    store.close()


def test_failed_save_gives_the_reason_and_the_next_may_succeed(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, disk=FailingDisk(3))
    with pytest.raises(SnapshotFailed, match="No space left on device; free space"):
        store.save_in_background(small_image()).result(30)
    assert os.listdir(tmp_path) == []
    store.save_in_background(small_image()).result(30)
    assert store.newest_usable() is not None
    store.close()


def test_closing_stops_a_save_at_its_next_slice_and_rejects_others(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    class Slow(TracingDisk):
        def write(self, file: int, data: bytes) -> None:
            started.set()
            assert go.wait(30)
            super().write(file, data)

    store = SnapshotStore(tmp_path, disk=Slow())
    save = store.save_in_background(many_jobs(3000))
    assert started.wait(30)
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._stop.is_set():
        threading.Event().wait(0.001)
    go.set()
    closing.join(30)
    assert isinstance(save.exception(30), SnapshotAbandoned)
    assert os.listdir(tmp_path) == []
    with pytest.raises(SnapshotFailed, match="the store is closed"):
        store.save_in_background(small_image())


def test_event_loop_runs_while_a_snapshot_is_written(tmp_path: Path) -> None:
    image = many_jobs(5000)

    async def scenario() -> int:
        store = SnapshotStore(tmp_path)
        save = asyncio.wrap_future(store.save_in_background(image))
        turns = 0
        while not save.done():
            await asyncio.sleep(0)
            turns += 1
        assert load_snapshot(await save) == image
        store.close()
        return turns

    assert asyncio.run(scenario()) > 10


def test_image_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    disk = GatedDisk()
    store = SnapshotStore(tmp_path, disk=disk)
    image = small_image()
    save = store.save_in_background(image)
    assert disk.reached.wait(30)
    later = image.state.jobs.delete(1)
    disk.go.set()
    assert len(later) == 0 and load_snapshot(save.result(30)) == small_image()
    store.close()


@pytest.mark.parametrize("keep", [0, -1, 101])
def test_invalid_number_of_kept_snapshots_is_rejected(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ValueError, match="use a number from 1 to 100"):
        SnapshotStore(tmp_path, keep)


def test_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotFailed, match="file"):
        SnapshotStore(tmp_path / "file")
