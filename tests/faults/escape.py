"""Job that resists its end.

Its processes fork and exit fast, double fork, start sessions, ignore signals and clear their environment.

Run as `python escape.py DIRECTORY FIFO [stay]`, as or by a job's script. Each of WAYS holds the lock of the file
DIRECTORY/WAY for as long as anything of it lives: a lock that is free afterwards says that nothing does. Once all of
them live, a line goes to FIFO; with `stay` the first process then stays, too. Nothing of it lives for longer than
LIFE_S, whatever becomes of the test.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

LIFE_S = 120.0
"""Seconds for which anything of it lives at most: longer than any test, and then the machine has peace."""


def _deaf() -> None:
    """Ignore what can be ignored."""
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass


def _hop(until_s: float) -> None:
    """Be another process each time anybody looks: the number of this one is gone before it can be signalled."""
    while time.monotonic() < until_s:
        if os.fork():
            os._exit(0)


def _wait(until_s: float) -> None:
    threading.Event().wait(max(0.0, until_s - time.monotonic()))


def _session(until_s: float) -> None:
    os.setsid()
    _wait(until_s)


def _twice(until_s: float) -> None:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    _wait(until_s)


def _ignoring(until_s: float) -> None:
    os.setsid()
    _deaf()
    _wait(until_s)


def _hopping(until_s: float) -> None:
    os.setsid()
    _deaf()
    _hop(until_s)


def _forgetful(until_s: float) -> None:
    """Have another program's environment: nothing in it names the job."""
    os.setsid()
    if os.fork():
        os._exit(0)
    left_s = max(0, int(until_s - time.monotonic()))
    os.execve("/bin/sleep", ["sleep", str(left_s)], {})


LISTED: dict[str, Callable[[float], None]] = {
    "session": _session,
    "twice": _twice,
    "ignoring": _ignoring,
    "forgetful": _forgetful,
}
"""Ways that can be found by listing processes."""

WAYS = LISTED | {f"hopping-{number}": _hopping for number in range(3)}
"""All ways; the last ones can be ended as a cgroup alone."""


def main(directory: Path, fifo: Path, ways: tuple[str, ...], stays: bool) -> None:
    """Begin in each of these ways, say so, and stay or end."""
    until_s = time.monotonic() + LIFE_S
    for way in ways:
        lock = os.open(directory / way, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.set_inheritable(lock, True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fork() == 0:
            try:
                WAYS[way](until_s)
            finally:
                os._exit(0)
        os.close(lock)
    with fifo.open("w") as file:
        file.write("up\n")
    if stays:
        _deaf()
        _wait(until_s)


def survivors(directory: Path) -> list[str]:
    """Return the ways whose lock somebody holds."""
    found = []
    for file in sorted(directory.iterdir()):
        with file.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(file.name)
    return found


if __name__ == "__main__":
    _, _directory, _fifo, _ways, *_rest = sys.argv
    main(Path(_directory), Path(_fifo), tuple(_ways.split(",")), "stay" in _rest)
