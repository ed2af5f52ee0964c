"""A child is kept running and connected, ends with its parent, and cannot harm the parent when it misbehaves."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from forebay.cluster.ipc import ChildSocket, FrameCodec, FrameConnection, RestartDelays, SupervisedProcess, connection
from forebay.cluster.system.processes import start_time
from tests.cluster.harness import story, until
from tests.cluster.ipc.frames import BYTES_MAX, Said
from tests.repo.tree import ROOT

CODEC = FrameCodec[Said, Said](Said, bytes_max=BYTES_MAX)
SOON = RestartDelays(first_s=0.01, most_s=0.02)


class Link(FrameConnection[Said, Said]):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(CODEC, "the echo")
        self.heard = heard

    def receive(self, frame: Said) -> None:
        self.heard.append(frame.text)


def child(behaviour: str, heard: list[str], **more: Any) -> SupervisedProcess:
    return SupervisedProcess(
        "the echo",
        "tests.cluster.ipc.echo",
        lambda: Link(heard),
        arguments=lambda: [behaviour],
        delays=SOON,
        **more,
    )


def is_there(pid: int) -> bool:
    return start_time(pid) is not None  # the process that adopts the child may not reap it


def test_child_without_an_event_loop_detects_the_end_of_its_parent() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        end = ChildSocket(ours, CODEC)
        assert not end.is_readable()
        with theirs:
            theirs.sendall(CODEC.encode(Said("one")) + CODEC.encode(Said("two")))
            assert [said.text for said in end.receive()] == ["one", "two"]
        assert end.is_readable()
        with pytest.raises(EOFError):
            end.receive()


@story
async def test_frames_arrive_in_order_and_are_answered() -> None:
    heard: list[str] = []
    echo = child("plain", heard)
    echo.start()
    await until(lambda: echo.link is not None)
    assert echo.link is not None
    for number in range(300):
        echo.link.send(Said(str(number)))
    echo.link.send(Said("x" * (BYTES_MAX - 100)))
    await until(lambda: len(heard) == 301)
    assert heard[:300] == [f"plain: {number}" for number in range(300)]
    assert heard[300] == "plain: " + "x" * (BYTES_MAX - 100)
    await echo.stop()


@story
async def test_frame_that_the_peer_would_reject_is_not_sent() -> None:
    heard: list[str] = []
    echo = child("plain", heard)
    echo.start()
    await until(lambda: echo.link is not None)
    assert echo.link is not None
    with pytest.raises(ValueError, match="at most"):
        echo.link.send(Said("x" * BYTES_MAX))
    echo.link.send(Said("small"))
    await until(lambda: heard == ["plain: small"])
    await echo.stop()


@story
async def test_killed_child_is_restarted() -> None:
    heard: list[str] = []
    echo = child("plain", heard)
    echo.start()
    await until(lambda: echo.link is not None)
    first = echo.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: echo.link is not None and echo.pid != first)
    assert echo.link is not None
    echo.link.send(Said("again"))
    await until(lambda: heard == ["plain: again"])
    assert echo.started == 2
    await echo.stop()


@pytest.mark.parametrize("stop_signal", [None, signal.SIGTERM])
@story
async def test_stopped_child_ends_and_is_not_restarted(stop_signal: signal.Signals | None) -> None:
    echo = child("plain", [], stop_signal=stop_signal)
    echo.start()
    await until(lambda: echo.link is not None)
    pid = echo.pid
    assert pid is not None
    await echo.stop()
    await asyncio.sleep(0.1)
    assert not is_there(pid) and echo.pid is None and echo.started == 1


@story
async def test_child_that_does_not_stop_is_killed() -> None:
    echo = child("lingers", [], stop_s=0.2)
    echo.start()
    await until(lambda: echo.link is not None)
    pid = echo.pid
    assert pid is not None
    await echo.stop()
    assert not is_there(pid)


@story
async def test_child_with_invalid_output_is_disconnected_and_restarted() -> None:
    echo = child("garbles", [])
    echo.start()
    await until(lambda: echo.started == 3)
    await echo.stop()


@story
async def test_callback_decides_whether_an_ended_child_restarts() -> None:
    endings: list[tuple[int | str, float]] = []

    def judge(ending: int | str, delay_s: float) -> float | None:
        endings.append((ending, delay_s))
        return None if len(endings) == 3 else delay_s

    echo = child("ends", [], judge=judge)
    echo.start()
    await until(lambda: len(endings) == 3)
    await asyncio.sleep(0.1)
    assert endings == [(7, 0.01), (7, 0.02), (7, 0.02)] and echo.started == 3
    await echo.stop()


@story
async def test_child_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNSENT_BYTES_MAX", 4 * BYTES_MAX)
    echo = child("plain", [])
    echo.start()
    await until(lambda: echo.link is not None)
    pid, link = echo.pid, echo.link
    assert pid is not None and link is not None
    os.kill(pid, signal.SIGSTOP)
    for _ in range(8):
        link.send(Said("x" * (BYTES_MAX - 100)))
    assert not link.is_open and not link.room.is_set()
    await asyncio.wait_for(link.ended.wait(), 5)
    assert link.room.is_set(), "an ended connection leaves no writer waiting"
    os.kill(pid, signal.SIGCONT)
    await echo.stop()


@story
async def test_start_waits_for_its_event_until_the_timeout() -> None:
    wanted = asyncio.Event()
    echo, other = child("plain", []), child("plain", [])
    echo.start(after=wanted, within_s=600)
    other.start(after=asyncio.Event(), within_s=0.05)
    await until(lambda: other.link is not None)
    assert echo.started == 0
    wanted.set()
    await until(lambda: echo.link is not None)
    await echo.stop()
    await other.stop()


def test_child_ends_with_its_parent() -> None:
    program = (
        "import asyncio, sys\n"
        "from tests.cluster.ipc.test_supervisor import child\n"
        "async def main():\n"
        "    echo = child('plain', [])\n"
        "    echo.start()\n"
        "    while echo.link is None:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(echo.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    asyncio.run(until(lambda: not is_there(pid)))
