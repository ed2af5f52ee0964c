"""Processes of a job: who they are, and ending them without ever hitting another.

A process is known by its id and its start time, and is signalled through a descriptor that cannot come to mean another
process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from cluster.agent.limits import KILL_PAUSE_S, KILL_ROUNDS_MAX

STEP_VARIABLE: Final = "FOREBAY_STEP"
"""Marks every process of a script: its value is the agent's storage id and the job, so that jobs of two clusters on one
host differ."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ENVIRONMENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""What is read of a process's environment, bytes: more than Linux allows for arguments and environment by default (2
MiB)."""

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exits at once if `parent` is no longer the parent."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Adopt the orphans among this process's descendants, so that none can leave its tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def sync_file_system(descriptor: int) -> None:
    """Write everything of the file system that the descriptor is on to its disk; OSError if that fails."""
    if _libc.syncfs(descriptor) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _fields(pid: int) -> list[bytes] | None:
    """Return /proc/PID/stat from the state on (the third field of proc(5)), None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it does not exist or is a zombie."""
    fields = _fields(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    """Return what tells one boot of this machine from another: start times only mean something within one."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read(64).strip()


def all_pids() -> list[int]:
    """Return the ids of all processes that are visible."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def descendants(root: int) -> list[int]:
    """Return the living descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        fields = _fields(pid)
        if fields is not None and fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    rest = [root]
    while rest:
        for child in children.get(rest.pop(), []):
            found.append(child)
            rest.append(child)
    return found


def marked(marker: str, uid: int) -> Iterator[int]:
    """Give the living processes of a user whose environment carries the step marker."""
    wanted = f"{STEP_VARIABLE}={marker}".encode()
    for pid in all_pids():
        if pid != os.getpid() and _is_marked(pid, wanted, uid):
            yield pid


def in_session_of(leader: tuple[int, int], uid: int) -> Iterator[int]:
    """Give the living processes of a user in the session that `leader` (id and start time) began.

    Nothing if the leader is gone: its number may lead another session by now, and the marker has to do.
    """
    pid, started = leader
    if start_time(pid) != started:
        return
    for candidate in all_pids():
        fields = _fields(candidate)
        if fields is not None and fields[0] not in (b"Z", b"X") and int(fields[3]) == pid and _uid_is(candidate, uid):
            yield candidate


def _uid_is(pid: int, uid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid in (uid, 0) and _real_uid(pid) == uid
    except OSError:
        return False


def _real_uid(pid: int) -> int:
    with open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    raise ProcessLookupError(pid)


def _is_marked(pid: int, wanted: bytes, uid: int) -> bool:
    if not _uid_is(pid, uid):
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read(_ENVIRONMENT_BYTES_MAX)
    except OSError:
        return False
    return wanted in environment.split(b"\0") and start_time(pid) is not None


def send(pid: int, number: signal.Signals, *, still: Callable[[], bool] = lambda: True) -> bool:
    """Signal a process if, once it is held by a descriptor, it is `still` the one that is meant.

    True if it was signalled.
    """
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


def kill_job(marker: str, uid: int, *, leader: tuple[int, int] | None = None) -> list[int]:
    """Kill every process of a job until none is left; return the ids of those that cannot be killed.

    Found by the marker in their environment and, while the script's own process lives, by its session.
    """
    pause = threading.Event()
    wanted = f"{STEP_VARIABLE}={marker}".encode()
    left: set[int] = set()
    for _ in range(KILL_ROUNDS_MAX):
        left = set()
        if leader is not None:
            # The leader last: while it lives, its number means its session.
            session = sorted(in_session_of(leader, uid), key=lambda pid: pid == leader[0])
            for pid in session:
                send(pid, signal.SIGKILL, still=partial(_in_session, pid, leader[0]))
            left.update(session)
        for pid in marked(marker, uid):
            send(pid, signal.SIGKILL, still=partial(_is_marked, pid, wanted, uid))
            left.add(pid)
        if not left:
            return []
        pause.wait(KILL_PAUSE_S)
    return sorted(left)


def _in_session(pid: int, session: int) -> bool:
    fields = _fields(pid)
    return fields is not None and int(fields[3]) == session
