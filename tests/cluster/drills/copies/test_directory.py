"""Directories of copies are private, removed at the end, and cleaned up by the next copy after a kill."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cluster.drills.copies.directory import PREFIX, private_directory, remove_left_over


def test_a_copy_directory_is_private_and_always_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), private_directory(tmp_path) as (directory, _):
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text("x")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_by_any_lock_holder_is_kept(tmp_path: Path) -> None:
    with private_directory(tmp_path) as (directory, lock):
        assert remove_left_over(tmp_path) == 0 and directory.exists()
        command = (sys.executable, "-c", "import sys; sys.stdin.read()")
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(lock,))
        kept = tmp_path / f"{PREFIX}kept"
        directory.rename(kept)
    assert kept.exists() and remove_left_over(tmp_path) == 0 and kept.exists(), "its child lives"
    child.communicate()
    assert remove_left_over(tmp_path) == 1 and list(tmp_path.iterdir()) == []


def test_directories_of_other_accounts_are_kept(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").write_text("x")
    shared = tmp_path / f"{PREFIX}shared"
    shared.mkdir()
    shared.chmod(0o755)
    (tmp_path / "other").mkdir(mode=0o700)
    assert remove_left_over(tmp_path) == 0
    assert len(os.listdir(tmp_path)) == 5
    shared.chmod(0o700)
    assert remove_left_over(tmp_path) == 1 and not shared.exists()
