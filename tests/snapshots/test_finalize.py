"""A snapshot is complete or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.snapshots import (
    SnapshotAbandoned,
    SnapshotFailed,
    SnapshotName,
    SnapshotRefused,
    SnapshotStore,
    load_snapshot,
    write_snapshot,
)
from forebay.snapshots.finalize import RESERVE_BYTES, SnapshotDisk, remove_if_abandoned
from tests.snapshots.disks import FailingDisk, KillingDisk, TracingDisk
from tests.snapshots.states import many_jobs, small_image

ROOT = Path(__file__).parents[2]


def _calls_of_one_save(directory: Path) -> list[str]:
    disk = TracingDisk()
    write_snapshot(directory, small_image(), disk=disk)
    return disk.calls


def _forked(work: Callable[[], None]) -> int:
    """Run `work` in a forked child that runs nothing else of this process; return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_snapshot_is_named_after_its_position_and_private_to_its_owner(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, small_image(7, 2))
    assert path == tmp_path / "snapshot-00000000000000000007-2.fbs"
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_snapshot(path) == small_image(7, 2)
    assert os.listdir(tmp_path) == [path.name]


def test_content_is_durable_before_the_name_and_the_name_before_the_return(tmp_path: Path) -> None:
    calls = _calls_of_one_save(tmp_path)
    name = "snapshot-00000000000000000007-2.fbs"
    assert calls[0] == f"create .{name}.saving"
    assert set(calls[1:-3]) == {"write"}
    assert calls[-3:] == ["sync", f"rename .{name}.saving {name}", "sync directory"]


def test_equal_images_give_equal_files(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first, second = (write_snapshot(tmp_path / folder, small_image()) for folder in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failing_disk_leaves_only_the_older_snapshot(tmp_path: Path, number: int) -> None:
    calls = len(_calls_of_one_save(tmp_path))
    older = write_snapshot(tmp_path, small_image(6))
    (tmp_path / str(SnapshotName(7, 2))).unlink()
    for call in range(calls):
        with pytest.raises(SnapshotFailed, match=r"00007-2\.fbs: the snapshot was not written: .*; \w+"):
            write_snapshot(tmp_path, small_image(7), disk=FailingDisk(call, number))
        if call == calls - 1:  # sync of the directory: the file is complete, but not durable
            (tmp_path / str(SnapshotName(7, 2))).unlink()
        assert os.listdir(tmp_path) == [older.name]
    assert load_snapshot(older) == small_image(6)


@pytest.mark.parametrize(("blocks", "reserve"), [(1_000_000, RESERVE_BYTES), (32, 2 * 4096)])
def test_space_for_the_journal_is_left_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, reserve: int
) -> None:
    size_bytes = write_snapshot(tmp_path, small_image(6)).stat().st_size
    written: list[int] = []
    free_bytes = reserve + size_bytes

    def room(file: int) -> SimpleNamespace:
        written.append(os.fstat(file).st_size)
        return SimpleNamespace(f_blocks=blocks, f_frsize=4096, f_bavail=(free_bytes - written[-1]) / 4096)

    monkeypatch.setattr("forebay.snapshots.finalize.os.fstatvfs", room)
    write_snapshot(tmp_path, small_image(7))
    free_bytes -= 1
    with pytest.raises(SnapshotFailed, match="No space left on device; free space on that file system"):
        write_snapshot(tmp_path, small_image(8))
    assert max(written) < size_bytes and len(os.listdir(tmp_path)) == 2


def test_process_dying_at_any_call_leaves_a_valid_snapshot(tmp_path: Path) -> None:
    calls = len(_calls_of_one_save(tmp_path))
    (tmp_path / str(SnapshotName(7, 2))).unlink()
    write_snapshot(tmp_path, small_image(6))
    for call in range(calls):

        def die(call: int = call) -> None:
            write_snapshot(tmp_path, small_image(7), disk=KillingDisk(call))

        ended = _forked(die)
        assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL
        renamed = call == calls - 1
        store = SnapshotStore(tmp_path)
        found = store.newest_usable()
        store.close()
        assert found is not None and found[1] == small_image(7 if renamed else 6)
        assert store.skipped_snapshots == ()
        assert len(os.listdir(tmp_path)) == 1 + renamed


_WRITER = """
import sys
from pathlib import Path
from snapshots import SnapshotStore
from tests.snapshots.states import many_jobs
import msgspec
store = SnapshotStore(Path(sys.argv[1]))
image = many_jobs(400)
first = int(sys.argv[2])
for index in range(first, first + 1_000_000):
    store.save_in_background(msgspec.structs.replace(image, index=index)).result()
    print(index, flush=True)
"""


def test_sigkill_at_random_moments_loses_no_returned_snapshot(tmp_path: Path) -> None:
    moments = random.Random(20)
    promised = 0
    for _ in range(8):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(promised + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
            assert writer.stdout is not None
            for _ in range(moments.randrange(1, 12)):
                promised = int(writer.stdout.readline())
            try:
                writer.wait(moments.random() * 0.02)
            except subprocess.TimeoutExpired:
                writer.kill()
            promised = max([promised, *(int(line) for line in writer.stdout.read().split("\n")[:-1])])
        store = SnapshotStore(tmp_path)
        found = store.newest_usable()
        store.close()
        assert found is not None and store.skipped_snapshots == ()
        assert promised <= found[1].index <= promised + 1
        assert found[1].state == many_jobs(400).state
        assert len(os.listdir(tmp_path)) <= 3
        promised = found[1].index


def test_full_disk_gives_a_remedy_and_keeps_the_older_snapshot(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from snapshots import SnapshotFailed, write_snapshot
from tests.snapshots.states import many_jobs, small_image
write_snapshot(Path(sys.argv[1]), small_image())
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_snapshot(Path(sys.argv[1]), many_jobs(1000))
except SnapshotFailed as why:
    print(why)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "raise the limit on file sizes" in done.stdout
    assert os.listdir(tmp_path) == [str(SnapshotName(7, 2))]
    assert load_snapshot(tmp_path / str(SnapshotName(7, 2))) == small_image()


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("forebay.snapshots.finalize.os.write", lambda file, data: write(file, bytes(data[:7])))
    path = write_snapshot(tmp_path, small_image())
    monkeypatch.undo()
    assert load_snapshot(path) == small_image()


def test_abandoning_removes_the_temporary_file(tmp_path: Path) -> None:
    breaths = iter(range(5))

    def breathe() -> None:
        if next(breaths) == 4:
            raise SnapshotAbandoned("stop")

    with pytest.raises(SnapshotAbandoned):
        write_snapshot(tmp_path, many_jobs(3000), breathe=breathe)
    assert os.listdir(tmp_path) == []


def test_progress_counts_up_to_all_records(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_snapshot(tmp_path, many_jobs(1000), progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {3001}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (3001, 3001)


def test_two_writers_of_one_snapshot_exclude_each_other(tmp_path: Path) -> None:
    class Meanwhile(SnapshotDisk):
        def sync(self, file: int) -> None:
            with pytest.raises(
                SnapshotFailed, match="another process is writing the file; let the other process finish"
            ):
                write_snapshot(tmp_path, small_image())
            super().sync(file)

    assert load_snapshot(write_snapshot(tmp_path, small_image(), disk=Meanwhile())) == small_image()


def test_link_instead_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / f".{SnapshotName(7, 2)}.saving").symlink_to(outside)
    with pytest.raises(SnapshotFailed):
        write_snapshot(folder, small_image())
    assert outside.read_text() == "precious"


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotFailed, match=r"nowhere: the snapshot was not written: No such file .*; create"):
        write_snapshot(tmp_path / "nowhere", small_image())


@pytest.mark.parametrize(
    "name",
    [
        "snapshot-7-2.fbs",
        "snapshot-00000000000000000007-02.fbs",
        "snapshot-00000000000000000007-2.fbs\n",
        ".snapshot-00000000000000000007-2.fbs.saving",
        "snapshot-٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٧-2.fbs",
    ],
)
def test_only_valid_snapshot_names_are_parsed(name: str) -> None:
    assert SnapshotName.parse(name) is None


def test_link_instead_of_a_snapshot_is_rejected(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, small_image())
    link = tmp_path / "link.fbs"
    link.symlink_to(path)
    with pytest.raises(SnapshotRefused, match="the file cannot be opened"):
        load_snapshot(link)


def test_abandoned_temporary_files_are_removed_and_descriptors_closed(tmp_path: Path) -> None:
    for name in ("left", "held"):
        (tmp_path / name).touch()
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    holder = os.open(tmp_path / "held", os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        before = os.listdir("/proc/self/fd")
        removed = [remove_if_abandoned(SnapshotDisk(), directory, name) for name in ("left", "held", "absent")]
        assert (removed, os.listdir(tmp_path)) == ([True, False, True], ["held"])
        assert os.listdir("/proc/self/fd") == before
    finally:
        os.close(holder)
        os.close(directory)
