"""Find and kill all processes of a job; start this package's modules as processes that inherit only what they need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from forebay.cluster.agent.limits import KILL_PAUSE_S, KILL_ROUNDS_MAX
from forebay.cluster.agent.processes.cgroups import Cgroup, CgroupName
from forebay.cluster.system import (
    TREE,
    VARIABLES,
    all_pids,
    descendants,
    environment_variables,
    fields_of,
    send,
    start_time,
)

_PASSED_ON = ("LANG", "LC_ALL", "TMPDIR", "PYTHONHASHSEED", *VARIABLES)


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    descriptors: Sequence[int],
    stdin: int,
    stdout: int | None,
    stderr: int | None,
    new_session: bool,
    variables: Mapping[str, str] = MappingProxyType({}),
    new_group: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `python -m module` with the given descriptors.

    `variables` are added to its environment. With `new_group` it can be signalled together with its helpers.

    Raises:
        OSError: The process cannot be started.
    """
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment["PATH"] = os.environ.get("PATH", os.defpath)
    environment["PYTHONPATH"] = str(TREE)
    environment.update(variables)
    return subprocess.Popen(
        # -P: do not import from the working directory.
        [sys.executable, "-P", "-m", module, *arguments],
        env=environment,
        cwd="/",
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(descriptors),
        start_new_session=new_session,
        process_group=0 if new_group else None,
    )


SCRIPT_VARIABLE: Final = "FOREBAY_STEP"
"""Marks every process of a script. The value is the agent's storage ID and the job, so that jobs of two clusters on one
host differ.
"""

OPERATION_VARIABLE: Final = "FOREBAY_OPERATION"
"""Marks every process of a provider operation: storage ID, job and attempt. The attempt distinguishes processes that a
finished operation left running on purpose from those of an interrupted one.
"""


ENDED: Final = b"e"
SYNCED: Final = b"s"
"""Messages of a supervisor on its pipe: the result is recorded and no process is left; the written data is on disk."""


def kill_operation(marker: str, rounds: int = KILL_ROUNDS_MAX) -> list[int]:
    """Kill the processes of an interrupted operation; return the IDs of those left after `rounds` rounds.

    Finds them whatever user they run as: a site's program may have changed it.
    """
    pause = threading.Event()
    wanted = f"{OPERATION_VARIABLE}={marker}".encode()
    left: list[int] = []
    for _ in range(rounds):
        left = [pid for pid in all_pids() if pid != os.getpid() and _is_operation(pid, wanted)]
        if not left:
            return []
        for pid in left:
            send(pid, signal.SIGKILL, still=partial(_is_operation, pid, wanted))
        pause.wait(KILL_PAUSE_S)
    return left


def _is_operation(pid: int, wanted: bytes) -> bool:
    return wanted in environment_variables(pid) and start_time(pid) is not None


def marked_processes(marker: str, uid: int) -> Iterator[int]:
    """Yield the living processes of a user that carry the script marker."""
    wanted = f"{SCRIPT_VARIABLE}={marker}".encode()
    for pid in all_pids():
        if pid != os.getpid() and _is_marked(pid, wanted, uid):
            yield pid


def in_session_of(leader: tuple[int, int], uid: int) -> Iterator[int]:
    """Yield the living processes of a user in the session begun by `leader` (ID and start time).

    Yields nothing once the leader has ended, because its ID may lead another session; only the marker counts then.
    """
    pid, started = leader
    if start_time(pid) != started:
        return
    for candidate in all_pids():
        fields = fields_of(candidate)
        if fields is not None and fields[0] not in (b"Z", b"X") and int(fields[3]) == pid and _uid_is(candidate, uid):
            yield candidate


def _uid_is(pid: int, uid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid in (uid, 0) and _real_uid(pid) == uid
    except OSError:
        return False


def _real_uid(pid: int) -> int:
    # Called for every process of the machine: Python's file objects would double the time.
    status = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _, found, rest = os.read(status, 4096).partition(b"\nUid:")
    finally:
        os.close(status)
    if not found:
        raise ProcessLookupError(pid)
    return int(rest.split(None, 1)[0])


def _is_marked(pid: int, wanted: bytes, uid: int) -> bool:
    return _uid_is(pid, uid) and wanted in environment_variables(pid) and start_time(pid) is not None


def kill_job(
    marker: str, uid: int, *, leader: tuple[int, int] | None = None, cgroup: CgroupName | None = None
) -> list[int]:
    """Kill every process of a job until none is left; return the IDs of those that cannot be killed.

    Kills the whole cgroup, if there is one, then every process with the marker and, while the script's own process
    lives, its session. Without a cgroup, processes that fork and exit faster than they are listed may be missed.
    """
    held = Cgroup.find(cgroup)
    if held is not None:
        try:
            if unkillable := held.kill(KILL_PAUSE_S * KILL_ROUNDS_MAX):
                return sorted(unkillable)
            held.remove()
        finally:
            held.close()
    pause = threading.Event()
    wanted = f"{SCRIPT_VARIABLE}={marker}".encode()
    left: set[int] = set()
    for _ in range(KILL_ROUNDS_MAX):
        left = set()
        if leader is not None:
            # Kill the leader last: while it lives, its ID identifies the session.
            session = sorted(in_session_of(leader, uid), key=lambda pid: pid == leader[0])
            for pid in session:
                send(pid, signal.SIGKILL, still=partial(_in_session, pid, leader[0]))
            left.update(session)
        for pid in marked_processes(marker, uid):
            send(pid, signal.SIGKILL, still=partial(_is_marked, pid, wanted, uid))
            left.add(pid)
        if not left:
            return []
        pause.wait(KILL_PAUSE_S)
    return sorted(left)


def _in_session(pid: int, session: int) -> bool:
    fields = fields_of(pid)
    return fields is not None and int(fields[3]) == session


STOPPING_ROUNDS: Final = 3
"""Rounds of stopping processes without a cgroup: a process created in one round is stopped in the next."""


class ScriptProcesses:
    """Processes of a script from its supervisor's view: its cgroup and the supervisor's descendants.

    Without a cgroup only the latter are known; processes that fork and exit faster than they are listed are missed.
    """

    def __init__(self, cgroup: Cgroup | None) -> None:
        """Begin without processes; the calling process must be their subreaper."""
        self._cgroup = cgroup

    def signal(self, number: int, *, but: int = 0) -> None:
        """Signal each process once, except `but`."""
        pids = set(descendants(os.getpid()))
        if self._cgroup is not None:
            if number is signal.SIGKILL:
                self._cgroup.signal(number)
            else:
                pids.update(self._cgroup.pids())
        for pid in pids - {but}:
            send(pid, number)

    def suspend(self) -> None:
        """Stop all processes, visibly in `ps`."""
        if self._cgroup is not None:
            # Frozen processes cannot fork, so none is missed.
            with self._cgroup.frozen():
                self.signal(signal.SIGSTOP)
            return
        for _ in range(STOPPING_ROUNDS):
            self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume all processes, including any stopped by other means."""
        self.signal(signal.SIGCONT)

    @property
    def are_left(self) -> bool:
        """True if any process lives."""
        if self._cgroup is not None and not self._cgroup.is_empty:
            return True
        try:
            # Every living descendant has an ancestor that is a child of the subreaper. WNOWAIT reaps nothing.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return bool(descendants(os.getpid()))

    def remove(self) -> None:
        """Remove the empty cgroup."""
        if self._cgroup is not None:
            self._cgroup.remove()
