"""What a process tells the service manager that started it: its log, how it ended, and by sd_notify(3) how it is."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""How each process writes a line of its log, on stderr."""

EXIT_CONFIGURATION: Final = 78
"""EX_CONFIG of sysexits.h: starting again does not help until somebody changes something."""

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
"""Environment variable: where the service manager listens; with @ first it is no file (unix(7))."""

PERIOD_VARIABLE: Final = "WATCHDOG_USEC"
"""Environment variable: microseconds of silence after which the service manager kills the process."""

OWNER_VARIABLE: Final = "WATCHDOG_PID"
"""Environment variable: of which process it expects to hear."""

_MICROSECONDS: Final = 1_000_000

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"


def tell_manager(*lines: str, status: str = "") -> None:
    """Send assignments such as READY to the service manager; `status` is what `systemctl status` shows of the process.

    It never waits and never fails: a manager that does not read hears of the next one.
    """
    address = os.environ.get(SOCKET_VARIABLE, "")
    if not address:
        return
    words = [*lines, *([f"STATUS={' '.join(status.split())}"] if status else [])]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as telling:
        with contextlib.suppress(OSError):
            telling.sendto("\n".join(words).encode(), "\0" + address[1:] if address[0] == "@" else address)


def watchdog_s() -> float | None:
    """Return after how much silence the service manager kills this process, seconds; None if it does not."""
    text, owner = os.environ.get(PERIOD_VARIABLE, ""), os.environ.get(OWNER_VARIABLE, "")
    if not text.isdecimal() or int(text) == 0 or owner not in ("", str(os.getpid())):
        return None
    return int(text) / _MICROSECONDS
