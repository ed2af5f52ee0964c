"""Start of a child process, and its socket for a child without an event loop."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from forebay.cluster.ipc.frames import FrameCodec
from forebay.cluster.system import begin_logging, die_with_parent, ignore_hangup

Sent = TypeVar("Sent")
Received = TypeVar("Received")

_READ_BYTES: Final = 1 << 16


def begin_child(arguments: Sequence[str], *, niceness: int = 0) -> tuple[socket.socket, list[str]]:
    """Set up this process as a child: `SOCKET PARENT …`; return the socket to its parent and the other arguments.

    The child ends with PARENT. It is scheduled so that its wake-ups do not preempt other processes, above all the
    controller. `niceness` lowers the priority further, for background work.
    """
    descriptor, parent, *rest = arguments
    ignore_hangup()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the parent stops its children
    die_with_parent(int(parent))
    with contextlib.suppress(OSError):  # if not permitted, keep the previous policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(niceness)
    os.umask(0o077)
    begin_logging()
    faulthandler.enable()
    return socket.socket(fileno=int(descriptor)), rest


class ChildSocket(Generic[Sent, Received]):
    """Socket to the parent, for a child that waits for frames between parts of its work."""

    def __init__(self, link: socket.socket, codec: FrameCodec[Sent, Received]) -> None:
        self._link: Final = link
        self._codec: Final = codec
        self._splitter: Final = codec.splitter()

    def is_readable(self, timeout_s: float = 0) -> bool:
        """Wait up to `timeout_s` seconds; return whether frames, or the end of the socket, have arrived."""
        return bool(select.select([self._link], [], [], timeout_s)[0])

    def receive(self) -> list[Received]:
        """Return the frames that have arrived.

        Raises:
            EOFError: The parent closed the socket: this process must end.
            ChannelProtocolError: The parent sent an invalid frame.
        """
        data = self._link.recv(_READ_BYTES)
        if not data:
            raise EOFError
        return [self._codec.decode(body) for body in self._splitter.feed(data)]

    def send(self, frame: Sent) -> None:
        """Send a frame, and wait until it is in the socket's buffer.

        Raises:
            OSError: The parent has closed the socket.
        """
        self._link.sendall(self._codec.encode(frame))
