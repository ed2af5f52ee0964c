"""One operation as the agent sees it: a worker that is started, watched, timed and, if need be, ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator

import msgspec

from cluster.agent.accounts import Mode
from cluster.agent.durable import write_all
from cluster.agent.home import Home
from cluster.agent.limits import LOCK_RETRY_S, RESULT_BYTES_MAX, WORKER_GRACE_S
from cluster.agent.progress import Counters, SharedCounters
from cluster.agent.spawning import spawn
from cluster.agent.waiting import Handle
from cluster.agent.work import Outcome, Work, failure
from replica.commands import OperationDone, OperationFailed
from replica.orders import Order


class Operation:
    """One worker for one order."""

    def __init__(self, home: Home, order: Order, accounts: Mode, copy_rate_bytes_s: int) -> None:
        """Prepare; nothing is started yet."""
        self._home = home
        self._order = order
        self._accounts: Mode = accounts
        self._copy_rate_bytes_s = copy_rate_bytes_s
        self._ending = asyncio.Event()
        self._counters: SharedCounters | None = None
        self._last = Counters()

    def end(self) -> None:
        """Have the worker ended; `run` then returns None."""
        self._ending.set()

    def counters(self) -> Counters:
        """Return how far it is."""
        if self._counters is not None:
            self._last = self._counters.read()
        return self._last

    async def run(self) -> Outcome | None:
        """Do the operation and return its result, or None if it was ended."""
        name = str(self._order.job)
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._home.operations)
        try:
            if not await self._locked(lock):
                return None
            result = await self._work(lock)
            os.unlink(name, dir_fd=self._home.operations)
            return result
        finally:
            os.close(lock)

    async def _locked(self, lock: int) -> bool:
        """Wait until no worker of an agent before this one holds the job: its kernel may still be ending it."""
        while not self._ending.is_set():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), LOCK_RETRY_S)
        return False

    async def _work(self, lock: int) -> Outcome | None:
        progress = SharedCounters.create()
        self._counters = SharedCounters(progress)
        try:
            work = Work(
                order=self._order,
                home=str(self._home.path),
                storage_id=self._home.storage_id,
                accounts=self._accounts,
                copy_rate_bytes_s=self._copy_rate_bytes_s,
                progress=progress,
                agent=os.getpid(),
            )
            # In files and not pipes: nobody has to read while the other writes.
            with _memory("forebay-work") as told, _memory("forebay-result") as said:
                write_all(told, msgspec.json.encode(work))
                os.lseek(told, 0, os.SEEK_SET)
                try:
                    worker = spawn(
                        "cluster.agent.worker",
                        (),
                        descriptors=(progress, lock),
                        stdin=told,
                        stdout=said,
                        stderr=None,
                        new_session=False,
                    )
                except OSError as error:
                    return failure(f"the worker of {self._order.stage} could not be started: {error.strerror}")
                why = await self._watch(worker)
                if self._ending.is_set():
                    return None
                return _result(worker.returncode, os.pread(said, RESULT_BYTES_MAX + 1, 0), self._order, why)
        finally:
            self.counters()
            counters, self._counters = self._counters, None
            counters.close()
            os.close(progress)

    async def _watch(self, worker: subprocess.Popen[bytes]) -> str:
        """Wait for the worker, ending it when it is over its time or not wanted; return why it was ended, if it was."""
        handle = Handle(worker.pid)
        why = ""
        try:
            over = asyncio.ensure_future(handle.wait())
            ending = asyncio.ensure_future(self._ending.wait())
            try:
                await asyncio.wait(
                    {over, ending}, timeout=self._order.timeout_s or None, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                over.cancel()
                ending.cancel()
            if not handle.over:
                why = f"{self._order.stage} took longer than {self._order.timeout_s} s and was ended"
                handle.send(signal.SIGTERM)
                if not await handle.wait(WORKER_GRACE_S):
                    handle.send(signal.SIGKILL)
                    await handle.wait()
        except BaseException:
            handle.send(signal.SIGKILL)
            raise
        finally:
            handle.close()
            worker.wait()
        return why


def _result(code: int, data: bytes, order: Order, why: str) -> Outcome:
    if why:
        return failure(why)
    if code == 0 and len(data) <= RESULT_BYTES_MAX:
        try:
            return msgspec.json.decode(data, type=OperationDone | OperationFailed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return failure(f"the worker of {order.stage} gave no result that can be read: {error}")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return failure(f"the worker of {order.stage} {how} before it had a result; the agent's log may say why")


@contextlib.contextmanager
def _memory(name: str) -> Iterator[int]:
    """Give an anonymous file in memory."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
