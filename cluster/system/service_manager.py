"""Interface to the service manager: logging settings from the environment, exit codes, and status notifications."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Final

# ---- logging settings: here and not in `logs`, which takes too long to import for commands

FORMATS: Final = ("text", "json", "journald")
LEVELS: Final = ("debug", "info", "warning", "error")

FORMAT_VARIABLE: Final = "FOREBAY_LOG_FORMAT"
LEVEL_VARIABLE: Final = "FOREBAY_LOG_LEVEL"
PROCESS_VARIABLE: Final = "FOREBAY_LOG_PROCESS"
"""Environment variable with the common subject of all records: journal identifier, and node or replica."""

VARIABLES: Final = (FORMAT_VARIABLE, LEVEL_VARIABLE, PROCESS_VARIABLE)
"""Variables passed to child processes, so that they log in the same form."""

# ---- exit codes and notifications

EXIT_CONFIGURATION: Final = 78
"""EX_CONFIG of sysexits.h: a restart does not help until the configuration is changed."""

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
"""Environment variable: socket of the service manager; an abstract one if it starts with @ (unix(7))."""

PERIOD_VARIABLE: Final = "WATCHDOG_USEC"
"""Environment variable: time without notification after which the service manager kills the process, microseconds."""

OWNER_VARIABLE: Final = "WATCHDOG_PID"
"""Environment variable: ID of the process from which the service manager expects notifications."""

_MICROSECONDS: Final = 1_000_000

APPLICATION: Final = "/usr/lib/forebay"
"""Installation directory of the Debian packages."""

SYSTEMD: Final = "/run/systemd/system"
"""Directory that exists while systemd is this machine's first process: sd_booted(3)."""

_UNITS: Final = {"replica": "forebay-controller", "agent": "forebay-agent", "gateway": "forebay-gateway"}
"""Unit of the packages for each kind of process."""

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"


def enable_command(*started: tuple[str, str]) -> str:
    """Return the command that enables and starts packaged units; `started`: kind and name of each process."""
    return f"systemctl enable --now {' '.join(f'{_UNITS[kind]}@{name}' for kind, name in started)}"


def start_command(kind: str, name: str) -> str:
    """Return the command that starts a process: its unit if the packages are installed under systemd."""
    if sys.prefix == APPLICATION and os.path.isdir(SYSTEMD):
        return enable_command((kind, name))
    return f"forebay run {kind} --name {name}"


def tell_manager(*lines: str, status: str = "") -> None:
    """Send assignments such as READY to the service manager; `status` is shown by `systemctl status`.

    Never waits and never fails. A service manager that does not read misses this notification.
    """
    address = os.environ.get(SOCKET_VARIABLE, "")
    if not address:
        return
    words = [*lines, *([f"STATUS={' '.join(status.split())}"] if status else [])]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as telling:
        with contextlib.suppress(OSError):
            telling.sendto("\n".join(words).encode(), "\0" + address[1:] if address[0] == "@" else address)


def watchdog_s() -> float | None:
    """Return the time without notification after which the service manager kills this process, seconds, or None."""
    text, owner = os.environ.get(PERIOD_VARIABLE, ""), os.environ.get(OWNER_VARIABLE, "")
    if not text.isdecimal() or int(text) == 0 or owner not in ("", str(os.getpid())):
        return None
    return int(text) / _MICROSECONDS
