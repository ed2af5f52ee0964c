"""Syncs of jobs' buffers by those who supervised their scripts, so that post-run needs no process of its own.

A supervisor that has written down how its script ended, with nothing of it left, says ENDED on its pipe, syncs the file
system of the job's buffer, says SYNCED, and ends. That is all that post-run is to see to. A supervisor of an earlier
agent has nobody to say it to, and one that was killed says nothing: post-run has a worker then, as when a sync takes
long, or hangs, since only a worker is timed and ended.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from cluster.agent.home.worker_watchdog import Handle
from cluster.agent.limits import SYNC_WAIT_S
from cluster.agent.processes import ENDED, SYNCED, Process


class BufferSync:
    """What one supervisor says of its end, and its own end."""

    def __init__(self, told: int, child: Process) -> None:
        """Listen to it; takes the descriptor of the pipe. `child` is waited for in `follow`."""
        self.ended = asyncio.Event()
        """The status of the script is written, and nothing of it is left."""
        self._told = told
        self._child = child
        self._synced: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        os.set_blocking(told, False)
        asyncio.get_running_loop().add_reader(told, self._read)

    def has_ended(self) -> bool:
        """Whether it has said by now that the script has ended."""
        if not self._synced.done():
            self._read()
        return self.ended.is_set()

    def _read(self) -> None:
        try:
            said = os.read(self._told, 16)
        except BlockingIOError:
            return
        if ENDED in said:
            self.ended.set()
        if SYNCED in said:
            self._settle(True)
        elif not said:
            self._settle(False)

    def _settle(self, synced: bool) -> None:
        if not self._synced.done():
            self._synced.set_result(synced)
            asyncio.get_running_loop().remove_reader(self._told)
            os.close(self._told)

    async def wait(self, ending: asyncio.Event) -> bool:
        """Return whether the buffer is synced, at once where that is known, else within SYNC_WAIT_S seconds.

        No later than `ending` is set.
        """
        if not self._synced.done():
            given_up = asyncio.ensure_future(ending.wait())
            waits: set[asyncio.Future[Any]] = {self._synced, given_up}
            await asyncio.wait(waits, timeout=SYNC_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            given_up.cancel()
        return self._synced.done() and self._synced.result()

    async def follow(self) -> None:
        """Wait for the end of the supervisor, and let it go as a child."""
        if self._child.poll() is not None:
            return
        handle = Handle(self._child.pid)
        try:
            await handle.wait()
            self._child.wait()
        finally:
            handle.close()

    def close(self) -> None:
        """Listen no more."""
        self._settle(False)


class BufferSyncs:
    """Syncs that are under way or were not asked for yet, one a job."""

    def __init__(self) -> None:
        """Begin with none."""
        self._by_job: dict[int, BufferSync] = {}
        self._following: set[asyncio.Task[None]] = set()

    def take(self, job: int, sync: BufferSync) -> None:
        """Keep what the supervisor of a script that has ended says, until post-run asks; wait for its end beside it."""
        self.forget(job)
        self._by_job[job] = sync
        task = asyncio.get_running_loop().create_task(sync.follow(), name=f"sync {job}")
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def is_done(self, job: int, ending: asyncio.Event) -> bool:
        """Return whether the supervisor of the job's last script synced its buffer; it is asked once."""
        sync = self._by_job.pop(job, None)
        if sync is None:
            return False
        try:
            return await sync.wait(ending)
        finally:
            sync.close()

    def forget(self, job: int) -> None:
        """Whatever was synced, something else has been done with the buffer since, or will be."""
        sync = self._by_job.pop(job, None)
        if sync is not None:
            sync.close()

    async def let_go(self) -> None:
        """Listen to nobody any more: the agent ends, and they end by themselves."""
        for job in tuple(self._by_job):
            self.forget(job)
        following = list(self._following)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
