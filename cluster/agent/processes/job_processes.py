"""Processes of a job: finding all of them, and ending them; and starting this package's own modules as processes, with
nothing inherited that they do not need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cluster.agent.limits import KILL_PAUSE_S, KILL_ROUNDS_MAX
from cluster.agent.processes.cgroups import Cgroup, CgroupName
from cluster.system import VARIABLES, all_pids, descendants, environment_variables, fields_of, send, start_time

_TREE = str(Path(__file__).resolve().parents[3])
"""What the package was imported from: its own modules are started from there too."""

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
    """Start `python -m module` with the given open descriptors; OSError if it cannot be started.

    `variables` are added to its environment. In a group of its own (`new_group`) it is signalled with its helpers.
    """
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment["PATH"] = os.environ.get("PATH", os.defpath)
    environment["PYTHONPATH"] = _TREE
    environment.update(variables)
    return subprocess.Popen(
        # -P: the working directory is no place to import from.
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
"""Marks every process of a script: its value is the agent's storage id and the job, so that jobs of two clusters on one
host differ."""

OPERATION_VARIABLE: Final = "FOREBAY_OPERATION"
"""Marks every process of an operation of a site's provider: storage id, job and attempt. What a finished operation left
running on purpose has another attempt than one that was interrupted."""


ENDED: Final = b"e"
SYNCED: Final = b"s"
"""What a supervisor says on its pipe: how the script ended is written down, and nothing of it is left; what it has
written is on disk."""


def kill_operation(marker: str, rounds: int = KILL_ROUNDS_MAX) -> list[int]:
    """Kill what is left of an operation that was interrupted; return the ids of what is there after so many rounds.

    Whatever its user is now: a site's program may have become another one.
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


def marked(marker: str, uid: int) -> Iterator[int]:
    """Give the living processes of a user whose environment carries the step marker."""
    wanted = f"{SCRIPT_VARIABLE}={marker}".encode()
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
        fields = fields_of(candidate)
        if fields is not None and fields[0] not in (b"Z", b"X") and int(fields[3]) == pid and _uid_is(candidate, uid):
            yield candidate


def _uid_is(pid: int, uid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid in (uid, 0) and _real_uid(pid) == uid
    except OSError:
        return False


def _real_uid(pid: int) -> int:
    # Of every process of the machine: what Python's files do beside reading takes longer than that.
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
    """Kill every process of a job until none is left; return the ids of those that cannot be killed.

    All of its cgroup, if it had one; and whatever is found by the marker in its environment and, while the script's own
    process lives, by its session. Without a cgroup, what forks and ends faster than it is listed may be missed.
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
    fields = fields_of(pid)
    return fields is not None and int(fields[3]) == session


STOPPING_ROUNDS: Final = 3
"""Rounds in which processes without a cgroup are stopped: one that was made in one round is stopped in the next."""


class ScriptProcesses:
    """All that a script has started, as its supervisor sees it: what is in its cgroup, and this process's descendants.

    Without a cgroup there are only these, who are listed one by one: what forks and ends faster than that is missed.
    """

    def __init__(self, cgroup: Cgroup | None) -> None:
        """Begin with none; this process is the subreaper of all that there will be."""
        self._cgroup = cgroup

    def signal(self, number: int, *, but: int = 0) -> None:
        """Signal each of them once, except the process `but`."""
        pids = set(descendants(os.getpid()))
        if self._cgroup is not None:
            if number is signal.SIGKILL:
                self._cgroup.signal(number)
            else:
                pids.update(self._cgroup.pids())
        for pid in pids - {but}:
            send(pid, number)

    def suspend(self) -> None:
        """Have all of them stand still, as `ps` shows it."""
        if self._cgroup is not None:
            # What is frozen cannot fork, so none is missed.
            with self._cgroup.frozen():
                self.signal(signal.SIGSTOP)
            return
        for _ in range(STOPPING_ROUNDS):
            self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have them go on; also those that somebody else has stopped."""
        self.signal(signal.SIGCONT)

    @property
    def are_left(self) -> bool:
        """Whether any of them lives."""
        if self._cgroup is not None and not self._cgroup.is_empty:
            return True
        try:
            # Whatever lives below a subreaper has a child of it above it. Nothing is reaped by looking.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return bool(descendants(os.getpid()))

    def remove(self) -> None:
        """Remove the cgroup, now that nothing is left in it."""
        if self._cgroup is not None:
            self._cgroup.remove()
