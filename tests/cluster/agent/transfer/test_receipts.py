"""Receipts: what was done to every file, the same of the same files, and what a destination is compared with later."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from forebay.cluster.agent.transfer.digests import combine, hasher
from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.agent.transfer.options import TransferOptions, Verify
from forebay.cluster.agent.transfer.receipts import LEFT_OUT_NAMED_MAX, ReceiptDifference, read_lines, recheck
from forebay.replica.model.transfers import LeftOut
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant, tree_of

LARGE = os.urandom(20001)


def test_every_file_and_directory_has_a_line_that_says_what_it_is(harness: Harness) -> None:
    plant(harness.source, {"a": b"hello", "d": {"large": LARGE}})
    os.close(os.open(os.fsencode(harness.source) + b"/\xffodd\\", os.O_CREAT | os.O_WRONLY, 0o640))
    receipt = harness.carry()
    lines = {line.path: line for line in harness.lines()}
    assert list(lines) == ["", "a", "d", "d/large", "\\xffodd\\"]
    small = hasher("xxh3-128")
    small.update(b"hello")
    assert (lines["a"].kind, lines["a"].size, lines["a"].digest) == ("file", 5, small.digest().hex())
    assert lines["a"].mtime_ns == (harness.source / "a").stat().st_mtime_ns
    digests = []
    for at in range(0, len(LARGE), 4096):
        taken = hasher("xxh3-128")
        taken.update(LARGE[at : at + 4096])
        digests.append(taken.digest())
    assert lines["d/large"].digest == combine("xxh3-128", 4096, digests).hex()
    assert lines["d/large"].chunk_bytes == 4096
    assert bytes.fromhex(lines["\\xffodd\\"].path_hex) == b"\xffodd\\"
    assert lines["d"].kind == lines[""].kind == "directory"
    assert (receipt.files, receipt.directories, receipt.size_bytes) == (3, 2, 5 + len(LARGE))
    assert receipt.started_at <= receipt.ended_at and harness.lines()


def test_the_digest_is_of_the_lines_and_tells_contents_names_and_their_boundaries_apart(harness: Harness) -> None:
    found = set()
    trees = ({"a": b"1"}, {"a": b"2"}, {"b": b"1"}, {"a": {"b": b"1"}}, {"a": b"", "b": b"1"})
    for number, tree in enumerate(trees):
        plant(harness.source / str(number), tree)
        for path in (harness.source / str(number)).rglob("*"):
            os.utime(path, (1, 1))
        receipt = harness.carry(
            [harness.item(source=harness.source / str(number), destination=harness.destination / str(number))]
        )
        lines = (harness.home / "receipts" / f"7.{harness.attempt}.stage_out").read_bytes().splitlines(keepends=True)
        # The first one says where the item went.
        taken = hasher("xxh3-128")
        taken.update(b"".join(lines[1:]))
        assert receipt.digest == f"xxh3-128:{taken.digest().hex()}"
        found.add(receipt.digest)
    assert len(found) == len(trees)


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3"])
def test_every_level_moves_the_same_and_says_which_it_was(harness: Harness, verify: Verify, algorithm: str) -> None:
    plant(harness.source, {"a": b"a", "large": LARGE})
    options = TransferOptions(chunk_bytes=4096, large_bytes=16384, verify=verify, algorithm=algorithm)  # type: ignore[arg-type]
    receipt = harness.carry(options=options)
    assert tree_of(harness.destination) == tree_of(harness.source)
    assert (receipt.verify, receipt.algorithm) == (verify.word, algorithm)
    if verify >= Verify.DIGEST:
        assert {len(line.digest) for line in harness.lines() if line.kind == "file"} == {
            32 if algorithm[0] == "x" else 64
        }


def test_where_the_agents_disk_is_full_the_digest_is_there_and_no_half_of_the_lines(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {"d": {}, "e": {}})
    whole = harness.carry()

    real, room = os.write, [10]

    def full(descriptor: int, data: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    receipt = harness.carry()
    assert (harness.lines(), receipt.digest) == ([], whole.digest)
    monkeypatch.undo()
    assert (harness.home / "receipts" / "7.2.stage_out").read_bytes() == b""


def test_a_failure_says_what_was_moved_and_what_was_not(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(harness.source, {f"f{number:02}": b"x" for number in range(20)})
    (harness.destination / "f10").mkdir()
    with pytest.raises(TransferFailed, match="destination/f10 exists and is a directory") as caught:
        harness.carry(options=TransferOptions(streams=1))
    receipt = caught.value.receipt
    assert receipt is not None and caught.value.item == 0
    assert (receipt.complete, receipt.files + receipt.left_out) == (False, 20)
    assert 0 < len(receipt.left_out_first) <= LEFT_OUT_NAMED_MAX
    assert LeftOut("f10", "not copied") in receipt.left_out_first
    moved = {line.path for line in harness.lines() if line.kind == "file"}
    assert moved == {path.name for path in harness.destination.iterdir() if path.is_file()}


def test_what_is_left_out_of_a_tree_has_a_line_with_its_kind(harness: Harness) -> None:
    plant(harness.source, {"a": b"a", "d": {"b": b"b"}})
    odd(harness.source / "d")
    receipt = harness.carry()
    assert tree_of(harness.destination) == {"a": b"a", "d": None, "d/b": b"b"}
    assert receipt.left_out == 2
    assert receipt.left_out_first == (LeftOut("d/pipe", "a named pipe"), LeftOut("d/socket", "a socket"))
    assert [LeftOut(line.path, line.reason) for line in harness.lines() if line.kind == "left out"] == list(
        receipt.left_out_first
    )
    (harness.source / "link").symlink_to("a")
    skipping = harness.carry([harness.item()._replace(links="skip")])
    assert skipping.left_out_first[-1] == LeftOut("link", "a symbolic link to a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_in_a_tree_is_left_out_and_named(harness: Harness) -> None:
    plant(harness.source, {"a": b"a"})
    try:
        os.mknod(harness.source / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(harness.source / "disk", 0o600 | stat.S_IFBLK, os.makedev(7, 250))
    except PermissionError:
        pytest.skip("no devices may be made here")
    receipt = harness.carry()
    assert tree_of(harness.destination) == {"a": b"a"}
    assert receipt.left_out_first == (LeftOut("disk", "a block device"), LeftOut("null", "a character device"))


def test_a_file_source_beyond_the_limit_is_refused_before_anything_is_copied(harness: Harness) -> None:
    plant(harness.source, {"a": b"a" * 600, "b": b"b" * 425})
    with pytest.raises(TransferFailed, match="need 1025 bytes, the buffer has 1024"):
        harness.carry(options=TransferOptions(limit_bytes=1024))
    assert tree_of(harness.destination) == {}
    assert harness.carry(options=TransferOptions(limit_bytes=1025)).size_bytes == 1025


def odd(directory: Path) -> None:
    """Make a pipe and a socket."""
    os.mkfifo(directory / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "socket"))


def flips(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes((byte ^ 16,)))


def test_a_bit_that_flips_at_rest_is_found_by_the_receipts_wherever_it_is(harness: Harness) -> None:
    plant(harness.source, {"a": b"hello", "d": {"large": LARGE}})
    items = [harness.item()]
    harness.carry(items)
    descriptor = os.open(harness.home / "receipts" / "7.1.stage_out", os.O_RDONLY)
    assert list(recheck(descriptor, items, "xxh3-128")) == []
    for name, paths in (("a", range(5)), ("d/large", (0, 4095, 4096, 20000))):
        path = harness.destination / name
        for at in paths:
            flips(path, at)
            (found,) = recheck(descriptor, items, "xxh3-128")
            assert found.path == str(path) and "instead of" in found.why
            flips(path, at)
    (harness.destination / "a").write_bytes(b"hell")
    (harness.destination / "d" / "large").unlink()
    assert [(found.path, found.why) for found in recheck(descriptor, items, "xxh3-128")] == [
        (str(harness.destination / "a"), "has 4 bytes instead of 5"),
        (str(harness.destination / "d" / "large"), "No such file or directory"),
    ]
    (harness.destination / "a").unlink()
    (harness.destination / "a").symlink_to("/etc/passwd")
    assert ReceiptDifference(
        str(harness.destination / "a"),
        f"{harness.destination}/a is a symbolic link; links are not followed: name the file that it points to",
    ) in list(recheck(descriptor, items, "xxh3-128"))
    os.close(descriptor)


def test_a_damaged_line_is_an_error_that_names_it(harness: Harness) -> None:
    plant(harness.source, {"a": b"a"})
    harness.carry(options=SMALL)
    path = harness.home / "receipts" / "7.1.stage_out"
    path.write_bytes(path.read_bytes()[:-10])
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(ValueError, match="line 3 of the receipts is damaged"):
        list(read_lines(descriptor))
    os.close(descriptor)
