"""Going on where an earlier attempt was: what is believed, what is copied again, and what is cleared away."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.agent.files.durable import RECEIPTS
from forebay.cluster.agent.transfer import large_file, plan
from forebay.cluster.agent.transfer import workspace as workspace_module
from forebay.cluster.agent.transfer.errors import TransferFailed, TransferPaused
from forebay.cluster.agent.transfer.manifest import ManifestRecord
from forebay.cluster.agent.transfer.options import ItemKind, TransferOptions, Verify
from forebay.cluster.agent.transfer.progress import no_op
from forebay.cluster.agent.transfer.rate_limit import TransferStopped
from forebay.cluster.agent.transfer.status_table import Chunks, ChunkState
from forebay.cluster.agent.transfer.transfer import resumable
from forebay.cluster.agent.transfer.workspace import TRANSFERS, Workspace, forget, prune_receipts
from forebay.cluster.system.descriptors import open_directory
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant, tree_of

CHUNK = 4096
LARGE = bytes(range(256)) * 16 * 6
ONE = TransferOptions(chunk_bytes=CHUNK, large_bytes=16384, streams=1)


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


def end_in_the_large_file(harness: Harness, error: BaseException, after_bytes: int = 3 * CHUNK) -> None:
    harness.pace = Ends(after_bytes, error)
    with pytest.raises(type(error)):
        harness.carry(options=ONE)
    harness.pace = Ends(10**9, error)


def test_a_second_attempt_copies_nothing_again_and_says_the_same_of_every_file(harness: Harness) -> None:
    plant(harness.source, {"a": b"a", "d": {"b": b"b" * 999}, "large": LARGE})
    first = harness.carry()
    lines, kept = harness.lines(), inodes(harness.destination)
    second = harness.carry()
    assert inodes(harness.destination) == kept
    assert (second.resumed_files, second.resumed_bytes, second.written_bytes) == (3, first.size_bytes, 0)
    assert (second.digest, second.files, second.size_bytes) == (first.digest, first.files, first.size_bytes)
    assert harness.lines() == lines
    assert first.resumed_files == 0


def test_the_marks_of_what_a_large_file_became_are_not_believed_of_what_it_was(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside, first = harness.directory / "aside", harness.directory / "first"
    (harness.source / "large").write_bytes(LARGE)
    os.utime(harness.source / "large", ns=(1, 10**18))
    aside.write_bytes(LARGE[::-1])
    os.utime(aside, ns=(1, 10**18 + 1))

    def swap() -> None:
        os.rename(harness.source / "large", first)
        os.rename(aside, harness.source / "large")

    harness.planned = swap
    end_in_the_large_file(harness, TransferPaused())
    os.rename(first, harness.source / "large")
    harness.planned = no_op
    # As on a file system whose renames change no time.
    monkeypatch.setattr(ManifestRecord, "is_as", lambda this, that: (this.size, this.inode) == (that.size, that.inode))
    assert harness.carry(options=ONE).resumed_bytes == 0
    assert tree_of(harness.destination) == {"large": LARGE}


def test_what_was_copied_of_what_a_file_became_is_copied_again_when_it_is_what_it_was(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, aside, first = harness.source / "small", harness.directory / "aside", harness.directory / "first"
    small.write_bytes(b"first")
    aside.write_bytes(b"other")
    os.utime(aside, ns=(1, 1))

    def swap() -> None:
        os.rename(small, first)
        os.rename(aside, small)

    harness.planned = swap
    harness.carry()
    assert tree_of(harness.destination) == {"small": b"other"}
    os.rename(first, small)
    harness.planned = no_op
    monkeypatch.setattr(ManifestRecord, "is_as", lambda this, that: (this.size, this.inode) == (that.size, that.inode))
    harness.carry()
    assert tree_of(harness.destination) == {"small": b"first"}


def test_what_changed_on_either_side_is_copied_again_and_nothing_else_is(harness: Harness) -> None:
    plant(harness.source, {name: name.encode() * 5 for name in ("same", "source", "destination", "gone", "touched")})
    harness.carry()
    before = inodes(harness.destination)
    (harness.source / "source").write_bytes(b"other")
    os.utime(harness.source / "touched", ns=(1, 1))
    (harness.destination / "destination").write_bytes(b"tampered")
    (harness.destination / "gone").unlink()
    (harness.source / "new").write_bytes(b"new")
    receipt = harness.carry()
    assert tree_of(harness.destination) == tree_of(harness.source)
    assert (harness.destination / "touched").stat().st_mtime_ns == 1
    after = inodes(harness.destination)
    assert (after["same"], receipt.resumed_files) == (before["same"], 1)


@pytest.mark.parametrize("error", [TransferPaused(), TransferStopped()])
def test_a_large_file_that_was_paused_goes_on_in_the_same_temporary_file(
    harness: Harness, error: BaseException
) -> None:
    (harness.source / "large").write_bytes(LARGE)
    end_in_the_large_file(harness, error)
    (part,) = harness.parts()
    inode = part.stat().st_ino
    receipt = harness.carry(options=ONE)
    assert (harness.destination / "large").read_bytes() == LARGE
    assert (harness.destination / "large").stat().st_ino == inode
    assert receipt.written_bytes <= len(LARGE) - 2 * CHUNK
    assert harness.parts() == []


def test_whoever_else_ends_a_transfer_finds_no_temporary_file_left(harness: Harness) -> None:
    (harness.source / "large").write_bytes(LARGE)
    (harness.destination / "large").write_bytes(b"old")
    end_in_the_large_file(harness, KeyboardInterrupt())
    assert tree_of(harness.destination) == {"large": b"old"}
    assert harness.carry(options=ONE).resumed_bytes == 0


def test_a_failure_that_goes_away_keeps_what_was_copied_and_one_of_room_does_not(harness: Harness) -> None:
    (harness.source / "large").write_bytes(LARGE)
    end_with(harness, OSError(errno.EIO, "broken"))
    assert len(harness.parts()) == 1
    end_with(harness, OSError(errno.ENOSPC, "full"), 100)
    assert harness.parts() == []
    end_with(harness, OSError(errno.EACCES, "not allowed"))
    assert harness.parts() == []


def end_with(harness: Harness, error: OSError, after_bytes: int = 3 * CHUNK) -> None:
    harness.pace = Ends(after_bytes, error)
    with pytest.raises(TransferFailed, match="source/large cannot be copied to .*destination/large"):
        harness.carry(options=ONE)
    harness.pace = Ends(10**9, error)


def test_chunks_that_are_not_what_they_were_are_copied_again_whatever_their_marks_say(harness: Harness) -> None:
    (harness.source / "large").write_bytes(LARGE)
    end_in_the_large_file(harness, TransferPaused())
    (part,) = harness.parts()
    with part.open("r+b") as file:
        file.write(b"not what was written")
    receipt = harness.carry(options=ONE)
    assert (harness.destination / "large").read_bytes() == LARGE
    assert receipt.resumed_bytes <= 2 * CHUNK


@pytest.mark.parametrize("rebooted", [False, True])
def test_a_chunk_without_a_digest_is_believed_until_the_node_is_booted_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, rebooted: bool
) -> None:
    options = TransferOptions(chunk_bytes=CHUNK, large_bytes=16384, streams=1, verify=Verify.SIZE)
    monkeypatch.setattr(large_file, "is_local", lambda _: False)
    monkeypatch.setattr(large_file, "clone", lambda *_: False)
    monkeypatch.setattr(large_file, "SETTLE_S", 10**9)
    (harness.source / "large").write_bytes(LARGE)
    harness.pace = Ends(3 * CHUNK, TransferPaused())
    with pytest.raises(TransferPaused):
        harness.carry(options=options)
    harness.pace = Ends(10**9, TransferPaused())
    if rebooted:
        # What was written and not synced went with the power.
        monkeypatch.setattr(plan, "boot_id", lambda: "another boot")
        (part,) = harness.parts()
        part.write_bytes(bytes(len(LARGE)))
    receipt = harness.carry(options=options)
    assert (harness.destination / "large").read_bytes() == LARGE
    assert (receipt.resumed_bytes == 0) is rebooted


def test_another_file_under_the_temporary_name_is_not_gone_on_with(harness: Harness) -> None:
    (harness.source / "large").write_bytes(LARGE)
    end_in_the_large_file(harness, TransferPaused())
    believe_what_was_copied(harness)
    (part,) = harness.parts()
    data = part.read_bytes()
    part.rename(harness.directory / "elsewhere")
    part.write_bytes(data[::-1])
    receipt = harness.carry(options=ONE)
    assert (harness.destination / "large").read_bytes() == LARGE
    assert receipt.resumed_bytes == 0


def believe_what_was_copied(harness: Harness) -> None:
    """Mark chunks as durable, as if a sync had come in between."""
    for path in (harness.home / TRANSFERS).glob("*.chunks.*"):
        descriptor = os.open(path, os.O_RDWR)
        chunks = Chunks(descriptor, 0, 6, CHUNK)
        chunks.mark_durable([number for number in range(6) if chunks.state(number) is ChunkState.COPIED])
        os.close(descriptor)


def test_what_is_durable_is_not_even_read_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    (harness.source / "large").write_bytes(LARGE)
    end_in_the_large_file(harness, TransferPaused())
    believe_what_was_copied(harness)
    read: list[int] = []
    monkeypatch.setattr("forebay.cluster.agent.transfer.large_file.digest_of", lambda *_: read.append(1) or b"")
    receipt = harness.carry(options=ONE)
    assert (harness.destination / "large").read_bytes() == LARGE
    assert receipt.resumed_bytes >= 2 * CHUNK and read == []


def test_a_source_that_changed_meanwhile_is_copied_from_its_start(harness: Harness) -> None:
    (harness.source / "large").write_bytes(LARGE)
    end_in_the_large_file(harness, TransferPaused())
    (harness.source / "large").write_bytes(LARGE[::-1])
    receipt = harness.carry(options=ONE)
    assert (harness.destination / "large").read_bytes() == LARGE[::-1]
    assert (receipt.resumed_bytes, harness.parts()) == (0, [])


def test_the_temporary_file_of_a_source_that_is_gone_is_removed(harness: Harness) -> None:
    plant(harness.source, {"d": {"large": LARGE}, "a": b"a"})
    end_in_the_large_file(harness, TransferPaused(), 2 * CHUNK)
    assert len(harness.parts()) == 1
    (harness.source / "d" / "large").unlink()
    assert harness.carry(options=ONE).files == 1
    assert tree_of(harness.destination) == {"a": b"a", "d": None}


@pytest.mark.parametrize("owned", [False, True])
def test_what_the_source_no_longer_has_goes_from_a_destination_that_is_owned_and_from_no_other(
    harness: Harness, owned: bool
) -> None:
    plant(harness.source, {"a": b"a", "d": {"b": b"b", "e": {"c": b"c"}}, "z": b"z"})
    harness.carry()
    (harness.destination / "mine").write_bytes(b"mine")
    (harness.destination / "z").write_bytes(b"changed by somebody")
    for name in ("d/b", "d/e/c", "z"):
        (harness.source / name).unlink()
    for name in ("d/e", "d"):
        (harness.source / name).rmdir()
    harness.carry(options=TransferOptions(chunk_bytes=4096, large_bytes=16384, owned=owned))
    expected: dict[str, bytes | None] = {"a": b"a", "mine": b"mine", "z": b"changed by somebody"}
    kept = {} if owned else {"d": None, "d/b": b"b", "d/e": None, "d/e/c": b"c"}
    assert tree_of(harness.destination) == expected | kept


def test_other_items_or_options_are_another_transfer(harness: Harness) -> None:
    plant(harness.source, {"a": b"a"})
    harness.carry()
    assert harness.carry([harness.item(destination=harness.destination / "x")]).resumed_files == 0
    assert harness.carry([harness.item(destination=harness.destination / "x")]).resumed_files == 1
    for items, known in (([harness.item(destination=harness.destination / "x")], True), ([harness.item()], False)):
        with harness.workspace() as workspace:
            assert resumable(items, SMALL, workspace) is known
    blake = TransferOptions(chunk_bytes=4096, large_bytes=16384, algorithm="blake3")
    receipt = harness.carry([harness.item(destination=harness.destination / "x")], blake)
    assert (receipt.resumed_files, receipt.digest.partition(":")[0]) == (0, "blake3")


@pytest.mark.parametrize("kind", ["control", "manifest"])
def test_damaged_records_of_an_earlier_attempt_are_not_believed(harness: Harness, kind: str) -> None:
    plant(harness.source, {"a": b"a", "b": b"b"})
    harness.carry()
    for path in (harness.home / TRANSFERS).glob(f"*.{kind}.*"):
        data = bytearray(path.read_bytes())
        for offset in (20, 32 * 1024 + 20):
            if len(data) > offset:
                data[offset] ^= 1
        path.write_bytes(data)
    assert (harness.carry().resumed_files, tree_of(harness.destination)) == (0, tree_of(harness.source))


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_full_disk_of_the_agent_costs_the_records_and_not_the_transfer(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    plant(harness.source, {"a": b"a", "d": {"large": LARGE}})
    real = getattr(os, call)
    met: list[int] = []

    def full(descriptor: int, *arguments: Any) -> Any:
        if "/home/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            met.append(descriptor)
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, call, full)
    receipt = harness.carry(options=ONE)
    assert (receipt.files, receipt.complete) == (2, True)
    assert tree_of(harness.destination) == tree_of(harness.source)
    assert met


def test_where_no_file_can_be_made_for_them_the_records_are_in_memory(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {"a": b"a"})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(workspace_module, "_open", full)
    receipt = harness.carry()
    assert (receipt.files, tree_of(harness.destination)) == (1, {"a": b"a"})
    monkeypatch.undo()
    assert harness.carry().resumed_files == 0

    def refused(*_: object) -> int:
        raise OSError(errno.EACCES, "rejected")

    monkeypatch.setattr(workspace_module, "_open", refused)
    with pytest.raises(OSError, match="rejected"):
        harness.carry()


def recorded(harness: Harness, stage: str) -> list[int]:
    """Return the jobs that have records of a transfer of this stage."""
    return sorted(int(path.name.split(".")[0]) for path in (harness.home / TRANSFERS).glob(f"*.{stage}.control.0"))


def test_the_records_belong_to_the_agent_alone_and_go_with_the_job(harness: Harness) -> None:
    plant(harness.source, {"a": b"a"})
    harness.carry()
    home = open_directory(harness.home)
    files = [*(harness.home / TRANSFERS).iterdir(), *(harness.home / RECEIPTS).iterdir()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert (harness.home / TRANSFERS).stat().st_mode & 0o077 == 0
    assert recorded(harness, "stage_out") == [7] and recorded(harness, "stage_in") == []
    forget(home, 8)
    assert recorded(harness, "stage_out") == [7]
    forget(home, 7)
    assert list((harness.home / TRANSFERS).iterdir()) == [] and len(list((harness.home / RECEIPTS).iterdir())) == 1
    os.close(home)


def test_old_receipts_go_first_when_there_are_too_many(harness: Harness) -> None:
    home = open_directory(harness.home)
    assert (prune_receipts(home), recorded(harness, "stage_in")) == (0, [])
    forget(home, 7)
    receipts = harness.home / RECEIPTS
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


def test_a_single_file_is_resumed_like_one_of_a_tree(harness: Harness) -> None:
    (harness.source / "a").write_bytes(b"a")
    item = harness.item(ItemKind.FILE, harness.source / "a", harness.destination / "b")
    assert (harness.carry([item], SMALL).resumed_files, harness.carry([item], SMALL).resumed_files) == (0, 1)
