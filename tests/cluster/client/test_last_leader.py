"""The leader that is remembered between commands: a hint that helps, and that nobody can turn into more."""

import os
import stat
from pathlib import Path

import pytest

from forebay.cluster.client.last_leader import DIRECTORY_VARIABLE, RememberedEndpoints
from forebay.cluster.system import Address

A, B, C = (Address("10.0.0.1", 7000 + number) for number in range(3))
CLUSTER = "0123456789abcdef"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "session"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    return directory


def order() -> tuple[Address, ...]:
    return RememberedEndpoints([A, B, C], CLUSTER).order


def test_the_next_command_begins_with_who_led(session: Path) -> None:
    assert order() == (A, B, C)
    RememberedEndpoints([A, B, C], CLUSTER).prefer(C)
    assert order() == (C, A, B)
    (file,) = session.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert RememberedEndpoints([A, B, C], "another").order == (A, B, C)


def test_what_is_known_already_is_not_written_again(session: Path) -> None:
    RememberedEndpoints([A, B, C], CLUSTER).prefer(B)
    (file,) = session.iterdir()
    before = file.stat().st_ino
    RememberedEndpoints([A, B, C], CLUSTER).prefer(B)
    assert file.stat().st_ino == before
    RememberedEndpoints([A, B, C], CLUSTER).prefer(C)
    assert order() == (C, A, B)


@pytest.mark.parametrize("content", [b"", b"10.0.0.9:7000", b"10.0.0.1:7001\nmore", b"\xff\xfe", b"x" * 10_000])
def test_what_is_no_replica_of_the_configuration_is_ignored(session: Path, content: bytes) -> None:
    RememberedEndpoints([A, B, C], CLUSTER).prefer(B)
    (file,) = session.iterdir()
    file.write_bytes(content)
    assert order() == (A, B, C)


@pytest.mark.parametrize("mode", [0o701, 0o770, 0o755, 0o702])
def test_a_directory_that_others_may_enter_is_not_used(session: Path, mode: int) -> None:
    session.chmod(mode)
    RememberedEndpoints([A, B, C], CLUSTER).prefer(B)
    assert not list(session.iterdir()) and order() == (A, B, C)


def test_a_link_is_followed_neither_to_the_directory_nor_to_the_file(
    session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RememberedEndpoints([A, B, C], CLUSTER).prefer(B)
    (file,) = session.iterdir()
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert order() == (A, B, C)
    RememberedEndpoints([A, B, C], CLUSTER).prefer(C)  # takes the link's place
    assert elsewhere.read_text() == str(B) and not file.is_symlink() and order() == (C, A, B)
    link = tmp_path / "link"
    link.symlink_to(session)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(link))
    assert order() == (A, B, C)


def test_a_pipe_in_its_place_holds_nobody_up(session: Path) -> None:
    os.mkfifo(session / f"forebay-{CLUSTER}.leader")
    assert order() == (A, B, C)


@pytest.mark.parametrize("directory", [None, "", "/proc/nowhere", "/dev/null"])
def test_without_a_directory_nothing_is_remembered(directory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if directory is None:
        monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(DIRECTORY_VARIABLE, directory)
    RememberedEndpoints([A, B, C], CLUSTER).prefer(B)
    assert order() == (A, B, C)
