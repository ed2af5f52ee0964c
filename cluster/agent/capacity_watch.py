"""The watch over what running jobs write: a script whose buffer holds more than it may is ended, with the reason.

One process counts (`worker/usage_counter`), one buffer at a time, and rests in between for a multiple of what counting
took: so the watch costs a small part of one processor however much there is to count. What is written within a round is
seen at its end; what was removed and is still open is not seen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping

import msgspec

from cluster.agent.files import buffer_path, capacity
from cluster.agent.home import Home
from cluster.agent.limits import WATCH_REST_TIMES, WATCH_S, WATCH_TIMEOUT_S
from cluster.agent.messages import count, figure
from cluster.agent.processes import Process
from cluster.agent.script_run import ScriptRun
from cluster.agent.worker import Look, Usage, blocks_of, inodes_of
from cluster.system import Clock, about, write_all

_DIRECTORIES = 100
"""Directories that there are in any buffer, and some that are empty, count."""

logger = logging.getLogger(__name__)


class CapacityWatch:
    """Watch over the buffers of one agent's running scripts."""

    def __init__(self, home: Home, clock: Clock, running: Callable[[], Mapping[int, ScriptRun]]) -> None:
        """Begin; `running` returns the scripts that run at the moment, by job."""
        self._home = home
        self._clock = clock
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._counter: Process | None = None
        self._asks = self._answers = -1
        """Ends of the pipes to and from the process that counts."""
        self._staged: dict[int, int] = {}
        """By job: how many files and directories were there before its script, at most."""

    def staged(self, job: int, files: int) -> None:
        """Take note of how many files a job begins with, which its script did not make."""
        # As many directories are as many as there can be without empty ones.
        self._staged[job] = 2 * files + _DIRECTORIES

    def forget(self, job: int) -> None:
        """A job will run no script here any more."""
        self._staged.pop(job, None)

    def follow(self) -> None:
        """See that whatever runs is watched from now on, for as long as anything does."""
        if self._running() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._watch(), name="capacity")

    async def stop(self) -> None:
        """Watch nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end_counter()

    async def _watch(self) -> None:
        try:
            # Most scripts are over before there is anything to count.
            await asyncio.sleep(WATCH_S)
            while running := self._running():
                began_s = self._clock.monotonic_s()
                for run in running.values():
                    try:
                        await self._look(run)
                    except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
                        logger.warning("what buffers hold cannot be counted, it is tried again: %s", error)
                        self._end_counter()
                await asyncio.sleep(max(WATCH_S, WATCH_REST_TIMES * (self._clock.monotonic_s() - began_s)))
        finally:
            self._end_counter()

    async def _look(self, run: ScriptRun) -> None:
        order = run.order
        capacity_bytes = order.capacity_bytes if order.pool_is_bytes and order.provision is None else 0
        if not capacity_bytes or run.is_overrun:
            return
        is_refused = order.place is None and self._home.capacity_control.word != capacity.WATCH
        most, base = inodes_of(capacity_bytes), self._staged.get(order.job)
        look = Look(
            path=buffer_path(str(self._home.path), order),
            # Whose file system refuses more is only here if he took files out of their project or into a subvolume of
            # his own, as their owner may.
            most_bytes=blocks_of(capacity_bytes) if is_refused else capacity_bytes,
            # An agent that came later does not know what was there before the script.
            most_inodes=2**62 if base is None else base + most,
        )
        usage = await asyncio.wait_for(self._ask(look), WATCH_TIMEOUT_S)
        if base is None:
            self._staged[order.job] = usage.inodes
        if usage.excess:
            reason = _reason(usage, capacity_bytes, look.most_inodes)
            logger.warning("job %s: %s; its script is ended", order.job, reason, extra=about(job=order.job))
            run.overrun(reason)

    async def _ask(self, look: Look) -> Usage:
        """Have one buffer counted. OSError or EOFError if that cannot be done."""
        if self._counter is None:
            self._start_counter()
        write_all(self._asks, msgspec.json.encode(look) + b"\n")
        return msgspec.json.decode(await _line_of(self._answers), type=Usage)

    def _start_counter(self) -> None:
        with contextlib.ExitStack() as held:
            asked, asks = os.pipe2(os.O_CLOEXEC)
            held.callback(os.close, asked)
            ours = contextlib.ExitStack()
            held.push(ours)
            ours.callback(os.close, asks)
            answers, answered = os.pipe2(os.O_CLOEXEC)
            held.callback(os.close, answered)
            ours.callback(os.close, answers)
            self._counter = self._home.fork_server.spawn(
                "cluster.agent.worker.usage_counter",
                (str(os.getpid()),),
                descriptors=(),
                stdin=asked,
                stdout=answered,
                stderr=None,
                new_session=False,
                new_group=True,
            )
            ours.pop_all()
            self._asks, self._answers = asks, answers

    def _end_counter(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            os.close(self._asks)
            os.close(self._answers)
            counter.kill()
            counter.wait()


async def _line_of(descriptor: int) -> bytes:
    """Return the line that is written next; it is short, and written at once. EOFError if there comes none."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
    line = os.read(descriptor, 4096)
    if not line.endswith(b"\n"):
        raise EOFError("the process that counts has ended")
    return line


def _settle(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _reason(usage: Usage, capacity_bytes: int, most_inodes: int) -> str:
    """Return why a script is ended, for its user."""
    most = figure(capacity_bytes)
    if usage.excess == "inodes":
        found = f"{count(usage.inodes, 'file')}, and {most} may hold {most_inodes}"
    elif usage.excess == "depth":
        found = "directories so deep in each other that they cannot be counted"
    elif usage.excess == "reserved":
        found = f"far more than {most} of blocks, though its files are smaller"
    else:
        found = f"{figure(usage.size_bytes)} or more, and may hold {most}"
    return f"ended because the job's buffer holds {found}; ask for more capacity, or write less"
