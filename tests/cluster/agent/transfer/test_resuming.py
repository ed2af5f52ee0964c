"""Going on where an earlier attempt was: what is believed, what is copied again, and what is cleared away."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.transfer import workspace as workspace_module
from cluster.agent.transfer.errors import Paused, TransferFailed
from cluster.agent.transfer.manifest import Record
from cluster.agent.transfer.options import Kind, Options
from cluster.agent.transfer.progress import nothing
from cluster.agent.transfer.rate_limit import Stopped
from cluster.agent.transfer.status_table import Chunks, ChunkState
from cluster.agent.transfer.transfer import resumable
from cluster.agent.transfer.workspace import RECEIPTS, TRANSFERS, Workspace, forget, prune_receipts
from cluster.system.descriptors import open_directory
from tests.cluster.agent.transfer.rig import SMALL, Rig, plant, tree_of

CHUNK = 4096
LARGE = bytes(range(256)) * 16 * 6
ONE = Options(chunk_bytes=CHUNK, large_bytes=16384, streams=1)


class Ends:
    """A pace that raises when so many bytes were moved."""

    def __init__(self, after_bytes: int, error: BaseException) -> None:
        self.left = after_bytes
        self.error = error

    def take(self, size_bytes: int, /) -> None:
        self.left -= size_bytes
        if self.left < 0:
            raise self.error

    def check(self) -> None:
        pass

    def step_bytes(self, most: int, /) -> int:
        return min(most, CHUNK // 2)


def inodes(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_ino for path in directory.rglob("*") if path.is_file()}


def end_in_the_large_file(rig: Rig, error: BaseException, after_bytes: int = 3 * CHUNK) -> None:
    rig.pace = Ends(after_bytes, error)
    with pytest.raises(type(error)):
        rig.carry(options=ONE)
    rig.pace = Ends(10**9, error)


def test_a_second_attempt_copies_nothing_again_and_says_the_same_of_every_file(rig: Rig) -> None:
    plant(rig.source, {"a": b"a", "d": {"b": b"b" * 999}, "large": LARGE})
    first = rig.carry()
    lines, kept = rig.lines(), inodes(rig.destination)
    second = rig.carry()
    assert inodes(rig.destination) == kept
    assert (second.resumed_files, second.resumed_bytes, second.written_bytes) == (3, first.size_bytes, 0)
    assert (second.digest, second.files, second.size_bytes) == (first.digest, first.files, first.size_bytes)
    assert rig.lines() == lines
    assert first.resumed_files == 0


def test_the_marks_of_what_a_large_file_became_are_not_believed_of_what_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside, first = rig.directory / "aside", rig.directory / "first"
    (rig.source / "large").write_bytes(LARGE)
    os.utime(rig.source / "large", ns=(1, 10**18))
    aside.write_bytes(LARGE[::-1])
    os.utime(aside, ns=(1, 10**18 + 1))

    def swap() -> None:
        os.rename(rig.source / "large", first)
        os.rename(aside, rig.source / "large")

    rig.planned = swap
    end_in_the_large_file(rig, Paused())
    os.rename(first, rig.source / "large")
    rig.planned = nothing
    # As on a file system whose renames change no time.
    monkeypatch.setattr(Record, "is_as", lambda this, that: (this.size, this.inode) == (that.size, that.inode))
    assert rig.carry(options=ONE).resumed_bytes == 0
    assert tree_of(rig.destination) == {"large": LARGE}


def test_what_was_copied_of_what_a_file_became_is_copied_again_when_it_is_what_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, aside, first = rig.source / "small", rig.directory / "aside", rig.directory / "first"
    small.write_bytes(b"first")
    aside.write_bytes(b"other")
    os.utime(aside, ns=(1, 1))

    def swap() -> None:
        os.rename(small, first)
        os.rename(aside, small)

    rig.planned = swap
    rig.carry()
    assert tree_of(rig.destination) == {"small": b"other"}
    os.rename(first, small)
    rig.planned = nothing
    monkeypatch.setattr(Record, "is_as", lambda this, that: (this.size, this.inode) == (that.size, that.inode))
    rig.carry()
    assert tree_of(rig.destination) == {"small": b"first"}


def test_what_changed_on_either_side_is_copied_again_and_nothing_else_is(rig: Rig) -> None:
    plant(rig.source, {name: name.encode() * 5 for name in ("same", "source", "destination", "gone", "touched")})
    rig.carry()
    before = inodes(rig.destination)
    (rig.source / "source").write_bytes(b"other")
    os.utime(rig.source / "touched", ns=(1, 1))
    (rig.destination / "destination").write_bytes(b"tampered")
    (rig.destination / "gone").unlink()
    (rig.source / "new").write_bytes(b"new")
    receipt = rig.carry()
    assert tree_of(rig.destination) == tree_of(rig.source)
    assert (rig.destination / "touched").stat().st_mtime_ns == 1
    after = inodes(rig.destination)
    assert (after["same"], receipt.resumed_files) == (before["same"], 1)


@pytest.mark.parametrize("error", [Paused(), Stopped()])
def test_a_large_file_that_was_paused_goes_on_in_the_same_temporary_file(rig: Rig, error: BaseException) -> None:
    (rig.source / "large").write_bytes(LARGE)
    end_in_the_large_file(rig, error)
    (part,) = rig.parts()
    inode = part.stat().st_ino
    receipt = rig.carry(options=ONE)
    assert (rig.destination / "large").read_bytes() == LARGE
    assert (rig.destination / "large").stat().st_ino == inode
    assert receipt.written_bytes <= len(LARGE) - 2 * CHUNK
    assert rig.parts() == []


def test_whoever_else_ends_a_transfer_finds_no_temporary_file_left(rig: Rig) -> None:
    (rig.source / "large").write_bytes(LARGE)
    (rig.destination / "large").write_bytes(b"old")
    end_in_the_large_file(rig, KeyboardInterrupt())
    assert tree_of(rig.destination) == {"large": b"old"}
    assert rig.carry(options=ONE).resumed_bytes == 0


def test_a_failure_that_goes_away_keeps_what_was_copied_and_one_of_room_does_not(rig: Rig) -> None:
    (rig.source / "large").write_bytes(LARGE)
    end_with(rig, OSError(errno.EIO, "broken"))
    assert len(rig.parts()) == 1
    end_with(rig, OSError(errno.ENOSPC, "full"), 100)
    assert rig.parts() == []
    end_with(rig, OSError(errno.EACCES, "not allowed"))
    assert rig.parts() == []


def end_with(rig: Rig, error: OSError, after_bytes: int = 3 * CHUNK) -> None:
    rig.pace = Ends(after_bytes, error)
    with pytest.raises(TransferFailed, match="source/large cannot be copied to .*destination/large"):
        rig.carry(options=ONE)
    rig.pace = Ends(10**9, error)


def test_chunks_that_are_not_what_they_were_are_copied_again_whatever_their_marks_say(rig: Rig) -> None:
    (rig.source / "large").write_bytes(LARGE)
    end_in_the_large_file(rig, Paused())
    (part,) = rig.parts()
    with part.open("r+b") as file:
        file.write(b"not what was written")
    receipt = rig.carry(options=ONE)
    assert (rig.destination / "large").read_bytes() == LARGE
    assert receipt.resumed_bytes <= 2 * CHUNK


def test_another_file_under_the_temporary_name_is_not_gone_on_with(rig: Rig) -> None:
    (rig.source / "large").write_bytes(LARGE)
    end_in_the_large_file(rig, Paused())
    believe_what_was_copied(rig)
    (part,) = rig.parts()
    data = part.read_bytes()
    part.rename(rig.directory / "elsewhere")
    part.write_bytes(data[::-1])
    receipt = rig.carry(options=ONE)
    assert (rig.destination / "large").read_bytes() == LARGE
    assert receipt.resumed_bytes == 0


def believe_what_was_copied(rig: Rig) -> None:
    """Mark chunks as durable, as if a sync had come in between."""
    for path in (rig.home / TRANSFERS).glob("*.chunks.*"):
        descriptor = os.open(path, os.O_RDWR)
        chunks = Chunks(descriptor, 0, 6, CHUNK)
        chunks.durable([number for number in range(6) if chunks.state(number) is ChunkState.COPIED])
        os.close(descriptor)


def test_what_is_durable_is_not_even_read_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (rig.source / "large").write_bytes(LARGE)
    end_in_the_large_file(rig, Paused())
    believe_what_was_copied(rig)
    read: list[int] = []
    monkeypatch.setattr("cluster.agent.transfer.large.digest_of", lambda *_: read.append(1) or b"")
    receipt = rig.carry(options=ONE)
    assert (rig.destination / "large").read_bytes() == LARGE
    assert receipt.resumed_bytes >= 2 * CHUNK and read == []


def test_a_source_that_changed_meanwhile_is_copied_from_its_start(rig: Rig) -> None:
    (rig.source / "large").write_bytes(LARGE)
    end_in_the_large_file(rig, Paused())
    (rig.source / "large").write_bytes(LARGE[::-1])
    receipt = rig.carry(options=ONE)
    assert (rig.destination / "large").read_bytes() == LARGE[::-1]
    assert (receipt.resumed_bytes, rig.parts()) == (0, [])


def test_the_temporary_file_of_a_source_that_is_gone_is_removed(rig: Rig) -> None:
    plant(rig.source, {"d": {"large": LARGE}, "a": b"a"})
    end_in_the_large_file(rig, Paused(), 2 * CHUNK)
    assert len(rig.parts()) == 1
    (rig.source / "d" / "large").unlink()
    assert rig.carry(options=ONE).files == 1
    assert tree_of(rig.destination) == {"a": b"a", "d": None}


@pytest.mark.parametrize("owned", [False, True])
def test_what_the_source_no_longer_has_goes_from_a_destination_that_is_owned_and_from_no_other(
    rig: Rig, owned: bool
) -> None:
    plant(rig.source, {"a": b"a", "d": {"b": b"b", "e": {"c": b"c"}}, "z": b"z"})
    rig.carry()
    (rig.destination / "mine").write_bytes(b"mine")
    (rig.destination / "z").write_bytes(b"changed by somebody")
    for name in ("d/b", "d/e/c", "z"):
        (rig.source / name).unlink()
    for name in ("d/e", "d"):
        (rig.source / name).rmdir()
    rig.carry(options=Options(chunk_bytes=4096, large_bytes=16384, owned=owned))
    expected: dict[str, bytes | None] = {"a": b"a", "mine": b"mine", "z": b"changed by somebody"}
    kept = {} if owned else {"d": None, "d/b": b"b", "d/e": None, "d/e/c": b"c"}
    assert tree_of(rig.destination) == expected | kept


def test_other_items_or_options_are_another_transfer(rig: Rig) -> None:
    plant(rig.source, {"a": b"a"})
    rig.carry()
    assert rig.carry([rig.item(destination=rig.destination / "x")]).resumed_files == 0
    assert rig.carry([rig.item(destination=rig.destination / "x")]).resumed_files == 1
    for items, known in (([rig.item(destination=rig.destination / "x")], True), ([rig.item()], False)):
        with rig.workspace() as workspace:
            assert resumable(items, SMALL, workspace) is known
    blake = Options(chunk_bytes=4096, large_bytes=16384, algorithm="blake3")
    receipt = rig.carry([rig.item(destination=rig.destination / "x")], blake)
    assert (receipt.resumed_files, receipt.digest.partition(":")[0]) == (0, "blake3")


@pytest.mark.parametrize("kind", ["control", "manifest"])
def test_damaged_records_of_an_earlier_attempt_are_not_believed(rig: Rig, kind: str) -> None:
    plant(rig.source, {"a": b"a", "b": b"b"})
    rig.carry()
    for path in (rig.home / TRANSFERS).glob(f"*.{kind}.*"):
        data = bytearray(path.read_bytes())
        for offset in (20, 32 * 1024 + 20):
            if len(data) > offset:
                data[offset] ^= 1
        path.write_bytes(data)
    assert (rig.carry().resumed_files, tree_of(rig.destination)) == (0, tree_of(rig.source))


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_full_disk_of_the_agent_costs_the_records_and_not_the_transfer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    plant(rig.source, {"a": b"a", "d": {"large": LARGE}})
    real = getattr(os, call)
    met: list[int] = []

    def full(descriptor: int, *arguments: Any) -> Any:
        if "/home/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            met.append(descriptor)
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, call, full)
    receipt = rig.carry(options=ONE)
    assert (receipt.files, receipt.complete) == (2, True)
    assert tree_of(rig.destination) == tree_of(rig.source)
    assert met


def test_where_no_file_can_be_made_for_them_the_records_are_in_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(rig.source, {"a": b"a"})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(workspace_module, "_open", full)
    receipt = rig.carry()
    assert (receipt.files, tree_of(rig.destination)) == (1, {"a": b"a"})
    monkeypatch.undo()
    assert rig.carry().resumed_files == 0

    def refused(*_: object) -> int:
        raise OSError(errno.EACCES, "refused")

    monkeypatch.setattr(workspace_module, "_open", refused)
    with pytest.raises(OSError, match="refused"):
        rig.carry()


def recorded(rig: Rig, stage: str) -> list[int]:
    """Return the jobs that have records of a transfer of this stage."""
    return sorted(int(path.name.split(".")[0]) for path in (rig.home / TRANSFERS).glob(f"*.{stage}.control.0"))


def test_the_records_belong_to_the_agent_alone_and_go_with_the_job(rig: Rig) -> None:
    plant(rig.source, {"a": b"a"})
    rig.carry()
    home = open_directory(rig.home)
    files = [*(rig.home / TRANSFERS).iterdir(), *(rig.home / RECEIPTS).iterdir()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert (rig.home / TRANSFERS).stat().st_mode & 0o077 == 0
    assert recorded(rig, "stage_out") == [7] and recorded(rig, "stage_in") == []
    forget(home, 8)
    assert recorded(rig, "stage_out") == [7]
    forget(home, 7)
    assert list((rig.home / TRANSFERS).iterdir()) == [] and len(list((rig.home / RECEIPTS).iterdir())) == 1
    os.close(home)


def test_old_receipts_go_first_when_there_are_too_many(rig: Rig) -> None:
    home = open_directory(rig.home)
    assert (prune_receipts(home), recorded(rig, "stage_in")) == (0, [])
    forget(home, 7)
    receipts = rig.home / RECEIPTS
    receipts.mkdir()
    for number in range(6):
        (receipts / f"{number}.1.stage_in").write_bytes(bytes(100))
        os.utime(receipts / f"{number}.1.stage_in", (number, number))
    assert prune_receipts(home, files_max=4) == 2
    assert prune_receipts(home, bytes_max=250) == 2
    assert sorted(os.listdir(receipts)) == ["4.1.stage_in", "5.1.stage_in"]
    os.close(home)


def test_records_in_memory_are_closed_like_others() -> None:
    workspace = Workspace.in_memory_only()
    descriptors = [*workspace.generations[0], *workspace.generations[1], workspace.receipts]
    workspace.close()
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_a_single_file_is_resumed_like_one_of_a_tree(rig: Rig) -> None:
    (rig.source / "a").write_bytes(b"a")
    item = rig.item(Kind.FILE, rig.source / "a", rig.destination / "b")
    assert (rig.carry([item], SMALL).resumed_files, rig.carry([item], SMALL).resumed_files) == (0, 1)
