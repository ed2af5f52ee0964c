"""Directories: they keep what files keep, the top of a tree among them, and the receipt says what they did not take."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import pytest

from tests.cluster.agent.transfer.harness import Harness, plant


def like(path: Path) -> tuple[int, int]:
    """Return what a directory is compared by."""
    status = path.stat()
    return stat.S_IMODE(status.st_mode), status.st_mtime_ns


def dressed(path: Path, mode: int, mtime_ns: int) -> None:
    """Give a directory a mode and a time."""
    os.utime(path, ns=(1, mtime_ns))
    path.chmod(mode)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o1777, 0o2770, 0o3711])
def test_a_tree_arrives_with_the_modes_and_times_of_its_directories_whatever_is_in_them(
    harness: Harness, mode: int
) -> None:
    plant(harness.source, {"a": b"a", "d": {"e": {"f": b"f"}, "many": {str(number): b"x" for number in range(80)}}})
    (harness.source / "d" / "link").symlink_to("e")
    for number, path in enumerate(("d/many", "d/e", "d", ".")):
        dressed(harness.source / path, mode, 10**18 + number)
    arrived = harness.directory / "new" / "tree"
    receipt = harness.carry([harness.item(destination=arrived)])
    for path in (".", "d", "d/e", "d/many"):
        assert like(arrived / path) == like(harness.source / path), path
    assert (receipt.directories, receipt.stripped) == (4, 0)
    assert harness.told[-1].directories_done == 4


def test_a_directory_that_was_there_keeps_what_it_had_and_the_receipt_says_so(harness: Harness) -> None:
    plant(harness.source, {"d": {"a": b"a"}})
    (harness.source / "d").chmod(0o700)
    plant(harness.destination, {"d": {}})
    (harness.destination / "d").chmod(0o751)
    harness.carry()
    assert stat.S_IMODE((harness.destination / "d").stat().st_mode) == 0o751
    assert [line.flags for line in harness.lines() if line.kind == "directory"] == [("was_there",), ("was_there",)]


def test_a_directory_that_an_attempt_made_is_the_next_ones_to_finish(harness: Harness) -> None:
    plant(harness.source, {"d": {"a": b"a"}})
    dressed(harness.source / "d", 0o711, 77)
    dressed(harness.source, 0o701, 78)
    arrived = harness.directory / "tree"
    with harness.workspace() as workspace:
        # As an attempt that was killed between its note and the rest of its life.
        workspace.note_made(os.fsencode(arrived))
    arrived.mkdir(mode=0o700)
    harness.carry([harness.item(destination=arrived)])
    assert like(arrived) == (0o701, 78) and like(arrived / "d") == (0o711, 77)


def test_attributes_of_directories_are_kept_where_files_keep_theirs(harness: Harness) -> None:
    plant(harness.source, {"d": {}})
    try:
        os.setxattr(harness.source / "d", "user.note", b"mine")
    except OSError:
        pytest.skip("this file system has no attributes of users")
    harness.carry()
    assert os.getxattr(harness.destination / "d", "user.note") == b"mine"
    assert [line.flags for line in harness.lines() if line.path == "d"] == [("xattrs",)]


def test_the_group_that_a_directory_above_passes_on_stays_passed_on(harness: Harness) -> None:
    plant(harness.source, {"d": {}})
    harness.destination.chmod(0o2755)
    harness.carry([harness.item(destination=harness.destination / "tree")])
    assert (harness.destination / "tree" / "d").stat().st_mode & stat.S_ISGID


ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


def access_list(*, group: int, bob: int) -> bytes:
    """Return an access list (posix_acl_xattr.h) that grants the owner all, one more user what `bob` says."""
    nobody = 0xFFFFFFFF
    rows = ((1, 7, nobody), (2, bob, 4242), (4, group, nobody), (0x10, 7, nobody), (0x20, 0, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)


def listed(harness: Harness, *paths: str) -> None:
    """Give files and directories of the source access lists."""
    for path in paths:
        try:
            os.setxattr(harness.source / path, ACCESS, access_list(group=0, bob=6))
            if (harness.source / path).is_dir():
                os.setxattr(harness.source / path, DEFAULT, access_list(group=4, bob=4))
        except OSError:
            pytest.skip("this file system has no access lists")


def test_access_lists_are_copied_where_that_is_asked(harness: Harness) -> None:
    plant(harness.source, {"d": {"small": b"a", "large": bytes(20_000)}})
    listed(harness, "d", "d/small", "d/large")
    harness.carry([harness.item()._replace(acls=True)])
    for path in ("d", "d/small", "d/large"):
        assert os.getxattr(harness.destination / path, ACCESS) == access_list(group=0, bob=6), path
        assert like(harness.destination / path) == like(harness.source / path)
    assert os.getxattr(harness.destination / "d", DEFAULT) == access_list(group=4, bob=4)
    assert not any("acls_lost" in line.flags for line in harness.lines())


def test_a_group_that_an_access_list_kept_out_stays_out_where_the_list_is_not_copied(harness: Harness) -> None:
    plant(harness.source, {"d": {"small": b"a", "large": bytes(20_000)}})
    listed(harness, "d", "d/small", "d/large")
    harness.carry()
    for path in ("d", "d/small", "d/large"):
        # The mode of the source shows what the list grants at most, as the bits of the group.
        assert stat.S_IMODE((harness.source / path).stat().st_mode) == 0o770
        assert stat.S_IMODE((harness.destination / path).stat().st_mode) == 0o700, path
        assert ACCESS not in os.listxattr(harness.destination / path)
    assert [line.path for line in harness.lines() if "acls_lost" in line.flags] == ["d", "d/large", "d/small"]


def test_attributes_of_a_file_that_its_owner_may_not_write_are_kept(harness: Harness) -> None:
    plant(harness.source, {"a": b"a"})
    try:
        os.setxattr(harness.source / "a", "user.note", b"mine")
    except OSError:
        pytest.skip("this file system has no attributes of users")
    (harness.source / "a").chmod(0o444)
    harness.carry()
    assert os.getxattr(harness.destination / "a", "user.note") == b"mine"
    assert stat.S_IMODE((harness.destination / "a").stat().st_mode) == 0o444
