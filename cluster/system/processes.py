"""Processes of this machine: identification, and signals that never reach another process.

A process is identified by its ID and start time. It is signalled through a descriptor, which never refers to another
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ENVIRONMENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum size read of a process's environment: above Linux's default limit for arguments and environment (2 MiB)."""

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")

TREE: Final = Path(__file__).absolute().parents[3].resolve()
"""Directory that forebay is imported from, and from which its modules are started as processes."""

_libc = ctypes.CDLL(None, use_errno=True)
_terminations: Final[list[int]] = []


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Exit at once if `parent` is no longer the parent."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def python_of(tree: Path) -> tuple[str, dict[str, str]]:
    """Return the interpreter and environment that run the modules of the release unpacked in a directory.

    The interpreter is the tree's .venv if it has one; the modules are the tree's, regardless of installed packages.
    """
    own = tree / ".venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return str(own) if own.is_file() else sys.executable, environment


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that none can leave this process's tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def sync_file_system(descriptor: int) -> None:
    """Sync the whole file system of the descriptor.

    Raises:
        OSError: The sync failed.
    """
    if _libc.syncfs(descriptor) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def fields_of(pid: int) -> list[bytes] | None:
    """Return /proc/PID/stat from the state on (the third field of proc(5)), or None without such a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    fields = fields_of(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


@functools.cache
def boot_id() -> str:
    """Return the ID of this boot. Start times are comparable only within one boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read(64).strip()


def all_pids() -> list[int]:
    """Return the IDs of all visible processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def descendants(root: int) -> list[int]:
    """Return the living descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        fields = fields_of(pid)
        if fields is not None and fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    rest = [root]
    while rest:
        for child in children.get(rest.pop(), []):
            found.append(child)
            rest.append(child)
    return found


def environment_variables(pid: int) -> list[bytes]:
    """Return the initial `NAME=value` pairs of a process; empty if the process is inaccessible or has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read(_ENVIRONMENT_BYTES_MAX).split(b"\0")
    except OSError:
        return []


def cgroup_of(pid: int) -> str:
    """Return a process's cgroup directory (v2).

    Raises:
        LookupError: The cgroup cannot be found; the message gives reason and remedy.
        OSError: The process has ended.
    """
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "")
    if not own.startswith("/") or ".." in own.split("/"):
        raise LookupError("this machine does not use cgroup v2; boot with systemd.unified_cgroup_hierarchy=1")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if after.split()[0] != "cgroup2" or len(fields) < 5:
            continue
        root, mount = (_ESCAPED.sub(lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
        if root == "/" or own == root or own.startswith(root + "/"):
            return mount.rstrip("/") + (own if root == "/" else own[len(root) :]).rstrip("/")
    raise LookupError("no cgroup v2 file system is mounted; mount one at /sys/fs/cgroup")


def hold_termination() -> None:
    """Block SIGTERM until the next program in this process calls `leave_when_terminated`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def ignore_hangup() -> None:
    """Ignore SIGHUP in this process, its forks and the programs it executes.

    `systemctl kill -s HUP UNIT` signals every process of the unit, but only the main process reloads its configuration.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def leave_when_terminated() -> None:
    """Exit with code 0 on SIGTERM until an event loop handles the signal; also on a SIGTERM since `hold_termination`.

    SIGHUP is ignored until then.
    """
    ignore_hangup()
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def is_terminated() -> bool:
    """Return whether SIGTERM arrived before an event loop handled it.

    Needed because the exit may be raised in a callback whose exceptions Python ignores, for example in a fork.
    """
    return bool(_terminations)


def _leave(number: int, frame: object) -> NoReturn:
    _terminations.append(number)
    raise SystemExit(0)


def send(pid: int, number: int, *, still: Callable[[], bool] = lambda: True) -> bool:
    """Signal a process through a descriptor, if `still` then confirms its identity; return whether it was signalled."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not still():
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)
            return True
        return False
    finally:
        os.close(descriptor)
