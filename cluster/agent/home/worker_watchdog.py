"""Seeing a worker through to its end: its time, its signs of life, and ending it within a second, whatever it hangs in.

A process that waits in the kernel for a file system that is gone cannot be ended by any signal. It is left to itself
then, and known (`Hung`): the agent goes on, and what needs the same job's files waits for the lock that it holds.
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

from cluster.agent.limits import KILL_WAIT_S, POLLS_PER_STALL, WORKER_GRACE_S
from cluster.agent.processes import Process
from cluster.system import about, all_pids, fields_of

logger = logging.getLogger(__name__)

_STATES: Final = {b"D": "in a call that no signal ends", b"T": "stopped", b"Z": "dead"}


class Bounds(NamedTuple):
    """When a worker is late."""

    limit_s: float | None = None
    """How long it may take, seconds; None: as long as it likes."""
    stall_s: float | None = None
    """How long it may show no sign of life, seconds; None: as long as it likes."""
    grace_s: float = WORKER_GRACE_S
    """How long it may take to end when it is told to, seconds."""


class End(NamedTuple):
    """How a worker came to its end."""

    late: str = ""
    """Why it was ended: "took longer than 5 s", "made no progress for 5 s"; empty if it was not, or nobody wants it."""
    hangs: str = ""
    """Where it hangs in the kernel, if it did not even end then."""


class Hung:
    """Workers that could not be ended: they hang in the kernel until what they wait for comes back."""

    def __init__(self) -> None:
        """Begin with none."""
        self._waiting: dict[asyncio.Task[None], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def of(self, job: int) -> list[int]:
        """Return the process ids of those of a job."""
        return sorted(pid for owner, pid in self._waiting.values() if owner == job)

    def take(self, job: int, handle: Handle, pid: int, process: Process | None = None) -> None:
        """Wait for the end of a process beside everything else; takes the handle. `process` if it is a child."""
        task = asyncio.get_running_loop().create_task(self._wait(job, handle, pid, process), name=f"hung {pid}")
        self._waiting[task] = (job, pid)
        task.add_done_callback(self._waiting.pop)

    async def _wait(self, job: int, handle: Handle, pid: int, process: Process | None) -> None:
        try:
            await handle.wait()
            if process is not None:
                process.wait()
            logger.info("job %s: process %s, which hung in the kernel, has ended", job, pid, extra=about(job=job))
        finally:
            handle.close()

    async def take_what_stays(self, job: int, pids: Iterable[int]) -> str:
        """Wait KILL_WAIT_S for processes that were killed, which need not be children, and know those that stay; return
        where these are, or nothing."""
        handles: dict[int, Handle] = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                handles[pid] = Handle(pid)
        if handles:
            await asyncio.wait([asyncio.ensure_future(handle.wait(KILL_WAIT_S)) for handle in handles.values()])
        where = []
        for pid, handle in handles.items():
            if handle.over:
                handle.close()
            else:
                where.append(whereabouts(pid))
                self.take(job, handle, pid)
        return "; ".join(where)

    async def let_go(self) -> None:
        """Wait for none of them any more: the agent ends, and they are others' children."""
        tasks = list(self._waiting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def see_through(
    worker: Process,
    job: int,
    ending: asyncio.Event,
    bounds: Bounds,
    hung: Hung,
    *,
    signs: Callable[[], object],
    stop: Callable[[], None],
) -> End:
    """Wait for a worker, ending it and its process group when it is late or `ending` is set.

    `signs` returns something that changes while it advances, `stop` tells it to stop before it is signalled. The worker
    leads a process group of its own. OSError if it cannot be watched; it is killed then.
    """
    try:
        handle = Handle(worker.pid)
    except OSError:
        _kill_group(worker.pid)
        worker.wait()
        raise
    try:
        late = await _wait(handle, ending, bounds, signs)
        orderly = handle.over and _exit_code(worker.pid) == 0
        if not handle.over:
            stop()
            handle.send(signal.SIGTERM)
            await handle.wait(bounds.grace_s)
        if not handle.over:
            _kill_group(worker.pid)
            await handle.wait(KILL_WAIT_S)
    except BaseException:
        _kill_group(worker.pid)
        handle.close()
        raise
    if not handle.over:
        where = whereabouts(worker.pid)
        hung.take(job, handle, worker.pid, worker)
        return End(late, where)
    handle.close()
    try:
        # Not reaped yet, so its number still means its group: helpers that outlived it, and may hang where it did not.
        _kill_group(worker.pid)
        where = "" if orderly else await hung.take_what_stays(job, _members(worker.pid))
    finally:
        worker.wait()
    return End(late, where)


async def _wait(handle: Handle, ending: asyncio.Event, bounds: Bounds, signs: Callable[[], object]) -> str:
    """Wait until the worker has ended, is to be ended (both return nothing) or is late, and return why it is late."""
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


def whereabouts(pid: int) -> str:
    """Return where a process is: `process 12 is in a call that no signal ends (rpc_wait_bit_killable)`."""
    fields = fields_of(pid)
    state = "running" if fields is None else _STATES.get(fields[0], "running")
    where = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        where = file.read(256).strip("0\n")
    return f"process {pid} is {state}{f' ({where})' if where else ''}"


def _exit_code(child: int) -> int:
    """Return how a child that has ended did so, and leave it to be reaped; negative for a signal."""
    found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _members(leader: int) -> list[int]:
    """Return the living processes of a group."""
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
    """A process held by a descriptor: it can be waited for and signalled, and never comes to mean another one."""

    def __init__(self, pid: int) -> None:
        """Hold the process; ProcessLookupError if there is none."""
        self._descriptor = os.pidfd_open(pid)
        self._pid = pid
        self._over = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._descriptor, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        if not self._over.done():
            self._over.set_result(None)

    @property
    def over(self) -> bool:
        """Whether the process is known to have ended."""
        return self._over.done()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; False if it lives on after `timeout_s` seconds."""
        done, _ = await asyncio.wait({self._over}, timeout=timeout_s)
        return bool(done)

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def awaits(self, *numbers: signal.Signals) -> bool:
        """Return whether it has not taken all of these signals that it was sent: those that wait are taken by their
        numbers, and not in their order.
        """
        with contextlib.suppress(OSError):
            with open(f"/proc/{self._pid}/status", "rb") as file:
                found = re.search(rb"^ShdPnd:\s*([0-9a-f]+)$", file.read(), re.MULTILINE)
            # While it is not known to have ended, the number is its own.
            return found is not None and any(int(found[1], 16) >> number - 1 & 1 for number in numbers)
        return False

    def close(self) -> None:
        """Let go of it."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
