"""A snapshot from a peer completes as it was, or leaves nothing."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshots import Receiver, SnapshotFailed, SnapshotName, SnapshotRefused, SnapshotStore, write_snapshot
from snapshots.receive import CHUNK_BYTES_MAX
from tests.snapshots.disks import FailingDisk
from tests.snapshots.states import many_jobs, small_image

NAME = str(SnapshotName(7, 2))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_snapshot(tmp_path_factory.mktemp("sender"), small_image()).read_bytes()


def test_chunks_in_order_become_the_snapshot(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(tmp_path, cluster_id="c1")
    receiver = store.receive(7, 2)
    for offset in range(0, len(content), 100):
        assert receiver.write(offset, content[offset : offset + 100]) == min(offset + 100, len(content))
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == []
    path = receiver.finish()
    assert path.read_bytes() == content and os.listdir(tmp_path) == [NAME]
    assert receiver.image == small_image()
    newest = store.newest()
    assert newest is not None and newest.path == path
    assert store.newest_valid() == (path, small_image())


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_chunks_in_any_order_of_any_length_again_or_altered_complete_rightly_or_are_refused(
    tmp_path: Path, content: bytes, data: st.DataObject
) -> None:
    folder = Path(mkdtemp(dir=tmp_path))
    with closing(SnapshotStore(folder)) as store:
        _receive_from_a_sender(store.receive(7, 2), folder, content, data)


def _receive_from_a_sender(receiver: Receiver, folder: Path, content: bytes, data: st.DataObject) -> None:
    sender = data.draw(st.sampled_from(["honest", "wild", "short"]))
    steps = 0
    while receiver.next_offset < len(content) and steps < 40:
        steps += 1
        before = receiver.next_offset
        offset, length = before, 200
        if sender == "wild" and data.draw(st.booleans()):
            offset = data.draw(st.integers(-5, len(content) + 5))
            length = data.draw(st.integers(0, len(content)))
        chunk = content[max(offset, 0) : max(offset, 0) + length]
        if sender == "wild" and chunk and data.draw(st.integers(0, 9)) == 0:
            chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
        try:
            assert receiver.write(offset, chunk) == receiver.next_offset == max(before, offset + len(chunk))
        except SnapshotRefused:
            assert receiver.next_offset == before
        if sender == "short" and data.draw(st.integers(0, 5)) == 0:
            break
    try:
        path = receiver.finish()
    except SnapshotRefused:
        assert sender != "honest"
        assert os.listdir(folder) == []
    else:
        assert path.read_bytes() == content


def test_a_gap_is_refused_by_the_offset_that_must_come_and_the_receiver_still_completes(
    tmp_path: Path, content: bytes
) -> None:
    receiver = SnapshotStore(tmp_path).receive(7, 2)
    receiver.write(0, content[:50])
    with pytest.raises(SnapshotRefused, match="a chunk starts at byte 60, but byte 50 must come next"):
        receiver.write(60, content[60:70])
    with pytest.raises(SnapshotRefused, match="not what came there before"):
        receiver.write(40, b"x" * 20)
    with pytest.raises(SnapshotRefused, match="starts at byte -1"):
        receiver.write(-1, b"x")
    assert receiver.write(0, content[:10]) == 50
    assert receiver.write(20, content[20:]) == len(content)
    assert receiver.finish().read_bytes() == content


def test_a_snapshot_that_ends_early_or_is_damaged_leaves_the_older_one_only(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(tmp_path)
    store.save_in_background(small_image(6)).result(30)
    for wrong in (b"", content[:-1], content[:40] + b"\xff" + content[41:], content + b"\0"):
        receiver = store.receive(7, 2)
        receiver.write(0, wrong)
        with pytest.raises(SnapshotRefused):
            receiver.finish()
        with pytest.raises(SnapshotRefused, match="has not been received"):
            _ = receiver.image
        assert [name.index for name in store.names()] == [6] and len(os.listdir(tmp_path)) == 1
    store.close()


def test_another_snapshot_than_the_announced_one_is_refused(tmp_path: Path, content: bytes) -> None:
    for index, term in ((8, 2), (7, 3)):
        receiver = SnapshotStore(tmp_path).receive(index, term)
        receiver.write(0, content)
        with pytest.raises(SnapshotRefused, match="it holds 7 of 2"):
            receiver.finish()
    assert os.listdir(tmp_path) == []


def test_a_snapshot_of_another_cluster_is_refused(tmp_path: Path, content: bytes) -> None:
    receiver = SnapshotStore(tmp_path, cluster_id="c9").receive(7, 2)
    receiver.write(0, content)
    with pytest.raises(SnapshotRefused, match="it is of cluster 'c1'; this replica belongs to 'c9'"):
        receiver.finish()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("index", "term"), [(0, 1), (1, 0), (-1, 1), (10**20, 1), (1, 10**19)])
def test_a_place_that_no_snapshot_can_have_is_refused(tmp_path: Path, index: int, term: int) -> None:
    with pytest.raises(SnapshotRefused, match="there is no snapshot of index"):
        SnapshotStore(tmp_path).receive(index, term)
    assert os.listdir(tmp_path) == []


def test_a_new_receiver_ends_the_one_before(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(tmp_path)
    first = store.receive(7, 2)
    first.write(0, content[:10])
    second = store.receive(7, 2)
    with pytest.raises(SnapshotFailed, match="is over; begin again"):
        first.write(10, content[10:])
    second.write(0, content)
    assert second.finish().read_bytes() == content
    first.abort()
    second.abort()
    assert os.listdir(tmp_path) == [NAME]


def test_abort_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    receiver = SnapshotStore(tmp_path).receive(7, 2)
    receiver.write(0, content)
    receiver.abort()
    receiver.abort()
    assert os.listdir(tmp_path) == []


def test_a_chunk_that_is_too_large_is_refused(tmp_path: Path) -> None:
    receiver = SnapshotStore(tmp_path).receive(7, 2)
    with pytest.raises(SnapshotRefused, match="a chunk has 8388609 bytes; at most 8388608 are taken"):
        receiver.write(0, bytes(CHUNK_BYTES_MAX + 1))
    assert receiver.next_offset == 0


@pytest.mark.parametrize("call", [0, 1, 2, 3, 4])
def test_a_disk_that_fails_while_receiving_is_said_and_nothing_is_promised(
    tmp_path: Path, content: bytes, call: int
) -> None:
    store = SnapshotStore(tmp_path, disk=FailingDisk(call))
    with pytest.raises(SnapshotFailed, match="No space left on device; free space"):
        receiver = store.receive(7, 2)
        receiver.write(0, content)
        receiver.finish()
    assert store.newest() is None
    # After a failed sync of the directory the file is whole, and only not promised.
    assert os.listdir(tmp_path) == ([NAME] if call == 4 else [])


def test_receiving_keeps_older_snapshots_until_the_new_one_is_adopted(tmp_path: Path) -> None:
    (tmp_path / "sender").mkdir()
    sent = write_snapshot(tmp_path / "sender", many_jobs(50)).read_bytes()
    store = SnapshotStore(tmp_path / "store", keep=1)
    store.save_in_background(small_image(6)).result(30)
    receiver = store.receive(50, 1)
    receiver.write(0, sent)
    receiver.finish()
    assert [name.index for name in store.names()] == [50, 6]
    store.prune()
    assert [name.index for name in store.names()] == [50]
    store.close()
