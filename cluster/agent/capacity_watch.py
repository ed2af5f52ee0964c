"""The watch over what running jobs write: a script whose buffer holds more than it may is ended, with the reason.

One process counts (`worker/usage_counter`), and each buffer has times of its own: a buffer with a million files is
counted seldom, and makes no other one wait. What is written between two counts is seen at the second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping

import msgspec

from cluster.agent.files import buffer_path, capacity
from cluster.agent.home import Home
from cluster.agent.limits import WATCH_REST_TIMES, WATCH_S, WATCH_TIMEOUT_S
from cluster.agent.messages import count, figure
from cluster.agent.processes import Process, cgroup_of_script
from cluster.agent.script_run import ScriptRun
from cluster.agent.worker import Answered, Asked, Look, Usage, blocks_of, inodes_of
from cluster.system import about

_DIRECTORIES = 100
"""Directories that there are in any buffer, and some that are empty, count."""

logger = logging.getLogger(__name__)


class CapacityWatch:
    """Watch over the buffers of one agent's running scripts."""

    def __init__(self, home: Home, running: Callable[[], Mapping[int, ScriptRun]]) -> None:
        """Begin; `running` returns the scripts that run at the moment, by job."""
        self._home = home
        self._running = running
        self._tasks: dict[ScriptRun, asyncio.Task[None]] = {}
        self._took_s: dict[ScriptRun, float] = {}
        """Seconds that the last count of each took."""
        self._counter: _Counter | None = None
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
        """See that each script that runs is watched from now on, until it has ended."""
        for run in self._running().values():
            if run not in self._tasks:
                self._tasks[run] = asyncio.get_running_loop().create_task(self._watch(run), name="capacity")

    async def stop(self) -> None:
        """Watch nothing any more."""
        for task in (tasks := list(self._tasks.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, run: ScriptRun) -> None:
        try:
            # Most scripts are over before there is anything to count.
            await asyncio.sleep(WATCH_S)
            while self._running().get(run.order.job) is run:
                try:
                    await self._look(run)
                except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
                    job = run.order.job
                    logger.warning(
                        "what the buffer of job %s holds is counted later: %s", job, error, extra=about(job=job)
                    )
                await asyncio.sleep(rest_s(self._took_s.get(run, 0.0), self._took_s.values()))
        finally:
            del self._tasks[run]
            self._took_s.pop(run, None)
            if not self._tasks and self._counter is not None:
                self._counter.end()
                self._counter = None

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
            cgroup=cgroup_of_script(str(self._home.path), order.job),
        )
        usage = await self._count(run, look)
        if base is None:
            self._staged[order.job] = usage.inodes
        if usage.excess:
            reason = _reason(usage, capacity_bytes, look.most_inodes)
            logger.warning("job %s: %s; its script is ended", order.job, reason, extra=about(job=order.job))
            run.overrun(reason)

    async def _count(self, run: ScriptRun, look: Look) -> Usage:
        """Have one buffer counted. OSError, EOFError or TimeoutError if that cannot be done."""
        if self._counter is None or self._counter.is_over:
            self._counter = _Counter(self._home)
        counter = self._counter
        try:
            answer = await asyncio.wait_for(counter.ask(look), WATCH_TIMEOUT_S)
        except TimeoutError:
            # Its file system hangs, and so does the process.
            counter.end()
            raise
        self._took_s[run] = answer.took_s
        if answer.fault:
            raise OSError(answer.fault)
        return answer.usage


def rest_s(took_s: float, all_took_s: Iterable[float]) -> float:
    """Return how long a buffer is not counted after a count, seconds; `all_took_s`: what the last count of each took.

    It rests for the counts of others as far as they are no longer than its own: so however many there are, all counts
    together take 1/WATCH_REST_TIMES of a processor, times the harmonic number of their count at most.
    """
    return max(WATCH_S, WATCH_REST_TIMES * sum(min(took_s, other_s) for other_s in all_took_s))


class _Counter:
    """The process that counts, and those who wait for its answers."""

    def __init__(self, home: Home) -> None:
        self.is_over = False
        self._waiting: dict[int, asyncio.Future[Answered]] = {}
        self._asked, self._begun = 0, b""
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as held:
            asked, self._asks = os.pipe2(os.O_CLOEXEC)
            held.callback(os.close, asked)
            ours = contextlib.ExitStack()
            held.push(ours)
            ours.callback(os.close, self._asks)
            self._answers, answered = os.pipe2(os.O_CLOEXEC)
            held.callback(os.close, answered)
            ours.callback(os.close, self._answers)
            self._process: Process = home.fork_server.spawn(
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
        # A counter that hangs must not hold the agent's loop: a line is written at once, or not at all.
        os.set_blocking(self._asks, False)
        self._loop.add_reader(self._answers, self._read)

    async def ask(self, look: Look) -> Answered:
        """Return what a buffer holds. EOFError if the process ends before; OSError if it takes no more."""
        self._asked += 1
        answer: asyncio.Future[Answered] = self._loop.create_future()
        os.write(self._asks, msgspec.json.encode(Asked(self._asked, look)) + b"\n")
        self._waiting[self._asked] = answer
        return await answer

    def end(self) -> None:
        """End the process; those who wait get EOFError."""
        if self.is_over:
            return
        self.is_over = True
        self._loop.remove_reader(self._answers)
        os.close(self._asks)
        os.close(self._answers)
        self._process.kill()
        self._process.wait()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EOFError("the process that counts has ended"))

    def _read(self) -> None:
        data = os.read(self._answers, 1 << 16)
        if not data:
            self.end()
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        for answer in (msgspec.json.decode(line, type=Answered) for line in lines):
            waiting = self._waiting.pop(answer.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)


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
