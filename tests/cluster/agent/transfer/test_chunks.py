"""Large files: chunks by threads, past the page cache or through it, holes, clones, and what breaks on the way."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import xxhash

from forebay.cluster.agent.files import kernel
from forebay.cluster.agent.transfer import large_file
from forebay.cluster.agent.transfer.digests import combine
from forebay.cluster.agent.transfer.errors import TransferFailed, root_cause
from forebay.cluster.agent.transfer.large_file import ChunkCopy
from forebay.cluster.agent.transfer.options import ItemKind, TransferOptions, Verify
from tests.cluster.agent.transfer.harness import SMALL, Harness

CHUNK_BYTES = 8192


def options_of(**others: object) -> TransferOptions:
    """Return options under which files of 16 KiB are large."""
    given = {"chunk_bytes": CHUNK_BYTES, "large_bytes": 16384, **others}
    return TransferOptions(**given)  # type: ignore[arg-type]


def pattern(size_bytes: int) -> bytes:
    """Return bytes of which no two pages are alike."""
    return b"".join(number.to_bytes(8, "big") for number in range(-(-size_bytes // 8)))[:size_bytes]


def digest_in_chunks(data: bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Return a large file's digest, from its definition."""
    parts = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    return combine("xxh3-128", chunk_bytes, [xxhash.xxh3_128_digest(part) for part in parts])


def carried(harness: Harness, data: bytes, options: TransferOptions) -> Path:
    """Carry one file of these bytes; return the destination."""
    (harness.source / "f").write_bytes(data)
    harness.carry([harness.item(ItemKind.FILE, harness.source / "f", harness.destination / "f")], options)
    return harness.destination / "f"


@pytest.fixture
def disk(tmp_path: Path) -> Harness:
    """Give a harness where temporary files usually are: on a disk, most likely."""
    return Harness(tmp_path)


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("past_the_cache", [True, False])
def test_a_large_file_arrives_whole_with_the_digest_of_its_chunks_whatever_its_length(
    disk: Harness, monkeypatch: pytest.MonkeyPatch, streams: int, past_the_cache: bool
) -> None:
    if not past_the_cache:
        monkeypatch.setattr(large_file, "open_direct", lambda *_: None)
    monkeypatch.setattr(large_file, "BLOCK_BYTES", 4096)
    for size_bytes in (16384, 16385, 16384 + 4095, 5 * CHUNK_BYTES - 1, 5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 513):
        data = pattern(size_bytes)
        found = carried(disk, data, options_of(streams=streams))
        assert found.read_bytes() == data
        assert disk.lines()[0].digest == digest_in_chunks(data).hex()


def test_a_file_system_that_refuses_writes_past_the_cache_gets_them_through_it(
    disk: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct: list[int] = []
    really_open, really_write = kernel.open_direct, os.pwrite

    def opened(directory: int, name: bytes, writing: int) -> int | None:
        found = really_open(directory, name, writing)
        if found is None:
            found = os.dup(writing)
        direct.append(found)
        return found

    def refuse(descriptor: int, data: bytes, at: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "not like this")
        return really_write(descriptor, data, at)

    monkeypatch.setattr(large_file, "open_direct", opened)
    monkeypatch.setattr(os, "pwrite", refuse)
    data = pattern(5 * CHUNK_BYTES + 100)
    assert carried(disk, data, options_of()).read_bytes() == data
    assert direct


def test_holes_stay_holes_and_the_digest_is_that_of_the_bytes(disk: Harness) -> None:
    size_bytes = 64 * 1024 * 1024
    options = TransferOptions(chunk_bytes=1024 * 1024, large_bytes=16384)
    source = disk.source / "f"
    with source.open("wb") as file:
        for at in (0, 5 * 1024 * 1024 + 4096, size_bytes - 10):
            file.seek(at)
            file.write(b"here I am"[: size_bytes - at])
        file.truncate(size_bytes)
    receipt = disk.carry([disk.item(ItemKind.FILE, source, disk.destination / "f")], options)
    found = disk.destination / "f"
    assert found.read_bytes() == source.read_bytes()
    assert found.stat().st_blocks * 512 <= source.stat().st_blocks * 512 + 65536
    assert receipt.size_bytes == size_bytes and receipt.written_bytes < 1024 * 1024
    assert disk.lines()[0].digest == digest_in_chunks(source.read_bytes(), 1024 * 1024).hex()


def test_a_file_of_nothing_but_holes_takes_no_time_for_its_length(disk: Harness) -> None:
    source = disk.source / "f"
    source.touch()
    os.truncate(source, 64 * 1024**3)
    receipt = disk.carry([disk.item(ItemKind.FILE, source, disk.destination / "f")], TransferOptions())
    assert receipt.written_bytes == 0 and receipt.size_bytes == 64 * 1024**3
    assert (disk.destination / "f").stat().st_blocks == 0


@pytest.mark.parametrize("verify", list(Verify))
def test_shared_blocks_are_digested_where_they_were_put_and_nowhere_else(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, verify: Verify
) -> None:
    def clone(reading: int, writing: int) -> bool:
        os.pwrite(writing, os.pread(reading, 1 << 20, 0), 0)
        return True

    monkeypatch.setattr(large_file, "clone", clone)
    data = pattern(5 * CHUNK_BYTES + 7)
    assert carried(harness, data, options_of(verify=verify)).read_bytes() == data
    [line] = harness.lines()
    assert "reflinked" in line.flags
    assert line.digest == ("" if verify < Verify.DIGEST else digest_in_chunks(data).hex())

    def wrong(reading: int, writing: int) -> bool:
        clone(reading, writing)
        os.pwrite(writing, b"!", 100)
        return True

    monkeypatch.setattr(large_file, "clone", wrong)
    carried(harness, pattern(6 * CHUNK_BYTES), options_of(verify=verify))
    assert harness.lines()[0].digest != digest_in_chunks(pattern(6 * CHUNK_BYTES)).hex()


@pytest.mark.parametrize("verify", list(Verify))
def test_a_file_server_copies_by_itself_only_where_no_digest_is_wanted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, verify: Verify
) -> None:
    monkeypatch.setattr(large_file, "is_local", lambda _: False)
    data = pattern(5 * CHUNK_BYTES + 7)
    assert carried(harness, data, options_of(verify=verify)).read_bytes() == data
    [line] = harness.lines()
    assert ("kernel_copied" in line.flags) is (verify < Verify.DIGEST)
    assert bool(line.digest) is (verify >= Verify.DIGEST)


def test_where_the_kernel_does_not_copy_the_bytes_are_read_and_written(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "not between these")

    monkeypatch.setattr(large_file, "is_local", lambda _: False)
    monkeypatch.setattr(os, "copy_file_range", refuse)
    data = pattern(5 * CHUNK_BYTES + 7)
    assert carried(harness, data, options_of(verify=Verify.SIZE)).read_bytes() == data
    assert "kernel_copied" not in harness.lines()[0].flags


@pytest.mark.parametrize("number", range(5))
def test_a_chunk_that_storage_gives_back_wrong_is_written_again_and_then_right(
    disk: Harness, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    really, flips = ChunkCopy._write, iter([True])

    def flip(pouring: ChunkCopy, data: memoryview, at: int) -> None:
        if at == number * CHUNK_BYTES and next(flips, False):
            data = memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))
        really(pouring, data, at)

    monkeypatch.setattr(ChunkCopy, "_write", flip)
    data = pattern(5 * CHUNK_BYTES)
    (disk.source / "f").write_bytes(data)
    item = disk.item(ItemKind.FILE, disk.source / "f", disk.destination / "f")
    receipt = disk.carry([item], options_of(verify=Verify.READ_BACK))
    assert (disk.destination / "f").read_bytes() == data
    assert receipt.retries == 1 and next(flips, None) is None


def test_a_failed_sync_leaves_nothing_that_is_believed_later(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.fsync

    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part"):
            raise OSError(errno.EIO, "Input/output error")
        really(descriptor)

    data = pattern(5 * CHUNK_BYTES)
    with monkeypatch.context() as broken:
        broken.setattr(large_file.os, "fsync", fail)
        with pytest.raises(TransferFailed, match="Input/output error") as raised:
            carried(harness, data, options_of())
    cause = root_cause(raised.value)
    assert isinstance(cause, OSError) and cause.errno == errno.EIO
    assert not (harness.destination / "f").exists()
    receipt = harness.carry(
        [harness.item(ItemKind.FILE, harness.source / "f", harness.destination / "f")], options_of()
    )
    assert receipt.resumed_bytes == 0 and (harness.destination / "f").read_bytes() == data


def test_what_ends_one_stream_ends_all_and_is_raised_where_it_is_waited_for(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.preadv

    def fail(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if at >= 3 * CHUNK_BYTES:
            raise OSError(errno.EIO, "Input/output error")
        return really(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TransferFailed, match="Input/output error"):
        carried(harness, pattern(50 * CHUNK_BYTES), options_of(streams=4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stream-")]


def test_without_threads_the_chunks_are_moved_one_after_the_other(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    data = pattern(5 * CHUNK_BYTES + 1)
    assert carried(harness, data, options_of()).read_bytes() == data


def test_room_that_is_not_there_is_known_before_anything_is_copied(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int, size_bytes: int) -> None:
        assert size_bytes == 5 * CHUNK_BYTES
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(large_file, "allocate", full)
    with pytest.raises(TransferFailed, match="No space left on device"):
        carried(harness, pattern(5 * CHUNK_BYTES), options_of())
    assert max((told.bytes_done for told in harness.told), default=0) == 0
    assert harness.parts() == []


def test_blocks_are_reserved_where_the_file_system_can_and_elsewhere_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "f").open("wb") as file:
        kernel.allocate(file.fileno(), 1024 * 1024)
        assert os.fstat(file.fileno()).st_size in (0, 1024 * 1024)

        def cannot(*_: object) -> int:
            kernel.ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

        monkeypatch.setattr(kernel, "_libc", type("Libc", (), {"fallocate": staticmethod(cannot)}))
        kernel.allocate(file.fileno(), 2 * 1024 * 1024)
        assert os.fstat(file.fileno()).st_size <= 1024 * 1024
    assert SMALL.chunk_bytes == 4096
