"""What is told to a service manager, and when the watchdog is silent."""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cluster.system import service_manager
from forebay.cluster.system.eventloop.watchdog import Watchdog
from forebay.cluster.system.service_manager import ALIVE, APPLICATION, READY, start_command, tell_manager, watchdog_s
from tests.cluster.harness import story


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A service manager's socket, that NOTIFY_SOCKET names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_assignments_and_status_go_in_one_datagram_and_a_status_is_one_line(manager: socket.socket) -> None:
    tell_manager(READY, status="leads\nREADY=0")
    assert manager.recv(200) == b"READY=1\nSTATUS=leads READY=0"


def test_an_abstract_socket_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"forebay-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        listening.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        tell_manager(READY)
        assert listening.recv(100) == b"READY=1"


def test_nobody_is_told_where_nobody_listens_or_reads(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5_000):  # more than a socket holds: nothing waits
        tell_manager(READY)
    manager.close()
    tell_manager(READY)
    monkeypatch.setenv("NOTIFY_SOCKET", "/proc/nowhere/notify")
    tell_manager(READY)
    monkeypatch.delenv("NOTIFY_SOCKET")
    tell_manager(READY)


@pytest.mark.parametrize(
    ("period", "owner", "expected_s"),
    [
        ("30000000", "", 30.0),
        ("500000", "mine", 0.5),
        ("500000", "1", None),
        ("0", "", None),
        ("", "", None),
        ("-5", "", None),
        ("soon", "", None),
    ],
)
def test_the_period_is_that_of_the_process_it_is_meant_for(
    monkeypatch: pytest.MonkeyPatch, period: str, owner: str, expected_s: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", period)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if owner == "mine" else owner)
    assert watchdog_s() == expected_s


@story
async def test_a_watchdog_tells_for_as_long_as_the_process_is_sound(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    looks = 0
    told = asyncio.Event()

    def is_sound() -> bool:
        nonlocal looks
        looks += 1
        if looks == 6:
            told.set()
        return looks <= 3

    watchdog = Watchdog(is_sound, lambda: "leads")
    watchdog.start()
    await told.wait()
    await watchdog.stop()
    heard = [manager.recv(100) for _ in range(3)]
    assert heard == [f"{ALIVE}\nSTATUS=leads".encode()] * 3
    with pytest.raises(BlockingIOError):
        manager.recv(100)


@story
async def test_nobody_is_looked_at_where_no_watchdog_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    looks: list[None] = []
    watchdog = Watchdog(lambda: looks.append(None) is None)
    watchdog.start()
    for _ in range(3):
        await asyncio.sleep(0)
    await watchdog.stop()
    assert looks == []


def test_a_process_is_started_by_its_unit_where_the_packages_are_installed_under_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_manager, "SYSTEMD", str(tmp_path))
    assert start_command("replica", "r4") == "forebay run replica --name r4"
    monkeypatch.setattr(sys, "prefix", APPLICATION)
    assert start_command("replica", "r4") == "systemctl enable --now forebay-controller@r4"
    assert start_command("agent", "n1") == "systemctl enable --now forebay-agent@n1"
    monkeypatch.setattr(service_manager, "SYSTEMD", str(tmp_path / "other"))
    assert start_command("agent", "n1") == "forebay run agent --name n1"
