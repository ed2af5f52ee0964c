"""FIFOs between Slurm's plugin scripts and the bridge: one for requests, and one per call for replies.

Neither Lua nor a shell can create a FIFO or open a socket, and an extra process would cost more than the call. So the
bridge keeps FIFOs ready as `slots/N`. A caller renames a slot to `calls/N.FUNCTION.JOB`, which succeeds for only one
caller. It then writes this name and its words as one line to `requests`, and reads the reply. Two callers can share a
name only for the same call of the same job, which is a repeat. When the bridge ends, its callers read the end of the
file and call the next bridge. A starting bridge opens and removes leftover FIFOs, which wakes callers that wait there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from forebay.cluster.slurm.files import uptime_s
from forebay.replica.values import SCRIPT_BYTES_MAX

LOGGER = logging.getLogger(__name__)

SLOTS: Final = 64
"""Number of ready FIFOs, the same as in the plugin scripts. A slot is taken only while a request is sent."""

REQUEST_BYTES_MAX: Final = 4096
"""Limit of one request, bytes: the size of an atomic write to a pipe; the same as in the plugin scripts."""

ABANDONED_S: Final = 15.0
"""Seconds after which a FIFO without a request belongs to a killed caller."""

_READ_BYTES: Final = 64 * 1024
_NAME: Final = re.compile(r"([0-9]{1,3})\.[a-z_]{1,32}\.([0-9]{1,10}|-)", re.ASCII)
_OPEN: Final = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


class FifoRequest(NamedTuple):
    """Call that came through a FIFO. Bytes that are not UTF-8 become surrogates."""

    name: str
    """Name of the FIFO for its reply."""
    function: str
    words: list[str]
    script: str


class Fifos:
    """FIFOs of one bridge, in its directory."""

    def __init__(self, run: Path, take: Callable[[FifoRequest], None]) -> None:
        """Prepare without creating FIFOs; `take` receives each request."""
        self._requests, self._slots, self.calls = run / "requests", run / "slots", run / "calls"
        self._take = take
        self._descriptor = -1
        self._unread = b""
        self._answered: set[str] = set()
        self._since_s: dict[str, float] = {}

    def start(self) -> None:
        """Wake callers left by an earlier bridge, and accept requests.

        Raises:
            OSError: A FIFO cannot be created or opened.
        """
        self._wake()
        os.mkfifo(self._requests, 0o600)
        # Open in both directions: if opened for reading only, the end of each caller would be the end of the file.
        self._descriptor = os.open(self._requests, _OPEN)
        asyncio.get_running_loop().add_reader(self._descriptor, self._readable)
        self._fill()

    def stop(self) -> None:
        """Accept no more requests, and wake waiting callers, which then call the next bridge."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        self._wake()

    def _wake(self) -> None:
        """Remove all FIFOs, slots first, so that a slot taken meanwhile is found among the calls."""
        for directory in (self._slots, self.calls):
            directory.mkdir(mode=0o700, exist_ok=True)
            for name in os.listdir(directory):
                self._remove(directory / name)
        with contextlib.suppress(FileNotFoundError):
            self._remove(self._requests)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            descriptor = -1
            with contextlib.suppress(OSError):
                # A waiting caller wakes when the pipe is closed, after its name was removed.
                descriptor = os.open(path, _OPEN)
            try:
                path.unlink()
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def _fill(self) -> None:
        for number in range(1, SLOTS + 1):
            self._make_slot(number)

    def _make_slot(self, number: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._slots / str(number), 0o600)

    def sweep(self) -> None:
        """Remove FIFOs of callers killed before their request, and create slots in their place."""
        now_s, known = uptime_s(), self._since_s
        self._since_s = {name: known.get(name, now_s) for name in os.listdir(self.calls) if name not in self._answered}
        for name, since_s in self._since_s.items():
            if now_s > since_s + ABANDONED_S:
                self._remove(self.calls / name)
        self._fill()

    # Requests

    def _readable(self) -> None:
        try:
            self._unread += os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > REQUEST_BYTES_MAX:
            LOGGER.warning("a request has more than %d bytes without a line end", REQUEST_BYTES_MAX)
            self._unread = b""
        for line in lines:
            self._request(line)

    def _request(self, line: bytes) -> None:
        try:
            name, function, *words = line.decode("utf-8", "surrogateescape").split("\0")
        except ValueError:
            LOGGER.warning("a request is malformed: %r", line[:80])
            return
        found = _NAME.fullmatch(name)
        if found is None or not 1 <= int(found[1]) <= SLOTS:
            LOGGER.warning("a request does not name a FIFO: %r", name[:80])
            return
        self._make_slot(int(found[1]))
        self._take(FifoRequest(name, function, words, self._script(name)))

    def _script(self, name: str) -> str:
        """Return the script of a request and remove its file; empty for none."""
        path = self.calls / f"{name}.script"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return ""
        with open(descriptor, "rb") as file:
            path.unlink(missing_ok=True)
            # Slurm ends a script with replaced symbols with a zero byte.
            return file.read(SCRIPT_BYTES_MAX + 2).rstrip(b"\0").decode("utf-8", "surrogateescape")

    # Replies

    def make(self) -> str:
        """Create a FIFO for a socket caller and return its name."""
        name = f"socket.{secrets.token_hex(8)}"
        os.mkfifo(self.calls / name, 0o600)
        return name

    def open_reply(self, name: str) -> int | None:
        """Return a descriptor of a FIFO, open in both directions; None if its caller has ended."""
        try:
            descriptor = os.open(self.calls / name, _OPEN)
        except OSError:
            return None
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        self._answered.add(name)
        return descriptor

    def finish_reply(self, name: str, descriptor: int) -> None:
        """Remove a FIFO that was read; a reader that still waits reads the end of the file."""
        (self.calls / name).unlink(missing_ok=True)
        os.close(descriptor)
        self._answered.discard(name)
