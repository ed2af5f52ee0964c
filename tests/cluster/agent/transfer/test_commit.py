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

from cluster.agent.transfer import file_copy, record_paths
from cluster.agent.transfer.errors import Paused, SourceChanged, TransferFailed, root_cause
from cluster.agent.transfer.fence import Fenced
from cluster.agent.transfer.options import Kind, Options
from cluster.agent.transfer.status_table import Flag
from cluster.system.descriptors import open_directory
from tests.cluster.agent.transfer.rig import SMALL, TAG, Rig, plant, tree_of


@given(st.lists(st.binary(min_size=1, max_size=4000), min_size=2, max_size=20, unique=True))
def test_temporary_names_are_short_and_never_the_same_for_two_files(paths: list[bytes]) -> None:
    found = [record_paths.part_name(TAG, path) for path in paths]
    assert len(set(found)) == len(paths)
    assert all(len(name) < 100 and name.startswith(b".forebay-7-") and b"/" not in name for name in found)


def test_permissions_and_times_are_kept_and_set_id_bits_are_stripped_with_a_line_in_the_receipt(rig: Rig) -> None:
    (rig.source / "d").mkdir(mode=0o750)
    for name, size in (("tool", 5), ("large", 20000)):
        path = rig.source / "d" / name
        path.write_bytes(bytes(size))
        path.chmod(0o6751)
        os.utime(path, ns=(10**18 + 1, 10**18 + 5))
    receipt = rig.carry()
    for name in ("tool", "large"):
        status = (rig.destination / "d" / name).stat()
        assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o751, 10**18 + 5)
    assert stat.S_IMODE((rig.destination / "d").stat().st_mode) == 0o750
    assert receipt.stripped == 2
    assert [line.flags for line in rig.lines() if line.kind == "file"] == [("setid_stripped",)] * 2


def test_a_directory_that_was_there_keeps_its_permissions_and_one_that_nobody_may_write_to_is_filled(rig: Rig) -> None:
    for name in ("there", "made"):
        (rig.source / name).mkdir()
        (rig.source / name / "a").write_bytes(b"a")
        (rig.source / name).chmod(0o555)
    (rig.destination / "there").mkdir(mode=0o711)
    rig.carry()
    assert stat.S_IMODE((rig.destination / "there").stat().st_mode) == 0o711
    assert stat.S_IMODE((rig.destination / "made").stat().st_mode) == 0o755
    assert tree_of(rig.destination) == tree_of(rig.source)


def test_extended_attributes_of_users_are_copied_and_others_are_not(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for name, size in (("a", 3), ("large", 20000)):
        (rig.source / name).write_bytes(bytes(size))
        try:
            os.setxattr(rig.source / name, "user.origin", b"detector \xff")
        except OSError:
            pytest.skip("the file system of the tests has no extended attributes")
    rig.carry()
    for name in ("a", "large"):
        assert os.getxattr(rig.destination / name, "user.origin") == b"detector \xff"
    rig.carry([rig.item(destination=rig.destination / "x")], Options(xattrs=False))
    assert os.listxattr(rig.destination / "x" / "a") == []
    rig.close()


def test_attributes_that_the_destination_does_not_take_are_said_to_be_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rig.source / "a").write_bytes(b"a")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "listxattr", lambda _: ["user.origin", "security.selinux"])
    monkeypatch.setattr(os, "getxattr", lambda *_: b"x")
    monkeypatch.setattr(os, "setxattr", refuse)
    rig.carry()
    assert [line.flags for line in rig.lines() if line.kind == "file"] == [("xattrs_lost",)]
    assert Flag.XATTRS_LOST


@pytest.mark.parametrize("size", [3, 20000])
@pytest.mark.parametrize("without_the_call", [False, True])
def test_what_may_not_be_replaced_is_refused_by_name_and_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size: int, without_the_call: bool
) -> None:
    options = Options(chunk_bytes=4096, large_bytes=16384, replace=False)
    (rig.source / "a").write_bytes(b"n" * size)
    (rig.destination / "a").write_bytes(b"old")
    with pytest.raises(TransferFailed, match="destination/a exists already and is not to be replaced; remove it") as e:
        rig.carry(options=options)
    assert max(told.bytes_done for told in rig.told) == 0, "it is known before anything is copied"
    assert not isinstance(root_cause(e.value), OSError)
    assert tree_of(rig.destination) == {"a": b"old"}
    # It appears between the look and the rename.
    monkeypatch.setattr(file_copy, "check_target", lambda *_, **__: None)
    for module in ("small", "large"):
        monkeypatch.setattr(f"cluster.agent.transfer.{module}.check_target", lambda *_, **__: None)
    if without_the_call:
        monkeypatch.setattr(file_copy, "_libc", _Without())
    with pytest.raises(TransferFailed, match="destination/a exists already"):
        rig.carry(options=options)
    assert tree_of(rig.destination) == {"a": b"old"}
    (rig.destination / "a").unlink()
    assert rig.carry(options=options).files == 1
    assert tree_of(rig.destination) == tree_of(rig.source)


@pytest.mark.parametrize("size", [3, 20000])
def test_a_crash_between_a_second_name_and_the_removal_of_the_first_leaves_no_temporary_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    options = Options(chunk_bytes=4096, large_bytes=16384, replace=False)
    (rig.source / "a").write_bytes(b"n" * size)

    def crash(*_: object, **__: object) -> None:
        raise Paused

    monkeypatch.setattr(file_copy, "_libc", _Without())
    monkeypatch.setattr(os, "unlink", crash)
    with pytest.raises(Paused):
        rig.carry(options=options)
    monkeypatch.undo()
    assert len(rig.parts()) == 1 and (rig.destination / "a").exists()
    assert rig.carry(options=options).resumed_files == 1
    assert tree_of(rig.destination) == tree_of(rig.source)


class _Without:
    """A kernel, or a file system, that cannot rename without replacing."""

    @staticmethod
    def renameat2(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


@pytest.mark.parametrize("kind", ["symbolic link", "named pipe", "directory"])
def test_a_file_only_replaces_a_regular_file(rig: Rig, kind: str) -> None:
    (rig.source / "a").write_bytes(b"a")
    target = rig.destination / "a"
    if kind == "symbolic link":
        target.symlink_to("x")
    elif kind == "named pipe":
        os.mkfifo(target)
    else:
        target.mkdir()
    with pytest.raises(TransferFailed, match=f"destination/a exists and is a {kind}; a file can only replace"):
        rig.carry()
    assert rig.parts() == []


def test_a_directory_is_not_made_where_something_else_is(rig: Rig) -> None:
    (rig.source / "d").mkdir()
    (rig.destination / "d").write_bytes(b"")
    with pytest.raises(TransferFailed, match="destination/d exists and is a regular file, not a directory"):
        rig.carry()


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
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    (rig.source / "a").write_bytes(bytes(size))
    staging = rig.destination / ".forebay-staging"
    staging.mkdir()
    descriptor = open_directory(staging)
    names: list[bytes] = []
    real = file_copy.create_part

    def seen(directory: int, part: bytes) -> int:
        assert os.fstat(directory).st_ino == staging.stat().st_ino
        names.append(part)
        return real(directory, part)

    for module in ("small", "large"):
        monkeypatch.setattr(f"cluster.agent.transfer.{module}.create_part", seen)
    item = rig.item(staging=descriptor)
    assert rig.carry([item]).files == 1
    assert names and list(staging.iterdir()) == []
    (rig.destination / "a").unlink()
    staging.rmdir()
    with pytest.raises(Fenced, match="a newer attempt has taken over .*destination/a"):
        rig.carry([item])
    assert tree_of(rig.destination) == {}
    os.close(descriptor)


def test_a_destination_on_another_file_system_than_the_staging_directory_is_refused_by_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(rig.source, {"a": b"a"})

    def across(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "cross-device link")

    monkeypatch.setattr(os, "rename", across)
    with pytest.raises(TransferFailed, match="destination/a lies on another file system") as caught:
        rig.carry()
    assert not isinstance(root_cause(caught.value), OSError)


def test_two_items_may_go_to_one_file_and_it_is_one_of_them_whole(rig: Rig) -> None:
    plant(rig.source, {"a": b"a" * 100, "b": b"b" * 200})
    items = [rig.item(Kind.FILE, rig.source / name, rig.destination / "c") for name in "ab"]
    rig.carry(items, SMALL)
    assert (rig.destination / "c").read_bytes() in (b"a" * 100, b"b" * 200)
    assert rig.parts() == []
