"""Files of the product are private to their owner, with any umask and beside any foreign files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cluster.cli.files import write_whole
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.system import SystemClock, make_private_directory, name_beside, new_private_file, replace_private


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct, autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(top: Path) -> dict[str, int]:
    """Return the mode of every file below a directory."""
    return {str(path.relative_to(top)): stat.S_IMODE(path.lstat().st_mode) for path in top.rglob("*")}


def test_files_and_directories_are_private(tmp_path: Path) -> None:
    make_private_directory(tmp_path / "a" / "b")
    make_private_directory(tmp_path / "a" / "b")
    replace_private(tmp_path / "a" / "b" / "state", b"x")
    replace_private(tmp_path / "a" / "cache", b"x", durable=False)
    with new_private_file(tmp_path / "a" / "new") as file:
        file.write(b"x")
    write_whole(tmp_path / "report.html", b"x")
    private = {"a/b/state": 0o600, "a/cache": 0o600, "a/new": 0o600, "report.html": 0o600}
    assert modes(tmp_path) == {"a": 0o700, "a/b": 0o700} | private


def test_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private_directory(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_new_site_shows_others_only_certificates(tmp_path: Path) -> None:
    create_site(tmp_path / "site", Founding(), clock=SystemClock())
    seen = modes(tmp_path)
    assert "site/forebay.toml" in seen
    readable = {name for name, mode in seen.items() if mode & 0o077}
    assert all(name.endswith(".pem") for name in readable)


def test_temporary_name_is_different_each_time(tmp_path: Path) -> None:
    assert len({name_beside(tmp_path / "state") for _ in range(100)}) == 100


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    theirs, state = tmp_path / "theirs", tmp_path / "state"
    theirs.write_bytes(b"before")
    state.symlink_to(theirs)
    with pytest.raises(FileExistsError), new_private_file(state):
        pass
    replace_private(state, b"after")
    assert theirs.read_bytes() == b"before" and state.read_bytes() == b"after" and not state.is_symlink()


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.write_bytes(b"before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_private(state, b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["state"] and state.read_bytes() == b"before"
