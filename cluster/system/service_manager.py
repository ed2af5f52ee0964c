"""What a process is told of its logs, and tells the service manager that started it: how it ended, and how it is."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Final

# ---- what is said of logs; how they are written, `logs`, takes a command more to import than it may

FORMATS: Final = ("text", "json", "journald")
LEVELS: Final = ("debug", "info", "warning", "error")

FORMAT_VARIABLE: Final = "FOREBAY_LOG_FORMAT"
LEVEL_VARIABLE: Final = "FOREBAY_LOG_LEVEL"
PROCESS_VARIABLE: Final = "FOREBAY_LOG_PROCESS"
"""Environment variable by which a process tells those that it starts what all of their records say: its identifier in
the journal, and its node or replica."""

VARIABLES: Final = (FORMAT_VARIABLE, LEVEL_VARIABLE, PROCESS_VARIABLE)
"""What a process passes on to its own children, so that they log as it does."""

# ---- what the service manager reads

EXIT_CONFIGURATION: Final = 78
"""EX_CONFIG of sysexits.h: starting again does not help until somebody changes something."""

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
"""Environment variable: where the service manager listens; with @ first it is no file (unix(7))."""

PERIOD_VARIABLE: Final = "WATCHDOG_USEC"
"""Environment variable: microseconds of silence after which the service manager kills the process."""

OWNER_VARIABLE: Final = "WATCHDOG_PID"
"""Environment variable: of which process it expects to hear."""

_MICROSECONDS: Final = 1_000_000

APPLICATION: Final = "/usr/lib/forebay"
"""Where the Debian packages install the application."""

SYSTEMD: Final = "/run/systemd/system"
"""Directory that exists while systemd is this machine's first process: sd_booted(3)."""

_UNITS: Final = {"replica": "forebay-controller", "agent": "forebay-agent", "gateway": "forebay-gateway"}
"""Unit of the packages by kind of process."""

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"


def enable_command(*started: tuple[str, str]) -> str:
    """Return the command that enables and starts units of the packages; `started`: kind and name of each process."""
    return f"systemctl enable --now {' '.join(f'{_UNITS[kind]}@{name}' for kind, name in started)}"


def start_command(kind: str, name: str) -> str:
    """Return the command that starts a process: its unit if the packages are installed under systemd."""
    if sys.prefix == APPLICATION and os.path.isdir(SYSTEMD):
        return enable_command((kind, name))
    return f"forebay {'serve' if kind == 'replica' else kind} --name {name}"


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
