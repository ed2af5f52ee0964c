"""One file on its way: what is copied of it, what is refused by name, and how it takes its name."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.agent.transfer import file_copy, record_paths
from forebay.cluster.agent.transfer.errors import SourceChanged, TransferFailed, TransferPaused, root_cause
from forebay.cluster.agent.transfer.fence import WriterFenced
from forebay.cluster.agent.transfer.options import TransferOptions
from forebay.cluster.agent.transfer.status_table import Flag
from forebay.cluster.system.descriptors import open_directory
from tests.cluster.agent.transfer.harness import TAG, Harness, plant, tree_of


@given(st.lists(st.binary(min_size=1, max_size=4000), min_size=2, max_size=20, unique=True))
def test_temporary_names_are_short_and_never_the_same_for_two_files(paths: list[bytes]) -> None:
    found = [record_paths.part_name(TAG, path) for path in paths]
    assert len(set(found)) == len(paths)
    assert all(len(name) < 100 and name.startswith(b".forebay-7-") and b"/" not in name for name in found)


def test_permissions_and_times_are_kept_and_set_id_bits_are_stripped_with_a_line_in_the_receipt(
    harness: Harness,
) -> None:
    (harness.source / "d").mkdir(mode=0o750)
    for name, size in (("tool", 5), ("large", 20000)):
        path = harness.source / "d" / name
        path.write_bytes(bytes(size))
        path.chmod(0o6751)
        os.utime(path, ns=(10**18 + 1, 10**18 + 5))
    receipt = harness.carry()
    for name in ("tool", "large"):
        status = (harness.destination / "d" / name).stat()
        assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o751, 10**18 + 5)
    assert stat.S_IMODE((harness.destination / "d").stat().st_mode) == 0o750
    assert receipt.stripped == 2
    assert [line.flags for line in harness.lines() if line.kind == "file"] == [("setid_stripped",)] * 2


def test_a_directory_that_was_there_keeps_its_permissions_and_one_that_nobody_may_write_to_is_filled(
    harness: Harness,
) -> None:
    for name in ("there", "made"):
        (harness.source / name).mkdir()
        (harness.source / name / "a").write_bytes(b"a")
        (harness.source / name).chmod(0o555)
    (harness.destination / "there").mkdir(mode=0o711)
    harness.carry()
    assert stat.S_IMODE((harness.destination / "there").stat().st_mode) == 0o711
    assert stat.S_IMODE((harness.destination / "made").stat().st_mode) == 0o755
    assert tree_of(harness.destination) == tree_of(harness.source)


def test_extended_attributes_of_users_are_copied_and_others_are_not(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    for name, size in (("a", 3), ("large", 20000)):
        (harness.source / name).write_bytes(bytes(size))
        try:
            os.setxattr(harness.source / name, "user.origin", b"detector \xff")
        except OSError:
            pytest.skip("the file system of the tests has no extended attributes")
    harness.carry()
    for name in ("a", "large"):
        assert os.getxattr(harness.destination / name, "user.origin") == b"detector \xff"
    harness.carry([harness.item(destination=harness.destination / "x")], TransferOptions(xattrs=False))
    assert os.listxattr(harness.destination / "x" / "a") == []
    harness.close()


def test_attributes_that_the_destination_does_not_take_are_said_to_be_lost(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    (harness.source / "a").write_bytes(b"a")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "listxattr", lambda _: ["user.origin", "security.selinux"])
    monkeypatch.setattr(os, "getxattr", lambda *_: b"x")
    monkeypatch.setattr(os, "setxattr", refuse)
    harness.carry()
    assert [line.flags for line in harness.lines() if line.kind == "file"] == [("xattrs_lost",)]
    assert Flag.XATTRS_LOST


@pytest.mark.parametrize("size", [3, 20000])
@pytest.mark.parametrize("without_the_call", [False, True])
def test_what_may_not_be_replaced_is_refused_by_name_and_stays(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, size: int, without_the_call: bool
) -> None:
    options = TransferOptions(chunk_bytes=4096, large_bytes=16384, replace=False)
    (harness.source / "a").write_bytes(b"n" * size)
    (harness.destination / "a").write_bytes(b"old")
    with pytest.raises(TransferFailed, match="destination/a exists and may not be replaced; remove it") as e:
        harness.carry(options=options)
    assert max(told.bytes_done for told in harness.told) == 0, "it is known before anything is copied"
    assert not isinstance(root_cause(e.value), OSError)
    assert tree_of(harness.destination) == {"a": b"old"}
    # It appears between the look and the rename.
    monkeypatch.setattr(file_copy, "check_target", lambda *_, **__: None)
    for module in ("small_files", "large_file"):
        monkeypatch.setattr(f"forebay.cluster.agent.transfer.{module}.check_target", lambda *_, **__: None)
    if without_the_call:
        monkeypatch.setattr(file_copy, "_libc", _Without())
    with pytest.raises(TransferFailed, match="destination/a exists and may not be replaced"):
        harness.carry(options=options)
    assert tree_of(harness.destination) == {"a": b"old"}
    (harness.destination / "a").unlink()
    assert harness.carry(options=options).files == 1
    assert tree_of(harness.destination) == tree_of(harness.source)


@pytest.mark.parametrize("size", [3, 20000])
def test_a_crash_between_a_second_name_and_the_removal_of_the_first_leaves_no_temporary_file(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    options = TransferOptions(chunk_bytes=4096, large_bytes=16384, replace=False)
    (harness.source / "a").write_bytes(b"n" * size)

    def crash(*_: object, **__: object) -> None:
        raise TransferPaused

    monkeypatch.setattr(file_copy, "_libc", _Without())
    monkeypatch.setattr(os, "unlink", crash)
    with pytest.raises(TransferPaused):
        harness.carry(options=options)
    monkeypatch.undo()
    assert len(harness.parts()) == 1 and (harness.destination / "a").exists()
    assert harness.carry(options=options).resumed_files == 1
    assert tree_of(harness.destination) == tree_of(harness.source)


class _Without:
    """A kernel, or a file system, that cannot rename without replacing."""

    @staticmethod
    def renameat2(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


@pytest.mark.parametrize("kind", ["symbolic link", "named pipe", "directory"])
def test_a_file_only_replaces_a_regular_file(harness: Harness, kind: str) -> None:
    (harness.source / "a").write_bytes(b"a")
    target = harness.destination / "a"
    if kind == "symbolic link":
        target.symlink_to("x")
    elif kind == "named pipe":
        os.mkfifo(target)
    else:
        target.mkdir()
    with pytest.raises(TransferFailed, match=f"destination/a exists and is a {kind}; a file can only replace"):
        harness.carry()
    assert harness.parts() == []


def test_a_directory_is_not_made_where_something_else_is(harness: Harness) -> None:
    (harness.source / "d").mkdir()
    (harness.destination / "d").write_bytes(b"")
    with pytest.raises(TransferFailed, match="destination/d exists and is a regular file, not a directory"):
        harness.carry()


def test_a_source_that_is_written_to_is_seen_by_its_size_its_time_and_its_change_time(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"a")
    directory = open_directory(tmp_path)
    reading, status = file_copy.open_source(directory, b"a", "a")
    file_copy.check_unchanged(reading, status)
    # Somebody who writes and puts the time back.
    source.write_bytes(b"b")
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(SourceChanged):
        file_copy.check_unchanged(reading, status)
    os.close(reading)
    os.close(directory)


@pytest.mark.parametrize("size", [3, 20000])
def test_temporary_files_are_made_in_the_staging_directory_and_one_that_was_taken_away_fences(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    (harness.source / "a").write_bytes(bytes(size))
    staging = harness.destination / ".forebay-staging"
    staging.mkdir()
    descriptor = open_directory(staging)
    names: list[bytes] = []
    real = file_copy.create_part

    def seen(directory: int, part: bytes) -> int:
        assert os.fstat(directory).st_ino == staging.stat().st_ino
        names.append(part)
        return real(directory, part)

    for module in ("small_files", "large_file"):
        monkeypatch.setattr(f"forebay.cluster.agent.transfer.{module}.create_part", seen)
    item = harness.item(staging=descriptor)
    assert harness.carry([item]).files == 1
    assert names and list(staging.iterdir()) == []
    (harness.destination / "a").unlink()
    staging.rmdir()
    with pytest.raises(WriterFenced, match="a newer attempt has taken over .*destination/a"):
        harness.carry([item])
    assert tree_of(harness.destination) == {}
    os.close(descriptor)


def test_a_destination_on_another_file_system_than_the_staging_directory_is_refused_by_name(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {"a": b"a"})

    def across(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "cross-device link")

    monkeypatch.setattr(os, "rename", across)
    with pytest.raises(TransferFailed, match="destination/a is not on the filesystem of the transfer") as caught:
        harness.carry()
    assert not isinstance(root_cause(caught.value), OSError)
