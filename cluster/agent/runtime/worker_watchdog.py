"""Supervision of workers: time limits, progress checks, and termination within a second.

No signal ends a process that waits in the kernel for an unavailable filesystem. Such a process is recorded
(`HungWorkers`) and left alone; the agent continues, and operations on the same job's files wait for its lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from forebay.cluster.agent.limits import KILL_WAIT_S, POLLS_PER_STALL, WORKER_GRACE_S
from forebay.cluster.agent.processes import ChildProcess
from forebay.cluster.system import about, all_pids, fields_of

logger = logging.getLogger(__name__)

_STATES: Final = {b"D": "in a call that no signal ends", b"T": "stopped", b"Z": "dead"}


class WorkerLimits(NamedTuple):
    """Time limits of a worker."""

    limit_s: float | None = None
    """Total time, seconds; None for no limit."""
    stall_s: float | None = None
    """Longest time without progress, seconds; None for no limit."""
    grace_s: float = WORKER_GRACE_S
    """Time to exit after SIGTERM, seconds."""


class WorkerEnd(NamedTuple):
    """Outcome of supervising a worker."""

    late: str = ""
    """Reason for ending it, for example "took longer than 5 s"; empty if it was not late."""
    hangs: str = ""
    """Kernel location of a process that did not even end when killed; empty if all ended."""


class HungWorkers:
    """Workers that cannot be killed because they hang in the kernel."""

    def __init__(self) -> None:
        """Begin without processes."""
        self._waiting: dict[asyncio.Task[None], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def of(self, job: int) -> list[int]:
        """Return the process IDs recorded for a job."""
        return sorted(pid for owner, pid in self._waiting.values() if owner == job)

    def take(self, job: int, handle: Handle, pid: int, process: ChildProcess | None = None) -> None:
        """Wait for a process in the background; takes ownership of the handle. `process` is given for a child."""
        task = asyncio.get_running_loop().create_task(self._wait(job, handle, pid, process), name=f"hung {pid}")
        self._waiting[task] = (job, pid)
        task.add_done_callback(self._waiting.pop)

    async def _wait(self, job: int, handle: Handle, pid: int, process: ChildProcess | None) -> None:
        try:
            await handle.wait()
            if process is not None:
                process.wait()
            logger.info("job %s: process %s, which hung in the kernel, has ended", job, pid, extra=about(job=job))
        finally:
            handle.close()

    async def take_what_stays(self, job: int, pids: Iterable[int]) -> str:
        """Wait KILL_WAIT_S for killed processes, which need not be children, and record the remaining ones; return
        their locations.
        """
        handles: dict[int, Handle] = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                handles[pid] = Handle(pid)
        if handles:
            await asyncio.wait([asyncio.ensure_future(handle.wait(KILL_WAIT_S)) for handle in handles.values()])
        where = []
        for pid, handle in handles.items():
            if handle.has_ended:
                handle.close()
            else:
                where.append(kernel_location(pid))
                self.take(job, handle, pid)
        return "; ".join(where)

    async def let_go(self) -> None:
        """Stop waiting: the agent stops, and the processes become children of another process."""
        tasks = list(self._waiting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def supervise(
    worker: ChildProcess,
    job: int,
    ending: asyncio.Event,
    bounds: WorkerLimits,
    hung: HungWorkers,
    *,
    signs: Callable[[], object],
    stop: Callable[[], None],
) -> WorkerEnd:
    """Wait for a worker; end it with its process group when it is late or `ending` is set.

    `signs` returns a value that changes with progress. `stop` asks the worker to stop before it is signalled. The
    worker must lead its own process group.

    Raises:
        OSError: The worker cannot be watched, and was killed.
    """
    try:
        handle = Handle(worker.pid)
    except OSError:
        _kill_group(worker.pid)
        worker.wait()
        raise
    try:
        late = await _wait(handle, ending, bounds, signs)
        orderly = handle.has_ended and _exit_code(worker.pid) == 0
        if not handle.has_ended:
            stop()
            handle.send(signal.SIGTERM)
            await handle.wait(bounds.grace_s)
        if not handle.has_ended:
            _kill_group(worker.pid)
            await handle.wait(KILL_WAIT_S)
    except BaseException:
        _kill_group(worker.pid)
        handle.close()
        raise
    if not handle.has_ended:
        where = kernel_location(worker.pid)
        hung.take(job, handle, worker.pid, worker)
        return WorkerEnd(late, where)
    handle.close()
    try:
        # The worker is not reaped yet, so its ID still identifies its group: kill helpers that outlived it or hang.
        _kill_group(worker.pid)
        where = "" if orderly else await hung.take_what_stays(job, _members(worker.pid))
    finally:
        worker.wait()
    return WorkerEnd(late, where)


async def _wait(handle: Handle, ending: asyncio.Event, bounds: WorkerLimits, signs: Callable[[], object]) -> str:
    """Wait until the worker ends or `ending` is set, and return ""; or until it is late, and return the reason."""
    loop = asyncio.get_running_loop()
    begun_s = alive_s = loop.time()
    seen = signs()
    over, wanted = asyncio.ensure_future(handle.wait()), asyncio.ensure_future(ending.wait())
    try:
        while True:
            waits = [] if bounds.limit_s is None else [max(0.0, begun_s + bounds.limit_s - loop.time())]
            waits += [] if bounds.stall_s is None else [bounds.stall_s / POLLS_PER_STALL]
            done, _ = await asyncio.wait(
                {over, wanted}, timeout=min(waits, default=None), return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return ""
            now_s = loop.time()
            if bounds.limit_s is not None and now_s - begun_s >= bounds.limit_s:
                return f"took longer than {bounds.limit_s:g} s"
            if bounds.stall_s is not None:
                found = signs()
                if found != seen:
                    seen, alive_s = found, now_s
                elif now_s - alive_s >= bounds.stall_s:
                    return f"made no progress for {bounds.stall_s:g} s"
    finally:
        over.cancel()
        wanted.cancel()


def kernel_location(pid: int) -> str:
    """Describe the location of a process, for example `process 12 is in a call that no signal ends
    (rpc_wait_bit_killable)`.
    """
    fields = fields_of(pid)
    state = "running" if fields is None else _STATES.get(fields[0], "running")
    where = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        where = file.read(256).strip("0\n")
    return f"process {pid} is {state}{f' ({where})' if where else ''}"


def _exit_code(child: int) -> int:
    """Return the exit code of an ended child without reaping it; negative for a signal."""
    found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _members(leader: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for pid in all_pids():
        fields = fields_of(pid)
        if fields is not None and fields[0] not in (b"Z", b"X") and int(fields[2]) == leader:
            found.append(pid)
    return found


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class Handle:
    """Process held by a pidfd, so that it can be awaited and signalled even if its ID is reused."""

    def __init__(self, pid: int) -> None:
        """Open the process.

        Raises:
            ProcessLookupError: There is no such process.
        """
        self._descriptor = os.pidfd_open(pid)
        self._pid = pid
        self._over = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_exit)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        if not self._over.done():
            self._over.set_result(None)

    @property
    def has_ended(self) -> bool:
        """True once the process is known to have ended."""
        return self._over.done()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the process to end; return False after `timeout_s` seconds."""
        done, _ = await asyncio.wait({self._over}, timeout=timeout_s)
        return bool(done)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def awaits(self, *numbers: signal.Signals) -> bool:
        """Return whether any of these signals is still pending. The kernel delivers pending signals by number, not in
        order.
        """
        with contextlib.suppress(OSError):
            with open(f"/proc/{self._pid}/status", "rb") as file:
                found = re.search(rb"^ShdPnd:\s*([0-9a-f]+)$", file.read(), re.MULTILINE)
            # Until the process is known to have ended, its ID is its own.
            return found is not None and any(int(found[1], 16) >> number - 1 & 1 for number in numbers)
        return False

    def close(self) -> None:
        """Close the handle."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
