"""Notifications to a service manager, and the watchdog."""

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
    """Socket of a service manager, named by NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_assignments_and_one_line_status_are_sent_in_one_datagram(manager: socket.socket) -> None:
    tell_manager(READY, status="leads\nREADY=0")
    assert manager.recv(200) == b"READY=1\nSTATUS=leads READY=0"


def test_abstract_socket_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"forebay-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        listening.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        tell_manager(READY)
        assert listening.recv(100) == b"READY=1"


def test_notification_never_waits_nor_needs_a_manager(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5_000):  # more than the socket buffer holds
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
def test_watchdog_period_applies_only_to_the_named_process(
    monkeypatch: pytest.MonkeyPatch, period: str, owner: str, expected_s: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", period)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if owner == "mine" else owner)
    assert watchdog_s() == expected_s


@story
async def test_watchdog_notifies_only_while_the_process_is_healthy(
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
async def test_health_is_not_checked_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    looks: list[None] = []
    watchdog = Watchdog(lambda: looks.append(None) is None)
    watchdog.start()
    for _ in range(3):
        await asyncio.sleep(0)
    await watchdog.stop()
    assert looks == []


def test_unit_starts_the_process_where_the_packages_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_manager, "SYSTEMD", str(tmp_path))
    assert start_command("replica", "r4") == "forebay run replica --name r4"
    monkeypatch.setattr(sys, "prefix", APPLICATION)
    assert start_command("replica", "r4") == "systemctl enable --now forebay-controller@r4"
    assert start_command("agent", "n1") == "systemctl enable --now forebay-agent@n1"
    monkeypatch.setattr(service_manager, "SYSTEMD", str(tmp_path / "other"))
    assert start_command("agent", "n1") == "forebay run agent --name n1"
