"""Watch over the buffers of running jobs: end a script whose buffer exceeds its capacity.

One process counts (`worker/usage_counter`), and each buffer has its own schedule. A buffer with a million files is
counted rarely and does not delay others. Data written after a count is noticed by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping

import msgspec

from forebay.cluster.agent.files import buffer_path, capacity
from forebay.cluster.agent.limits import WATCH_REST_TIMES, WATCH_S, WATCH_TIMEOUT_S
from forebay.cluster.agent.messages import format_bytes, format_count
from forebay.cluster.agent.processes import ChildProcess, cgroup_of_script
from forebay.cluster.agent.runtime import StateDirectory
from forebay.cluster.agent.script_run import ScriptRun
from forebay.cluster.agent.worker import Usage, UsageQuery, UsageReply, UsageRequest, blocks_of, inodes_of
from forebay.cluster.system import about

_DIRECTORIES = 100
"""Allowance for directories that exist in every buffer or are empty, count."""

logger = logging.getLogger(__name__)


class CapacityWatch:
    """Watch over the buffers of one agent's running scripts."""

    def __init__(self, home: StateDirectory, running: Callable[[], Mapping[int, ScriptRun]]) -> None:
        """Begin watching; `running` returns the running scripts by job."""
        self._home = home
        self._running = running
        self._tasks: dict[ScriptRun, asyncio.Task[None]] = {}
        self._took_s: dict[ScriptRun, float] = {}
        """Duration of each script's last count, seconds."""
        self._counter: _Counter | None = None
        self._staged: dict[int, int] = {}
        """Upper bound of files and directories that existed before the script, by job."""

    def note_staged_files(self, job: int, files: int) -> None:
        """Record how many files were staged in, which do not count against the script."""
        # There are at most as many non-empty directories as files.
        self._staged[job] = 2 * files + _DIRECTORIES

    def forget(self, job: int) -> None:
        """Forget a job that runs no more scripts here."""
        self._staged.pop(job, None)

    def follow(self) -> None:
        """Start watching every running script until it ends."""
        for run in self._running().values():
            if run not in self._tasks:
                self._tasks[run] = asyncio.get_running_loop().create_task(self._watch(run), name="capacity")

    async def stop(self) -> None:
        """Stop watching."""
        for task in (tasks := list(self._tasks.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, run: ScriptRun) -> None:
        try:
            # Most scripts end before a count is useful.
            await asyncio.sleep(WATCH_S)
            while self._running().get(run.order.job) is run:
                try:
                    await self._look(run)
                except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
                    job = run.order.job
                    logger.warning(
                        "job %s: the usage of its buffer cannot be counted, retrying: %s",
                        job,
                        error,
                        extra=about(job=job),
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
        is_refused = order.filesystem is None and self._home.capacity_control.word != capacity.WATCH
        most, base = inodes_of(capacity_bytes), self._staged.get(order.job)
        look = UsageQuery(
            path=buffer_path(str(self._home.path), order),
            # On a filesystem with quotas, usage exceeds the limit only if the owner moved files out of the project or
            # into another
            # subvolume.
            most_bytes=blocks_of(capacity_bytes) if is_refused else capacity_bytes,
            # A restarted agent does not know how many files existed before the script.
            most_inodes=2**62 if base is None else base + most,
            cgroup=cgroup_of_script(str(self._home.path), order.job),
        )
        usage = await self._count(run, look)
        if base is None:
            self._staged[order.job] = usage.inodes
        if usage.excess:
            reason = _reason(usage, capacity_bytes, look.most_inodes)
            logger.warning("job %s: %s; ending its script", order.job, reason, extra=about(job=order.job))
            run.overrun(reason)

    async def _count(self, run: ScriptRun, look: UsageQuery) -> Usage:
        """Have one buffer counted.

        Raises:
            OSError: The buffer cannot be counted.
            EOFError: The counting process ended.
            TimeoutError: The filesystem hangs.
        """
        if self._counter is None or self._counter.is_over:
            self._counter = _Counter(self._home)
        counter = self._counter
        try:
            answer = await asyncio.wait_for(counter.ask(look), WATCH_TIMEOUT_S)
        except TimeoutError:
            # The filesystem hangs, and with it the counting process.
            counter.end()
            raise
        self._took_s[run] = answer.took_s
        if answer.fault:
            raise OSError(answer.fault)
        return answer.usage


def rest_s(took_s: float, all_took_s: Iterable[float]) -> float:
    """Return the pause after a count, seconds; `all_took_s` are the durations of each buffer's last count.

    A buffer waits in proportion to the other counts, each capped at its own duration. All counts together therefore use
    1/WATCH_REST_TIMES of a processor, times at most the harmonic number of their count.
    """
    return max(WATCH_S, WATCH_REST_TIMES * sum(min(took_s, other_s) for other_s in all_took_s))


class _Counter:
    """Counting process and its pending requests."""

    def __init__(self, home: StateDirectory) -> None:
        self.is_over = False
        self._waiting: dict[int, asyncio.Future[UsageReply]] = {}
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
            self._process: ChildProcess = home.fork_server.spawn(
                "forebay.cluster.agent.worker.usage_counter",
                (str(os.getpid()),),
                descriptors=(),
                stdin=asked,
                stdout=answered,
                stderr=None,
                new_session=False,
                new_group=True,
            )
            ours.pop_all()
        # A hanging process must not block the event loop: a request is written at once or fails.
        os.set_blocking(self._asks, False)
        self._loop.add_reader(self._answers, self._read_replies)

    async def ask(self, look: UsageQuery) -> UsageReply:
        """Return the usage of a buffer.

        Raises:
            EOFError: The process ended first.
            OSError: The process accepts no more requests.
        """
        self._asked += 1
        answer: asyncio.Future[UsageReply] = self._loop.create_future()
        os.write(self._asks, msgspec.json.encode(UsageRequest(self._asked, look)) + b"\n")
        self._waiting[self._asked] = answer
        return await answer

    def end(self) -> None:
        """End the process; pending requests fail with EOFError."""
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
                answer.set_exception(EOFError("the process that counts buffer usage has ended"))

    def _read_replies(self) -> None:
        data = os.read(self._answers, 1 << 16)
        if not data:
            self.end()
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        for answer in (msgspec.json.decode(line, type=UsageReply) for line in lines):
            waiting = self._waiting.pop(answer.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)


def _reason(usage: Usage, capacity_bytes: int, most_inodes: int) -> str:
    """Return the reason for ending a script, for its user."""
    most = format_bytes(capacity_bytes)
    if usage.excess == "inodes":
        found = f"{format_count(usage.inodes, 'file')} (limit for {most}: {most_inodes})"
    elif usage.excess == "depth":
        found = "directories nested too deeply to be counted"
    elif usage.excess == "reserved":
        found = f"far more than {most} of blocks, although its files are smaller"
    else:
        found = f"at least {format_bytes(usage.size_bytes)} (limit: {most})"
    return f"ended because the job's buffer holds {found}; request more capacity or write less"
