"""What is promised is durable: every name after its data, every record after what it says, every receipt after all."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from typing import Any

import pytest

from forebay.cluster.agent.transfer import large_file, small_files, status_table, transfer
from forebay.cluster.agent.transfer.options import TransferOptions
from forebay.cluster.agent.transfer.status_table import HEADER_BYTES, ROW_BYTES, Chunks, RecordState
from tests.cluster.agent.transfer.harness import Harness, plant, tree_of

CHUNK_BYTES = 4096
CALLS = ("write", "pwrite", "fsync", "fdatasync", "rename", "mkdir", "fchmod")


class Disk:
    """Notes what is written and what is synced, and complains where something is promised that is not durable yet."""

    def __init__(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.harness = harness
        self.dirty: set[int] = set()
        """Inodes with data or names that a power cut would take."""
        self.names: dict[int, int] = {}
        """What was renamed, by its inode: the inode of the directory that it is in."""
        self.promised: list[str] = []
        self.real = {
            name: getattr(os, name) for name in ("write", "pwrite", "fsync", "fdatasync", "rename", "mkdir", "fchmod")
        }
        for name in ("write", "pwrite"):
            monkeypatch.setattr(os, name, self._writing(name))
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._syncing(name))
        monkeypatch.setattr(os, "rename", self._rename)
        monkeypatch.setattr(os, "fchmod", self._fchmod)
        monkeypatch.setattr(os, "mkdir", self._mkdir)
        for module in (small_files, transfer):
            monkeypatch.setattr(module, "sync_file_system", self._sync_all)
        self.control = 0

    def _writing(self, name: str) -> Any:
        def write(descriptor: int, data: bytes, *offset: int) -> Any:
            status = os.fstat(descriptor)
            self.dirty.add(status.st_ino)
            if name == "pwrite" and ".control." in os.readlink(f"/proc/self/fd/{descriptor}"):
                self._promise(data, offset[0])
            return self.real[name](descriptor, data, *offset)

        return write

    def _promise(self, data: bytes, offset: int) -> None:
        """Look at what a record says in the moment that it is written."""
        if offset < HEADER_BYTES:
            header = status_table.msgspec.msgpack.decode(data[8:], type=status_table.RecordsHeader)
            if header.complete:
                self.promised.append("complete")
                assert self._unsafe() == set(), "the transfer is said to be complete"
            return
        for at in range(0, len(data), ROW_BYTES):
            row = status_table._row(bytes(data[at : at + ROW_BYTES]))
            if row.state in (RecordState.READY, RecordState.DONE):
                inode = row.copied.inode
                self.promised.append(row.state.name)
                assert inode not in self.dirty, f"{row.state.name}, and the data is not durable"
                if row.state is RecordState.DONE:
                    assert self.names[inode] not in self.dirty, "DONE, and the name is not durable"

    def _unsafe(self) -> set[int]:
        return {path.stat().st_ino for path in self.harness.destination.rglob("*")} & self.dirty

    def _syncing(self, name: str) -> Any:
        def sync(descriptor: int) -> None:
            self.real[name](descriptor)
            self.dirty.discard(os.fstat(descriptor).st_ino)

        return sync

    def _sync_all(self, descriptor: int) -> None:
        assert stat.S_ISDIR(os.fstat(descriptor).st_mode)
        self.dirty.clear()

    def _rename(self, source: bytes, target: bytes, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        inode = os.stat(source, dir_fd=src_dir_fd, follow_symlinks=False).st_ino
        assert inode not in self.dirty, "renamed, and the data is not durable"
        self.real["rename"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        directory = os.fstat(dst_dir_fd).st_ino
        self.names[inode] = directory
        self.dirty.add(directory)

    def _fchmod(self, descriptor: int, mode: int) -> None:
        self.real["fchmod"](descriptor, mode)
        self.dirty.add(os.fstat(descriptor).st_ino)

    def _mkdir(self, name: Any, mode: int, *, dir_fd: int) -> None:
        self.real["mkdir"](name, mode, dir_fd=dir_fd)
        self.dirty.add(os.fstat(dir_fd).st_ino)
        self.dirty.add(os.stat(name, dir_fd=dir_fd).st_ino)


@pytest.mark.parametrize("files", [1, 300])
@pytest.mark.parametrize("replace", [True, False])
def test_no_name_is_given_before_its_data_and_nothing_is_promised_before_both_are_durable(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, files: int, replace: bool
) -> None:
    if not replace:
        # The call that does not replace is the C library's: the link in its place is seen no better.
        monkeypatch.setattr(
            "forebay.cluster.agent.transfer.file_copy._rename_without_replacing",
            lambda staging, part, directory, name: os.rename(part, name, src_dir_fd=staging, dst_dir_fd=directory),
        )
    plant(harness.source, {"d": {f"f{number}": b"x" * number for number in range(files)}, "large": bytes(20000)})
    plant(harness.source, {f"e{number}": {"a": b"a"} for number in range(20 if files > 1 else 2)})
    disk = Disk(harness, monkeypatch)
    receipt = harness.carry(options=TransferOptions(chunk_bytes=4096, large_bytes=16384, streams=1, replace=replace))
    assert receipt.files == len(list(filter(os.path.isfile, harness.source.rglob("*"))))
    assert disk.promised.count("DONE") == disk.promised.count("READY") == receipt.files
    assert disk.promised[-1] == "complete"
    lines = harness.home / "receipts" / "7.1.stage_out"
    assert lines.stat().st_ino not in disk.dirty, "the receipts are not durable"
    assert tree_of(harness.destination) == tree_of(harness.source)


def test_the_manifest_is_durable_before_anything_is_written_to_the_destination(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {"a": b"a"})
    disk = Disk(harness, monkeypatch)
    seen: list[set[str]] = []
    real = transfer._make_directories

    def first(*arguments: Any) -> None:
        records = {path.name for path in (harness.home / "transfers").iterdir() if path.stat().st_ino in disk.dirty}
        seen.append(records)
        real(*arguments)

    monkeypatch.setattr(transfer, "_make_directories", first)
    harness.carry(options=TransferOptions(streams=1))
    assert seen == [set()]


class WaitsForAMark:
    """A pace that moves nothing after the first chunks until some of them were marked as durable."""

    def __init__(self) -> None:
        self.marked = threading.Event()
        self.taken_bytes = 0

    def take(self, size_bytes: int, /) -> None:
        if self.taken_bytes >= 3 * CHUNK_BYTES:
            assert self.marked.wait(60), "no chunk was marked while others were moved"
        self.taken_bytes += size_bytes

    def check(self) -> None:
        pass

    def step_bytes(self, most: int, /) -> int:
        return most


def test_no_chunk_is_marked_as_durable_before_a_sync_that_began_after_it_was_written(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {"large": bytes(range(256)) * 256})
    unsynced, marked = set[int](), list[int]()
    pwrite, durable = os.pwrite, Chunks.mark_durable

    def is_part(descriptor: int) -> bool:
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part")

    def write(descriptor: int, data: bytes, at: int) -> int:
        if is_part(descriptor):
            unsynced.add(at // CHUNK_BYTES)
        return pwrite(descriptor, data, at)

    def syncing(really: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            before = set(unsynced)
            really(descriptor)
            if is_part(descriptor):
                unsynced.difference_update(before)

        return sync

    def mark(chunks: Chunks, numbers: list[int]) -> None:
        pace.marked.set()
        assert not unsynced & set(numbers), "DURABLE, and the chunk is not on the disk"
        durable(chunks, numbers)
        marked.extend(numbers)

    monkeypatch.setattr(os, "pwrite", write)
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, syncing(getattr(os, name)))
    monkeypatch.setattr(Chunks, "mark_durable", mark)
    monkeypatch.setattr(large_file, "SETTLE_S", 0.0)
    monkeypatch.setattr(large_file, "clone", lambda *_: False)
    harness.pace = pace = WaitsForAMark()
    harness.carry(options=TransferOptions(chunk_bytes=CHUNK_BYTES, large_bytes=16384, streams=1))
    assert marked
    assert tree_of(harness.destination) == tree_of(harness.source)
