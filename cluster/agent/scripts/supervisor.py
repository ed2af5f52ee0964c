"""Supervisor of one script: starts it once, enforces its limits and records its result. It outlives the agent.

The agent runs it as `python -m cluster.agent.scripts.supervisor DIRECTORY LOCK [PIPE]`. LOCK is an inherited descriptor
that holds the record's lock. On PIPE it reports that the script has ended, and that the written data is on disk. It
keeps the agent's account and only the script switches to the job's user, so users can neither forge a result nor kill
the supervisor.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from forebay.cluster.agent.files import (
    STEPS,
    FilesystemRefused,
    ImageFailed,
    buffer_path,
    identity_of,
    is_resource_exhausted,
    sync_written,
)
from forebay.cluster.agent.limits import DISK_FULL_RETRY_S, DISK_FULL_RETRY_S_MAX
from forebay.cluster.agent.messages import failure
from forebay.cluster.agent.processes import (
    CANNOT_EXECUTE,
    ENDED,
    SYNCED,
    AccountRefused,
    Cgroup,
    ScriptProcesses,
    ScriptRefused,
    account_for,
    become_script,
    enter,
    environment_of,
    fork,
)
from forebay.cluster.agent.scripts.record import (
    OVERRUN,
    RESUME,
    SUSPEND,
    ProcessName,
    ScriptOrder,
    ScriptRecord,
)
from forebay.cluster.system import (
    SystemClock,
    become_subreaper,
    boot_id,
    die_with_parent,
    ignore_hangup,
    open_directory,
    start_time,
    write_all,
)
from forebay.replica.messages import ScriptEnded
from forebay.replica.model import NO_OPTIONS, JobState, WarningSignal, parse_signal

REFUSAL_BYTES_MAX: Final = 16 * 1024
"""Size of the child's error message if the script cannot be started, bytes."""

SWEEP_S: Final = 0.05
"""Seconds between two rounds of killing a script's remaining processes."""

_BLOCKED: Final = frozenset({signal.SIGCHLD, signal.SIGTERM, SUSPEND, RESUME, OVERRUN})


class Cause(Enum):
    """Reason for which a supervisor ended its script."""

    TIME_LIMIT = JobState.TIMEOUT
    CANCELLED = JobState.CANCELLED
    OVERRUN = JobState.FAILED


class Supervisor:
    """Supervision of a script from start to end."""

    def __init__(self, record: ScriptRecord, wanted: ScriptOrder, lock: int, cgroup: Cgroup | None) -> None:
        """Take ownership of the record and its lock; `cgroup` will contain the script."""
        self._cgroup = cgroup
        self._processes = ScriptProcesses(cgroup)
        self._record = record
        self._wanted = wanted
        self._lock = lock
        self._clock = SystemClock()
        self._script = 0
        self._wait_status: int | None = None

    def run(self) -> ScriptEnded:
        """Run the script and return its result; none of its processes is left running."""
        become_subreaper()
        refused = self._start()
        if refused is not None:
            self._sweep()
            return refused
        cause = self._watch()
        self._sweep()
        return self._end_result(cause)

    def _start(self) -> ScriptEnded | None:
        """Fork the child, record it durably, then let it execute the script."""
        try:
            account_for(self._wanted.accounts, self._wanted.order.user)
        except AccountRefused as error:
            return ScriptEnded(JobState.FAILED, CANNOT_EXECUTE, 0, str(error))
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        rejection_read, rejection_write = os.pipe2(os.O_CLOEXEC)
        me = os.getpid()
        self._script, is_within = fork(-1 if self._cgroup is None else self._cgroup.directory)
        if self._script == 0:
            os.close(go_write)
            os.close(rejection_read)
            cgroup = None if self._cgroup is None or is_within else self._cgroup
            _child(self._wanted, go_read, rejection_write, self._lock, me, cgroup)
        os.close(go_read)
        os.close(rejection_write)
        script = ProcessName(pid=self._script, started=start_time(self._script) or 0, boot=boot_id())
        if not retry_write(lambda: self._record.write("started.json", script), unless_ended=True):
            # Without confirmation the child exits by itself: the script never ran.
            os.close(go_write)
            os.close(rejection_read)
            os.waitpid(self._script, 0)
            return ScriptEnded(JobState.CANCELLED)
        is_released = True
        try:
            write_all(go_write, b"g")
        except BrokenPipeError:
            is_released = False
        finally:
            os.close(go_write)
        with os.fdopen(rejection_read, "rb") as rejection:
            # End of file: a successful exec closed the descriptor.
            data = rejection.read(REFUSAL_BYTES_MAX)
        if not data and is_released:
            return None
        if not data:
            sentence = "the script's process died before it could start the script"
            return ScriptEnded(JobState.FAILED, CANNOT_EXECUTE, 0, sentence)
        exit_code, sentence = msgspec.json.decode(data, type=tuple[int, str])
        return ScriptEnded(JobState.FAILED, exit_code, 0, failure(sentence).message)

    def _watch(self) -> Cause | None:
        """Wait for the script's end, handling its time limit and signals; return the reason if it was ended."""
        limit_s = self._wanted.order.time_limit_s
        deadline_s = self._clock.monotonic_s() + limit_s if limit_s else math.inf
        kill_s = math.inf
        cause: Cause | None = None
        suspended_s: float | None = None
        left_s = math.inf
        warning = self._warning()
        while True:
            self._reap()
            if self._wait_status is not None:
                return cause
            now_s = self._clock.monotonic_s()
            if now_s >= kill_s:
                self._processes.signal(signal.SIGKILL)
                kill_s = now_s + SWEEP_S
            elif cause is None and now_s >= deadline_s:
                cause = Cause.TIME_LIMIT
                kill_s = self._end_gently(now_s)
            elif cause is None and warning is not None and now_s >= deadline_s - warning.before_s:
                self._warn(warning)
                warning = None
            due_s = kill_s if cause is not None else deadline_s - (0 if warning is None else warning.before_s)
            received = signal.sigtimedwait(_BLOCKED, max(0.0, min(due_s, kill_s, now_s + 3600) - now_s))
            if received is not None and received.si_signo == OVERRUN:
                # The script would keep writing during any grace period.
                cause, kill_s = cause or Cause.OVERRUN, self._clock.monotonic_s()
                continue
            if received is None or cause is not None:
                continue
            now_s = self._clock.monotonic_s()
            if received.si_signo == signal.SIGTERM:
                cause = Cause.CANCELLED
                kill_s = self._end_gently(now_s)
            elif received.si_signo == SUSPEND and suspended_s is None:
                # The time limit is paused too.
                suspended_s, left_s, deadline_s = now_s, deadline_s - now_s, math.inf
                self._processes.suspend()
            elif received.si_signo == RESUME and suspended_s is not None:
                suspended_s, deadline_s = None, now_s + left_s
                self._processes.resume()

    def _warning(self) -> WarningSignal | None:
        """Return the signal that the job requested before its time limit."""
        wanted = (self._wanted.order.options or NO_OPTIONS).signal
        return parse_signal(wanted) if wanted else None

    def _warn(self, warning: WarningSignal) -> None:
        if warning.to_script:
            os.kill(self._script, warning.number)
        else:
            self._processes.signal(warning.number, but=self._script)

    def _end_gently(self, now_s: float) -> float:
        """Send SIGTERM to every process; return the time at which to kill the rest."""
        self._processes.signal(signal.SIGTERM)
        # Stopped processes would not receive it.
        self._processes.resume()
        return now_s + self._wanted.kill_wait_s

    def _reap(self) -> None:
        """Reap all ended children: the script, and orphans inherited as subreaper."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._script:
                    self._wait_status = status

    def _sweep(self) -> None:
        """Kill the remaining processes of the script until none is left."""
        while self._processes.are_left:
            self._processes.signal(signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, SWEEP_S)
            self._reap()
        self._processes.remove()

    def _end_result(self, cause: Cause | None) -> ScriptEnded:
        code = os.waitstatus_to_exitcode(self._wait_status or 0)
        exit_code, number = (code, 0) if code >= 0 else (0, -code)
        if cause is Cause.TIME_LIMIT:
            return ScriptEnded(
                cause.value, exit_code, number, f"ended at its time limit of {self._wanted.order.time_limit_s} s"
            )
        if cause is Cause.OVERRUN:
            return ScriptEnded(cause.value, exit_code, number, failure(self._record.overrun()).message)
        if cause is not None:
            return ScriptEnded(cause.value, exit_code, number)
        return ScriptEnded(JobState.COMPLETED if code == 0 else JobState.FAILED, exit_code, number)


def _child(wanted: ScriptOrder, go: int, rejection: int, lock: int, supervisor: int, cgroup: Cgroup | None) -> None:
    """Wait for confirmation, then execute the script; never returns. `cgroup` is one still to be entered."""
    try:
        if cgroup is not None:
            enter(cgroup.directory)
        os.setsid()
        die_with_parent(supervisor)
        os.close(lock)
        if os.read(go, 1) != b"g":
            os._exit(CANNOT_EXECUTE)
        home = open_directory(wanted.home)
        identity = identity_of(home)
        os.close(home)
        account = account_for(wanted.accounts, wanted.order.user)
        order = wanted.order
        environment = environment_of(
            order,
            account,
            buffer=buffer_path(wanted.home, order),
            node=wanted.node,
            marker=f"{wanted.storage_id}.{order.job}",
            paths=wanted.paths,
        )
        script = os.path.join(wanted.home, STEPS, str(order.job), "script")
        become_script(
            script,
            order,
            account,
            environment,
            home=identity,
            wanted=wanted.process,
            ready=lambda: die_with_parent(supervisor),
        )
    except ScriptRefused as error:
        _refuse(rejection, error.exit_code, error.sentence)
    except BaseException as error:
        _refuse(rejection, CANNOT_EXECUTE, f"the script could not be started: {error}")
    finally:
        os._exit(CANNOT_EXECUTE)


def _refuse(rejection: int, exit_code: int, sentence: str) -> None:
    write_all(rejection, msgspec.json.encode((exit_code, failure(sentence).message)))


def retry_write(write: Callable[[], None], *, unless_ended: bool) -> bool:
    """Write a file, waiting for disk space as long as necessary.

    Returns False without writing if `unless_ended` and SIGTERM arrived meanwhile.

    Raises:
        OSError: The error has another cause than exhausted resources.
    """
    wait_s = DISK_FULL_RETRY_S
    while True:
        try:
            write()
            return True
        except OSError as error:
            if not is_resource_exhausted(error):
                raise
        received = signal.sigtimedwait(_BLOCKED, wait_s)
        if unless_ended and received is not None and received.si_signo == signal.SIGTERM:
            return False
        wait_s = min(DISK_FULL_RETRY_S_MAX, 2 * wait_s)


def main(arguments: list[str]) -> int:
    """Supervise the script of the record; return the exit code."""
    directory, lock_text, *says = arguments
    lock = int(lock_text)
    ignore_hangup()
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    for descriptor in (lock, *map(int, says)):
        os.set_inheritable(descriptor, False)
    steps, name = os.path.split(directory)
    record = ScriptRecord(open_directory(steps), int(name))
    wanted = record.order()
    if wanted is None or record.started_process() is not None or record.status() is not None:
        print(f"{directory}: the record has no script that may be started", file=sys.stderr)
        return 1
    me = ProcessName(pid=os.getpid(), started=start_time(os.getpid()) or 0, boot=boot_id())
    if not retry_write(lambda: record.write("supervisor.json", me), unless_ended=True):
        # The record still proves that the script never ran.
        return 0
    held_in = record.cgroup()
    cgroup = Cgroup.find(held_in)
    if held_in is not None and cgroup is None:
        print(f"{held_in.path}: the cgroup of the script no longer exists", file=sys.stderr)
        return 1
    ended = Supervisor(record, wanted, lock, cgroup).run()
    # No other process knows the result: keep trying to record it, even if told to end.
    retry_write(lambda: record.write("status.json", ended), unless_ended=False)
    if says:
        _sync(wanted, int(says[0]))
    return 0


def _sync(wanted: ScriptOrder, says: int) -> None:
    """Report the script's end, sync its data as post-run would, and report that; a missing reader is no error.

    Errors are found again, and reported, by the worker that post-run uses in that case.
    """
    with contextlib.suppress(OSError, FilesystemRefused, ImageFailed):
        os.write(says, ENDED)
        sync_written(wanted.home, wanted.order, switch=wanted.accounts == "switch")
        os.write(says, SYNCED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
