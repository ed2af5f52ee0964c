"""Buffer syncs performed by script supervisors, so that post-run needs no worker.

After recording the script's result, with none of its processes left, a supervisor writes ENDED to its pipe, syncs the
filesystem of the buffer, writes SYNCED and exits. That is all post-run has to do. A supervisor started by an earlier
agent has no reader, and a killed one writes nothing; post-run then uses a worker. It does so too if the sync is slow or
hangs, because only workers are timed and killed.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from forebay.cluster.agent.limits import SYNC_WAIT_S
from forebay.cluster.agent.processes import ENDED, SYNCED, ChildProcess
from forebay.cluster.agent.runtime.worker_watchdog import Handle


class BufferSync:
    """Pipe messages and exit of one supervisor."""

    def __init__(self, told: int, child: ChildProcess) -> None:
        """Start reading; takes ownership of the descriptor. `follow` waits for `child`."""
        self.ended = asyncio.Event()
        """Set once the script's result is recorded and none of its processes are left."""
        self._told = told
        self._child = child
        self._synced: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        os.set_blocking(told, False)
        asyncio.get_running_loop().add_reader(told, self._read_status)

    def has_ended(self) -> bool:
        """Return whether the supervisor has reported the script's end."""
        if not self._synced.done():
            self._read_status()
        return self.ended.is_set()

    def _read_status(self) -> None:
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
        """Return whether the buffer is synced; wait for it at most SYNC_WAIT_S seconds, or until `ending` is set."""
        if not self._synced.done():
            given_up = asyncio.ensure_future(ending.wait())
            waits: set[asyncio.Future[Any]] = {self._synced, given_up}
            await asyncio.wait(waits, timeout=SYNC_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            given_up.cancel()
        return self._synced.done() and self._synced.result()

    async def follow(self) -> None:
        """Wait for the supervisor to exit and reap it."""
        if self._child.poll() is not None:
            return
        handle = Handle(self._child.pid)
        try:
            await handle.wait()
            self._child.wait()
        finally:
            handle.close()

    def close(self) -> None:
        """Stop reading."""
        self._settle(False)


class BufferSyncs:
    """Buffer syncs in progress or not yet queried, by job."""

    def __init__(self) -> None:
        """Begin without syncs."""
        self._by_job: dict[int, BufferSync] = {}
        self._following: set[asyncio.Task[None]] = set()

    def take(self, job: int, sync: BufferSync) -> None:
        """Keep the messages of an ended script's supervisor until post-run; reap the supervisor in the background."""
        self.forget(job)
        self._by_job[job] = sync
        task = asyncio.get_running_loop().create_task(sync.follow(), name=f"sync {job}")
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def is_done(self, job: int, ending: asyncio.Event) -> bool:
        """Return whether the supervisor of the job's last script synced its buffer; can be called once per sync."""
        sync = self._by_job.pop(job, None)
        if sync is None:
            return False
        try:
            return await sync.wait(ending)
        finally:
            sync.close()

    def forget(self, job: int) -> None:
        """Discard a job's sync because its buffer has changed since, or will."""
        sync = self._by_job.pop(job, None)
        if sync is not None:
            sync.close()

    async def let_go(self) -> None:
        """Stop reading: the agent stops, and the supervisors exit by themselves."""
        for job in tuple(self._by_job):
            self.forget(job)
        following = list(self._following)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
