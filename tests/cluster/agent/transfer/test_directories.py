"""Directories: they keep what files keep, the top of a tree among them, and the receipt says what they did not take."""

from __future__ import annotations

import os
import stat
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
