"""One operation as the agent sees it: a worker that is started, watched, timed and, if need be, ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Final

import msgspec

from cluster.agent import leftovers
from cluster.agent.accounts import Mode
from cluster.agent.durable import FileRefused, is_disk_full, write_all
from cluster.agent.home import Home
from cluster.agent.limits import LOCK_RETRY_S, RESULT_BYTES_MAX, SWEEP_TIMEOUT_S, WORKER_GRACE_S
from cluster.agent.processes import OPERATION_VARIABLE, kill_operation
from cluster.agent.progress import Counters, SharedCounters
from cluster.agent.room import GivenUp
from cluster.agent.sentences import count, order_named
from cluster.agent.spawning import spawn
from cluster.agent.waiting import Handle
from cluster.agent.work import Outcome, Work, failure
from cluster.providers.interface import NO_LOCAL, Local
from replica.commands import OperationDone, OperationFailed
from replica.orders import Order

logger = logging.getLogger(__name__)

_ATTEMPT_BYTES: Final = 20
"""Length of an attempt's number in the file of a lock, bytes."""

PROVIDER_SLACK_S: Final = 30
"""What a worker may take beside the time of its operations, seconds: less than the leader allows the whole stage."""


class Operation:
    """One worker for one order."""

    def __init__(
        self,
        home: Home,
        order: Order,
        accounts: Mode,
        copy_rate_bytes_s: int,
        local: Local = NO_LOCAL,
        node: str = "",
    ) -> None:
        """Prepare; nothing is started yet."""
        self._home = home
        self._order = order
        self._accounts: Mode = accounts
        self._copy_rate_bytes_s = copy_rate_bytes_s
        self._local = local
        self._node = node
        self._ending = asyncio.Event()
        self._counters: SharedCounters | None = None
        self._last = Counters()
        self._orderly = False
        """Whether the last worker came to its own end, and so removed whatever it had to remove."""

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
        home, name = self._home, str(self._order.job)
        try:
            lock = await home.room.keep_trying(order_named(self._order), self._open_lock, self._ending)
        except GivenUp:
            return None
        try:
            if not await self._locked(lock):
                return None
            if self._order.provision is not None:
                await self._succeed(lock)
            result = await self._do(lock)
            home.spares.drop(home.operations, name)
            return result
        except GivenUp:
            return None
        finally:
            os.close(lock)

    def _open_lock(self) -> int:
        name, directory = str(self._order.job), self._home.operations
        how = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, how | os.O_CREAT, 0o600, dir_fd=directory)
        except OSError as error:
            # Not even an empty file can be made: a spare one will do, whatever is in it.
            if not is_disk_full(error) or not self._home.spares.lend(directory, name):
                raise
            return os.open(name, how, dir_fd=directory)

    async def _do(self, lock: int) -> Outcome | None:
        """With the lock held: do the operation, and whatever an earlier one left undone before it."""
        home, order = self._home, self._order
        if order.provision is not None:
            try:
                return await self._work(order, lock)
            finally:
                if not self._orderly:
                    await asyncio.to_thread(kill_operation, self._marker(order.attempt))
        if order.stage in (leftovers.SWEEP, "stage_out", "teardown"):
            swept = await self._sweep(lock)
            if order.stage == leftovers.SWEEP or self._ending.is_set():
                return swept
            if order.stage == "stage_out" and isinstance(swept, OperationFailed) and not swept.final:
                # The same directory cannot be written to either, and another must not take its place in the record.
                return swept
        if order.stage != "stage_out":
            return await self._work(order, lock)
        left = await home.room.keep_trying(
            order_named(order), lambda: leftovers.begin(home.leftovers, home.spares, order), self._ending
        )
        try:
            result = await self._work(order, lock, left)
        finally:
            os.close(left)
        if self._orderly:
            leftovers.forget(home.leftovers, home.spares, order.job)
        return result

    async def _sweep(self, lock: int) -> Outcome | None:
        """Remove what a stage-out that was killed left in a destination; None if nothing was, or if it was ended."""
        home, job = self._home, self._order.job
        try:
            left = leftovers.read(home.leftovers, job)
        except FileRefused as error:
            logger.error("job %s: %s", job, error)
            return None
        if left is None:
            return None
        order = Order(
            job=job,
            attempt=self._order.attempt,
            stage=leftovers.SWEEP,
            user=left.whose.user,
            name="",
            workdir="",
            roots=left.whose.roots,
            timeout_s=SWEEP_TIMEOUT_S,
        )
        result = await self._work(order, lock, directory=left.directory)
        match result:
            case OperationDone(files):
                leftovers.forget(home.leftovers, home.spares, job)
                if files:
                    logger.info(
                        "job %s: removed %s of a stage_out that was killed", job, count(files, "temporary file")
                    )
            case OperationFailed(message, final):
                logger.warning(
                    "job %s: what a killed stage_out left cannot be removed: %s; %s",
                    job,
                    message,
                    f"remove .forebay-{job}-*.part there by hand" if final else "it is tried again later",
                )
                if final:
                    leftovers.forget(home.leftovers, home.spares, job)
        return result

    async def _locked(self, lock: int) -> bool:
        """Wait until no worker of an agent before this one holds the job: its kernel may still be ending it."""
        while not self._ending.is_set():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), LOCK_RETRY_S)
        return False

    async def _succeed(self, lock: int) -> None:
        """With the lock held: end what an operation left that was interrupted with its agent, and take its place.

        The file of the lock says whose place that is. It is there for as long as an operation has not come to its end.
        """
        home = self._home
        interrupted = os.pread(lock, _ATTEMPT_BYTES, 0).strip(b"\0 ")
        if interrupted.isdigit():
            left = await asyncio.to_thread(kill_operation, self._marker(int(interrupted)))
            if left:
                logger.error("job %s: processes %s of an earlier operation cannot be killed", self._order.job, left)
        mine = str(self._order.attempt).encode().ljust(_ATTEMPT_BYTES)
        await home.room.keep_trying(order_named(self._order), lambda: _write_at_start(lock, mine), self._ending)

    def _marker(self, attempt: int) -> str:
        return f"{self._home.marker(self._order.job)}.{attempt}"

    async def _work(self, order: Order, lock: int, left: int = -1, directory: bytes = b"") -> Outcome | None:
        """Let a worker carry an order out; what prevents even that is a result too."""
        try:
            return await self._worked(order, lock, left, directory)
        except OSError as error:
            return failure(f"the worker of {order.stage} could not be started: {error.strerror}")

    async def _worked(self, order: Order, lock: int, left: int, directory: bytes) -> Outcome | None:
        progress = SharedCounters.create()
        self._counters = SharedCounters(progress)
        try:
            work = Work(
                order=order,
                home=str(self._home.path),
                storage_id=self._home.storage_id,
                accounts=self._accounts,
                copy_rate_bytes_s=self._copy_rate_bytes_s,
                progress=progress,
                leftovers=left,
                directory=directory,
                agent=os.getpid(),
                local=self._local,
                node=self._node,
            )
            # In files and not pipes: nobody has to read while the other writes.
            with _memory("forebay-work") as told, _memory("forebay-result") as said:
                write_all(told, msgspec.json.encode(work))
                os.lseek(told, 0, os.SEEK_SET)
                worker = spawn(
                    "cluster.agent.worker",
                    (),
                    descriptors=(progress, lock) if left < 0 else (progress, lock, left),
                    stdin=told,
                    stdout=said,
                    stderr=None,
                    new_session=False,
                    variables={OPERATION_VARIABLE: self._marker(order.attempt)} if order.provision is not None else {},
                )
                why = await self._watch(worker, order)
                self._orderly = worker.returncode == 0
                if self._ending.is_set():
                    return None
                return _result(worker.returncode, os.pread(said, RESULT_BYTES_MAX + 1, 0), order, why)
        finally:
            self.counters()
            counters, self._counters = self._counters, None
            counters.close()
            os.close(progress)

    async def _watch(self, worker: subprocess.Popen[bytes], order: Order) -> str:
        """Wait for the worker, ending it when it is over its time or not wanted; return why it was ended, if it was."""
        try:
            handle = Handle(worker.pid)
        except OSError:
            worker.kill()
            worker.wait()
            raise
        why = ""
        try:
            over = asyncio.ensure_future(handle.wait())
            ending = asyncio.ensure_future(self._ending.wait())
            try:
                await asyncio.wait({over, ending}, timeout=_limit_s(order), return_when=asyncio.FIRST_COMPLETED)
            finally:
                over.cancel()
                ending.cancel()
            if not handle.over:
                why = f"{order.stage} took longer than {_limit_s(order)} s and was ended"
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


def _write_at_start(descriptor: int, data: bytes) -> None:
    os.pwrite(descriptor, data, 0)


def _limit_s(order: Order) -> float | None:
    """Return how long the worker may take, seconds. A provider's keeps the time of each of its operations itself."""
    if order.provision is None:
        return order.timeout_s or None
    most_s = max(order.provision.stage_in_timeout_s, order.provision.stage_out_timeout_s)
    operations = 3 + len(order.creates) + len(order.destroys)
    return 2 * most_s + operations * order.provision.other_timeout_s + PROVIDER_SLACK_S


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
