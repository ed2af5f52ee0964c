"""A snapshot from a peer completes unchanged, or leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.snapshots import (
    Receiver,
    SnapshotAbandoned,
    SnapshotFailed,
    SnapshotName,
    SnapshotRefused,
    SnapshotStore,
    write_snapshot,
)
from forebay.snapshots.receive import CHUNK_BYTES_MAX, receiving_name
from tests.snapshots.disks import FailingDisk, KillingDisk, TracingDisk
from tests.snapshots.states import many_jobs, small_image

NAME = str(SnapshotName(7, 2))


def finish(receiver: Receiver) -> Path:
    """Verify and finalize the received snapshot."""
    receiver.verify()
    return receiver.finalize()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_snapshot(tmp_path_factory.mktemp("sender"), small_image()).read_bytes()


def test_chunks_in_order_give_the_snapshot(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(tmp_path, cluster_id="c1")
    receiver = store.receive(7, 2)
    for offset in range(0, len(content), 100):
        assert receiver.write(offset, content[offset : offset + 100]) == min(offset + 100, len(content))
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == []
    path = finish(receiver)
    assert path.read_bytes() == content and os.listdir(tmp_path) == [NAME]
    assert receiver.image == small_image()
    newest = store.newest()
    assert newest is not None and newest.path == path
    assert store.newest_usable() == (path, small_image())


@settings(
    max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data())
def test_chunks_in_any_order_and_length_complete_correctly_or_are_rejected(
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
        path = finish(receiver)
    except SnapshotRefused:
        assert sender != "honest"
        assert os.listdir(folder) == []
    else:
        assert path.read_bytes() == content


def test_gap_is_rejected_with_the_expected_offset_and_reception_can_continue(tmp_path: Path, content: bytes) -> None:
    receiver = SnapshotStore(tmp_path).receive(7, 2)
    receiver.write(0, content[:50])
    with pytest.raises(SnapshotRefused, match="a chunk starts at byte 60, but byte 50 was expected next"):
        receiver.write(60, content[60:70])
    with pytest.raises(SnapshotRefused, match="differs from the one received before"):
        receiver.write(40, b"x" * 20)
    with pytest.raises(SnapshotRefused, match="starts at byte -1"):
        receiver.write(-1, b"x")
    assert receiver.write(0, content[:10]) == 50
    assert receiver.write(20, content[20:]) == len(content)
    assert finish(receiver).read_bytes() == content


def test_truncated_or_damaged_snapshot_leaves_only_the_older_one(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(tmp_path)
    store.save_in_background(small_image(6)).result(30)
    for wrong in (b"", content[:-1], content[:40] + b"\xff" + content[41:], content + b"\0"):
        receiver = store.receive(7, 2)
        receiver.write(0, wrong)
        with pytest.raises(SnapshotRefused):
            finish(receiver)
        with pytest.raises(SnapshotRefused, match="has not been received"):
            _ = receiver.image
        assert [name.index for name in store.names()] == [6] and len(os.listdir(tmp_path)) == 1
    store.close()


def test_other_snapshot_than_announced_is_rejected(tmp_path: Path, content: bytes) -> None:
    for index, term in ((8, 2), (7, 3)):
        receiver = SnapshotStore(tmp_path).receive(index, term)
        receiver.write(0, content)
        with pytest.raises(SnapshotRefused, match="it contains 7 of 2"):
            finish(receiver)
    assert os.listdir(tmp_path) == []


def test_snapshot_of_another_cluster_is_rejected(tmp_path: Path, content: bytes) -> None:
    receiver = SnapshotStore(tmp_path, cluster_id="c9").receive(7, 2)
    receiver.write(0, content)
    with pytest.raises(SnapshotRefused, match="it belongs to cluster 'c1'; this replica belongs to 'c9'"):
        finish(receiver)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("index", "term"), [(0, 1), (1, 0), (-1, 1), (10**20, 1), (1, 10**19)])
def test_impossible_index_or_term_is_rejected(tmp_path: Path, index: int, term: int) -> None:
    with pytest.raises(SnapshotRefused, match="there is no snapshot of index"):
        SnapshotStore(tmp_path).receive(index, term)
    assert os.listdir(tmp_path) == []


def test_new_receiver_ends_the_previous_one(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(tmp_path)
    first = store.receive(7, 2)
    first.write(0, content[:10])
    second = store.receive(7, 2)
    with pytest.raises(SnapshotFailed, match="has ended; start again"):
        first.write(10, content[10:])
    second.write(0, content)
    assert finish(second).read_bytes() == content
    first.abort()
    second.abort()
    assert os.listdir(tmp_path) == [NAME]


def test_abort_removes_everything(tmp_path: Path, content: bytes) -> None:
    receiver = SnapshotStore(tmp_path).receive(7, 2)
    receiver.write(0, content)
    receiver.abort()
    receiver.abort()
    assert os.listdir(tmp_path) == []


def test_too_large_chunk_is_rejected(tmp_path: Path) -> None:
    receiver = SnapshotStore(tmp_path).receive(7, 2)
    with pytest.raises(SnapshotRefused, match="a chunk has 8388609 bytes; at most 8388608 are accepted"):
        receiver.write(0, bytes(CHUNK_BYTES_MAX + 1))
    assert receiver.next_offset == 0


@pytest.mark.parametrize("call", [0, 1, 2, 3, 4])
def test_disk_failure_while_receiving_is_reported_without_a_promise(tmp_path: Path, content: bytes, call: int) -> None:
    store = SnapshotStore(tmp_path, disk=FailingDisk(call))
    with pytest.raises(SnapshotFailed, match="No space left on device; free space"):
        receiver = store.receive(7, 2)
        receiver.write(0, content)
        finish(receiver)
    assert store.newest() is None
    # After a failed sync of the directory, the file is complete, but not durable.
    assert os.listdir(tmp_path) == ([NAME] if call == 4 else [])


def test_older_snapshots_are_kept_until_the_new_one_is_adopted(tmp_path: Path) -> None:
    (tmp_path / "sender").mkdir()
    sent = write_snapshot(tmp_path / "sender", many_jobs(50)).read_bytes()
    store = SnapshotStore(tmp_path / "store", keep=1)
    store.save_in_background(small_image(6)).result(30)
    receiver = store.receive(50, 1)
    receiver.write(0, sent)
    finish(receiver)
    assert [name.index for name in store.names()] == [50, 6]
    store.prune()
    assert [name.index for name in store.names()] == [50]
    store.close()


def test_partly_received_snapshot_is_continued_by_the_next_process(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(tmp_path)
    store.receive(7, 2).write(0, content[:-40])
    store.close()
    store = SnapshotStore(tmp_path)
    assert store.partial is not None and store.partial.name == SnapshotName(7, 2)
    receiver = store.receive(7, 2)
    assert 0 < receiver.next_offset <= len(content) - 40
    assert receiver.write(receiver.next_offset, content[receiver.next_offset :]) == len(content)
    assert finish(receiver).read_bytes() == content
    assert store.partial is None and os.listdir(tmp_path) == [NAME]


def test_only_complete_frames_with_valid_checksums_of_a_part_are_kept(tmp_path: Path, content: bytes) -> None:
    part = tmp_path / receiving_name(SnapshotName(7, 2))
    kept: set[int] = set()
    for cut in range(0, len(content), 7):
        for flip in (None, cut // 2):
            damaged = bytearray(content[:cut])
            if flip is not None and damaged:
                damaged[flip] ^= 0x10
            part.write_bytes(damaged)
            with closing(SnapshotStore(tmp_path)) as store:
                if store.partial is None:
                    assert not part.exists()
                    continue
                sound_bytes = store.partial.sound_bytes
                assert bytes(damaged[:sound_bytes]) == content[:sound_bytes], "only valid content is kept"
                kept.add(sound_bytes)
                receiver = store.receive(7, 2)
                receiver.write(sound_bytes, content[sound_bytes:])
                assert finish(receiver).read_bytes() == content
            (tmp_path / NAME).unlink()
    assert len(kept) > 3


def test_part_of_another_snapshot_is_removed_when_a_new_one_begins(tmp_path: Path, content: bytes) -> None:
    part = tmp_path / receiving_name(SnapshotName(7, 2))
    part.write_bytes(content[:-40])
    store = SnapshotStore(tmp_path)
    assert store.receive(8, 2).next_offset == 0
    assert not part.exists() and store.partial is None
    store.close()


def test_newest_part_is_kept_unless_a_snapshot_is_newer(tmp_path: Path, content: bytes) -> None:
    for index in (5, 7, 6):
        (tmp_path / receiving_name(SnapshotName(index, 2))).write_bytes(content[:-40])
    with closing(SnapshotStore(tmp_path)) as store:
        assert store.partial is not None and store.partial.name.index == 7
        assert os.listdir(tmp_path) == [receiving_name(SnapshotName(7, 2))]
        store.save_in_background(small_image(7)).result(30)
        assert store.partial is None and os.listdir(tmp_path) == [NAME]
    (tmp_path / receiving_name(SnapshotName(7, 2))).write_bytes(content[:-40])
    with closing(SnapshotStore(tmp_path)) as store:
        assert store.partial is None and os.listdir(tmp_path) == [NAME]


def test_missing_or_truncated_part_begins_again(tmp_path: Path, content: bytes) -> None:
    part = tmp_path / receiving_name(SnapshotName(7, 2))
    for meanwhile in (part.unlink, lambda: os.truncate(part, 9)):
        part.write_bytes(content[:-40])
        store = SnapshotStore(tmp_path)
        assert store.partial is not None
        meanwhile()
        receiver = store.receive(7, 2)
        assert receiver.next_offset == 0
        receiver.write(0, content)
        assert finish(receiver).read_bytes() == content
        store.close()
        (tmp_path / NAME).unlink()


class GatedSync(FailingDisk):
    """Disk that waits at the first sync until it is released."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.reached, self.go = threading.Event(), threading.Event()

    def sync(self, file: int) -> None:
        self.reached.set()
        assert self.go.wait(30)
        super().sync(file)


def test_snapshot_abandoned_during_verification_is_replaced_by_another(tmp_path: Path, content: bytes) -> None:
    disk = GatedSync()
    store = SnapshotStore(tmp_path, disk=disk)
    receiver = store.receive(7, 2)
    receiver.write(0, content)
    verified = store.verify(receiver)
    assert disk.reached.wait(30)
    with pytest.raises(SnapshotFailed, match="still being verified; offer this one again"):
        store.receive(7, 2)
    assert os.listdir(tmp_path) == []
    disk.go.set()
    verified.result(30)
    with pytest.raises(SnapshotFailed, match="has ended; start again"):
        receiver.finalize()
    assert finish_whole(store.receive(7, 2), content).read_bytes() == content
    store.close()


def finish_whole(receiver: Receiver, content: bytes) -> Path:
    receiver.write(0, content)
    return finish(receiver)


def test_verification_stops_when_the_store_closes_and_continues_after_restart(
    tmp_path: Path,
) -> None:
    (tmp_path / "sender").mkdir()
    sent = write_snapshot(tmp_path / "sender", many_jobs(3_000)).read_bytes()
    store = SnapshotStore(tmp_path / "store")
    receiver = store.receive(3_000, 1)
    receiver.write(0, sent)
    store._stop.set()  # the first step of `close`
    with pytest.raises(SnapshotAbandoned):
        receiver.verify()
    store.close()
    again = SnapshotStore(tmp_path / "store")
    assert again.partial is not None and again.partial.sound_bytes == len(sent) - 32, "all but the checksum"
    receiver = again.receive(3_000, 1)
    receiver.write(receiver.next_offset, sent[receiver.next_offset :])
    assert finish(receiver).read_bytes() == sent
    again.close()


def test_process_dying_while_receiving_leaves_the_old_snapshot(tmp_path: Path, content: bytes) -> None:
    trace = TracingDisk()
    with closing(SnapshotStore(tmp_path / "traced", disk=trace)) as store:
        finish_in_pieces(store.receive(7, 2), content)
    for call in range(len(trace.calls)):
        directory = tmp_path / str(call)
        directory.mkdir()
        write_snapshot(directory, small_image(6))
        child = os.fork()
        if child == 0:
            finish_in_pieces(SnapshotStore(directory, disk=KillingDisk(call)).receive(7, 2), content)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        renamed = trace.calls.index(f"rename {receiving_name(SnapshotName(7, 2))} {NAME}") < call
        with closing(SnapshotStore(directory)) as store:
            found = store.newest_usable()
            assert found is not None and found[1] == small_image(7 if renamed else 6) and store.skipped_snapshots == ()
            if not renamed:
                receiver = store.receive(7, 2)
                receiver.write(receiver.next_offset, content[receiver.next_offset :])
                assert finish(receiver).read_bytes() == content


def finish_in_pieces(receiver: Receiver, content: bytes) -> Path:
    for offset in range(0, len(content), 300):
        receiver.write(offset, content[offset : offset + 300])
    return finish(receiver)


def test_verified_snapshot_accepts_no_more_chunks(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(tmp_path, cluster_id="c1")
    receiver = store.receive(7, 2)
    receiver.write(0, content)
    receiver.verify()
    for offset, data in ((0, content[:100]), (len(content), b"more"), (0, b"")):
        with pytest.raises(SnapshotRefused, match="is already complete"):
            receiver.write(offset, data)
    path = receiver.finalize()
    assert path.read_bytes() == content and store.newest_usable() == (path, small_image())


def test_snapshot_under_verification_accepts_no_more_chunks(tmp_path: Path, content: bytes) -> None:
    disk = GatedSync()
    store = SnapshotStore(tmp_path, disk=disk)
    receiver = store.receive(7, 2)
    receiver.write(0, content)
    verified = store.verify(receiver)
    assert disk.reached.wait(30)
    with pytest.raises(SnapshotRefused, match="is already complete"):
        receiver.write(len(content), b"more")
    disk.go.set()
    verified.result(30)
    assert receiver.finalize().read_bytes() == content
    store.close()
