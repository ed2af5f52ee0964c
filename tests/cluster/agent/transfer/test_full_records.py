"""A disk of the agent's that fills up while a transfer runs: the records are overwritten in place, and what cannot be
recorded is not begun, or done again; the files that are moved never suffer."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.cluster.agent.transfer import receipts, status_table
from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.agent.transfer.options import TransferOptions
from forebay.cluster.agent.transfer.record_paths import is_unrecorded
from forebay.cluster.agent.transfer.status_table import RecordsFailed, StatusTable
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant, tree_of

TREE: dict[str, object] = {
    "a": b"a" * 500,
    "d": {f"f{n}": b"%d" % n for n in range(6)},
    "large": bytes(range(256)) * 90,
}
ONE = TransferOptions(chunk_bytes=4096, large_bytes=16384, streams=1)


@pytest.fixture
def small_disk(harness: Harness) -> Iterator[Path]:
    """The agent's directory on a disk of 1 MiB, where this machine lets one be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(harness.home)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs more rights")
    yield harness.home
    subprocess.run(["umount", "-l", str(harness.home)], check=True)


def fill(directory: Path) -> None:
    """Take all room that is left."""
    with (directory / "filler").open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC


def test_a_disk_that_fills_up_during_a_transfer_costs_the_lines_and_not_the_checkpoint(
    harness: Harness, small_disk: Path
) -> None:
    plant(harness.source, TREE)
    harness.planned = lambda: fill(small_disk)
    receipt = harness.carry()
    assert tree_of(harness.destination) == tree_of(harness.source) and not harness.parts()
    assert (receipt.complete, harness.lines()) == (True, [])
    (small_disk / "filler").unlink()
    harness.planned = lambda: None
    again = harness.carry()
    assert (again.resumed_files, again.digest, bool(harness.lines())) == (8, receipt.digest, True)


def test_a_disk_that_was_full_before_has_the_transfer_keep_its_records_in_memory(
    harness: Harness, small_disk: Path
) -> None:
    plant(harness.source, TREE)
    harness.carry()
    (harness.source / "a").write_bytes(b"new")
    fill(small_disk)
    receipt = harness.carry()
    assert tree_of(harness.destination) == tree_of(harness.source) and receipt.resumed_files == 7


def test_directories_that_no_record_is_kept_of_are_finished_by_a_later_attempt(
    harness: Harness, small_disk: Path
) -> None:
    plant(harness.source, TREE | {"d": {"e": {"f": b"f"}}})
    for number, made in enumerate((harness.source, harness.source / "d", harness.source / "d" / "e")):
        made.chmod(0o750)
        os.utime(made, ns=(10**18 + number, 10**18 + number))
    expected = tree_of(harness.source)
    fill(small_disk)
    # The first attempt makes all directories, and then finds no place for a file.
    (harness.destination / "a").mkdir(parents=True)
    with pytest.raises(TransferFailed):
        harness.carry()
    assert is_unrecorded((harness.destination / "d" / "e").stat().st_mode)
    (harness.destination / "a").rmdir()
    harness.carry()
    assert tree_of(harness.destination) == expected
    for name in ("d", "d/e"):
        made, source = ((root / name).stat() for root in (harness.destination, harness.source))
        assert (made.st_mode, made.st_mtime_ns) == (source.st_mode, source.st_mtime_ns), name


class Full:
    """The records' disk takes so many writes once it is armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
        self.left = writes
        self.armed = False
        self.write: Callable[[int, bytes, int], None] = status_table._write
        monkeypatch.setattr(status_table, "_write", self)

    def __call__(self, descriptor: int, data: bytes, at: int) -> None:
        if self.armed:
            self.left -= 1
            if self.left < 0:
                raise RecordsFailed(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write(descriptor, data, at)

    def arm(self) -> None:
        self.armed = True


@pytest.mark.parametrize("move", [False, True])
def test_wherever_a_record_finds_no_room_nothing_is_half_done_and_the_next_attempt_ends_right(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, move: bool
) -> None:
    # As where overwriting needs new blocks: on a file system that copies on write.
    plant(harness.source, TREE)
    expected, failures = tree_of(harness.source), 0
    for writes in range(1000):
        with monkeypatch.context() as patched:
            full = Full(patched, writes)
            harness.planned = full.arm
            try:
                receipt = harness.carry([harness.item(move=move)], ONE)
            except RecordsFailed as error:
                failures += 1
                assert error.errno == errno.ENOSPC and not harness.parts()
                assert tree_of(harness.source) == expected
                arrived = {name: data for name, data in tree_of(harness.destination).items() if data is not None}
                assert arrived.items() <= expected.items()
                shutil.rmtree(harness.destination)
                harness.destination.mkdir()
                continue
        assert receipt.complete and tree_of(harness.destination) == expected
        assert (tree_of(harness.source) == {}) is move
        break
    # The rows of three directories, the chunks and the large file, the batch twice.
    assert failures >= 12


def test_a_write_that_is_taken_in_part_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    control = os.memfd_create("control")
    table, pwrite = StatusTable(control), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, bytes(data)[:7], at))
    wanted = [
        status_table.StatusRow(status_table.RecordState.DONE, number, status_table.CopiedFile(number, 2, 3))
        for number in range(5)
    ]
    table.put_many(0, wanted)
    assert table.many(0, 5) == wanted
    os.close(control)


def test_lines_that_cannot_be_made_durable_for_want_of_room_are_not_kept(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {"a": b"a"})

    def full(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    harness.carry(options=SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(receipts.os, "fsync", full)
        descriptor = os.memfd_create("lines")
        assert not receipts._write_block(descriptor, bytearray(b"line\n"), durably=True)
        assert os.fstat(descriptor).st_size == 0
        os.close(descriptor)
