"""Agent's side of an operation: start, watch, time and end its worker."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from forebay.cluster.agent.adapters import NO_TOOLS, Tools
from forebay.cluster.agent.files import FileRefused, ImageFailed, capacity
from forebay.cluster.agent.limits import (
    KILL_WAIT_S,
    LOCK_RETRY_S,
    LOCK_WAIT_S,
    ORDER_AGE_S_MAX,
    PROVIDER_GRACE_S,
    RESULT_BYTES_MAX,
    SWEEP_TIMEOUT_S,
    WORKER_GRACE_S,
)
from forebay.cluster.agent.messages import failure, format_bytes, format_count, order_label, result_message
from forebay.cluster.agent.processes import (
    OPERATION_VARIABLE,
    AccountRefused,
    Cgroup,
    Mode,
    account_for,
    kill_operation,
)
from forebay.cluster.agent.rate_governor import RateGovernor
from forebay.cluster.agent.runtime import (
    RetryAbandoned,
    StateDirectory,
    WorkerEnd,
    WorkerLimits,
    kernel_location,
    supervise,
)
from forebay.cluster.agent.transfer import Counters, SharedCounters, TransferControl
from forebay.cluster.agent.worker import PERSISTENT_CHANGE, Orphans, Outcome, WorkerTask, orphans
from forebay.cluster.providers import NO_LOCAL, Local
from forebay.cluster.system import JobProcess, about, closing, is_disk_full, write_all
from forebay.replica.messages import OperationDone, OperationFailed, PersistentChanged
from forebay.replica.model import DEFAULT_TRANSFER_RULES, Order, default_backend

logger = logging.getLogger(__name__)

_ATTEMPT_BYTES: Final = 20
"""Length of an attempt number in a lock file, bytes."""

MOVING: Final = frozenset({"stage_in", "stage_out"})
"""Stages that move data."""

_numbers = itertools.count(1)
"""Numbers of this agent's workers, which make cgroup names unique."""

KILL_LOOKS: Final = 4
"""Rounds of finding and killing an ended operation's processes before the rest counts as hung, count: a fifth of a
second.
"""

PROVIDER_SLACK_S: Final = 30
"""Seconds a worker may take beyond its operations: less than the leader allows for the whole stage."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one agent."""

    node: str
    accounts: Mode
    copy_rate_bytes_s: int = 0
    kill_wait_s: float = 30.0
    process: JobProcess = JobProcess()
    """Settings of all processes of a job."""
    local: Local = NO_LOCAL
    """Provider programs of this machine."""
    tools: Tools = NO_TOOLS
    """Settings of this machine for the tools of shared filesystems."""
    cluster: str = ""
    """Cluster ID."""
    mover: bool = False
    """True for a mover, which stages on shared filesystems and runs no scripts."""
    order_age_s_max: float = ORDER_AGE_S_MAX
    """Seconds for which an order is current after the agent requested it."""


class WorkerOperation:
    """Operation of one order, run by a worker process."""

    def __init__(
        self,
        home: StateDirectory,
        order: Order,
        settings: AgentSettings,
        governor: RateGovernor | None = None,
        on_changed: Callable[[PersistentChanged], object] = lambda changed: None,
    ) -> None:
        """Prepare without starting; `governor` distributes the transfer rate.

        `on_changed` is called for each persistent buffer created or removed and stores that fact. If it raises OSError,
        it is called again.
        """
        self._home = home
        self._order = order
        self._settings = settings
        self._governor = governor or RateGovernor()
        self._on_changed = on_changed
        self._stands_until_s: float | None = None
        self._control: TransferControl | None = None
        self._ending = asyncio.Event()
        self._counters: SharedCounters | None = None
        self._last = Counters()
        self._last_file = ""
        self._last_waits = 0
        self._resuming = False
        """True if partial transfers are kept for the next attempt, because the agent stops and the order is not
        cancelled.
        """
        self._orderly = False
        """True if the last worker ended by itself and so cleaned up after itself."""

    @property
    def order(self) -> Order:
        """Order being carried out, with its latest changes."""
        return self._order

    def end(self, *, resuming: bool = False) -> None:
        """End the worker; `run` then returns None. Partial transfers are kept if `resuming`."""
        self._resuming = resuming
        self._ending.set()

    def stands_until(self, at_s: float) -> None:
        """Set the monotonic time until which the order is confirmed, replacing the previous one."""
        self._stands_until_s = at_s
        if self._control is not None:
            self._control.stands_until_s = at_s

    def change(self, order: Order) -> None:
        """Apply the transfer shares of an updated order."""
        if order.shares != self._order.shares:
            self._order = order
            self._governor.change(order.job, order.shares)

    def counters(self) -> Counters:
        """Return the progress counters."""
        if self._counters is not None:
            self._last, self._last_file = self._counters.read(), self._counters.file
            self._last_waits = self._counters.waits
        return self._last

    @property
    def file(self) -> str:
        """File being moved when the counters were last read."""
        return self._last_file

    @property
    def waits(self) -> int:
        """Rate-limit waits when the counters were last read."""
        return self._last_waits

    async def run(self) -> Outcome | None:
        """Carry out the operation and return its result, or None if it was ended."""
        home, name = self._home, str(self._order.job)
        if await self._is_seen_to():
            return None if self._ending.is_set() else OperationDone()
        try:
            lock = await home.disk_full.keep_trying(order_label(self._order), self._open_lock, self._ending)
        except RetryAbandoned:
            return None
        try:
            if not await self._acquire_lock(lock):
                return None if self._ending.is_set() else self._lock_held_outcome()
            if _runs_programs(self._order):
                await self._take_over(lock)
            result = await self._do(lock)
            if not home.hung.of(self._order.job):
                # A hung process holds the lock of this file.
                home.reserve_files.drop(home.operations, name)
            return result
        except RetryAbandoned:
            return None
        finally:
            os.close(lock)

    async def _is_seen_to(self) -> bool:
        """Return whether this is a post-run whose work the supervisor has already done."""
        order = self._order
        is_native_end = order.stage == "post_run" and order.provision is None and not (order.creates or order.destroys)
        return is_native_end and await self._home.buffer_syncs.is_done(order.job, self._ending)

    def _open_lock(self) -> int:
        name, directory = str(self._order.job), self._home.operations
        how = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, how | os.O_CREAT, 0o600, dir_fd=directory)
        except OSError as error:
            # The disk is full even for an empty file: use a reserve file, whatever its content.
            if not is_disk_full(error) or not self._home.reserve_files.lend(directory, name):
                raise
            return os.open(name, how, dir_fd=directory)

    async def _do(self, lock: int) -> Outcome | None:
        """Carry out the operation, and first finish an earlier one, while holding the lock."""
        home, ended = self._home, self._ending.is_set
        failed = await self._change_persistent(lock)
        if failed is not None or ended():
            return failed
        order = replace(self._order, creates=(), destroys=())
        if order.provision is not None:
            return await self._work_and_end(order, lock)
        if order.stage in (orphans.SWEEP, "teardown"):
            swept = await self._sweep(lock)
            return swept if order.stage == orphans.SWEEP or ended() else await self._work_and_end(order, lock)
        left = orphans.expected_orphans(order) if order.stage in MOVING else None
        if left is None or not left.directories:
            return await self._work_and_end(order, lock)
        known = self._known_left()
        if known is not None and not left.covers(known):
            # The record holds only one transfer's destinations, and this attempt writes elsewhere.
            swept = await self._sweep(lock)
            if ended() or (isinstance(swept, OperationFailed) and not swept.final):
                return swept
        await home.disk_full.keep_trying(
            order_label(order),
            lambda: orphans.record_orphans(home.leftovers, home.reserve_files, order.job, left),
            self._ending,
        )
        result = await self._work_and_end(order, lock)
        if isinstance(result, OperationDone):
            orphans.forget_orphans(home.leftovers, home.reserve_files, order.job)
        return result

    async def _change_persistent(self, lock: int) -> OperationFailed | None:
        """Remove and create the order's persistent buffers one by one; return the first failure.

        Each change is reported at once, because jobs waiting for it need nothing else of this order.
        """
        order = self._order
        parts = [(gone.name, replace(order, creates=(), destroys=(gone,))) for gone in order.destroys]
        parts += [(made.name, replace(order, creates=(made,), destroys=())) for made in order.creates]
        for name, part in parts:
            part = replace(part, stage=PERSISTENT_CHANGE)
            result = await self._work_and_end(part, lock)
            if isinstance(result, OperationFailed) and not result.operation:
                return replace(result, operation="create_persistent" if part.creates else "destroy_persistent")
            if not isinstance(result, OperationDone):
                return result
            changed = PersistentChanged(name)
            logger.info("%s %s", order_label(order), result_message(order.stage, changed), extra=about(job=order.job))
            await self._home.disk_full.keep_trying(order_label(order), partial(self._on_changed, changed), self._ending)
        return None

    async def _work_and_end(self, order: Order, lock: int) -> Outcome | None:
        """Have a worker carry out an order, and kill its remaining programs unless it ended by itself."""
        try:
            return await self._work(order, lock)
        finally:
            if not self._orderly and _runs_programs(order):
                left = await asyncio.to_thread(kill_operation, self._marker(order.attempt), KILL_LOOKS)
                if hangs := await self._home.hung.take_what_stays(order.job, left):
                    logger.error(
                        "%s: %s; the node continues without it", order_label(order), hangs, extra=about(job=order.job)
                    )

    async def _sweep(self, lock: int) -> Outcome | None:
        """Remove leftovers of a killed transfer; return None if there are none or the operation was ended."""
        home, job = self._home, self._order.job
        left = self._known_left()
        if left is None:
            return None
        order = Order(
            job=job,
            attempt=self._order.attempt,
            stage=orphans.SWEEP,
            user=left.user,
            name="",
            workdir="",
            roots=left.roots,
            timeout_s=SWEEP_TIMEOUT_S,
        )
        result = await self._work(order, lock, left)
        match result:
            case OperationDone(files):
                orphans.forget_orphans(home.leftovers, home.reserve_files, job)
                if files:
                    logger.info(
                        "job %s: removed %s of an ended transfer",
                        job,
                        format_count(files, "temporary file"),
                        extra=about(job=job),
                    )
            case OperationFailed(message, final):
                logger.warning(
                    "job %s: leftovers of an ended transfer cannot be removed: %s; %s",
                    job,
                    message,
                    f"remove .forebay-*-{job} and .forebay-*-{job}-* there by hand" if final else "retrying later",
                    extra=about(job=job),
                )
                if final:
                    orphans.forget_orphans(home.leftovers, home.reserve_files, job)
        return result

    def _known_left(self) -> Orphans | None:
        job = self._order.job
        try:
            return orphans.read_orphans(self._home.leftovers, job)
        except FileRefused as error:
            logger.error("job %s: %s", job, error, extra=about(job=job))
            return None

    async def _acquire_lock(self, lock: int) -> bool:
        """Wait for the lock of an earlier worker, which may still be ending or hang in the kernel; return whether it
        was acquired.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LOCK_WAIT_S
        while not self._ending.is_set() and loop.time() < until_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), LOCK_RETRY_S)
        return False

    def _lock_held_outcome(self) -> Outcome:
        job = self._order.job
        known = (
            "; ".join(map(kernel_location, self._home.hung.of(job)))
            or "unknown here, perhaps started by an earlier agent"
        )
        return failure(
            f"a process of an earlier operation of job {job} has not ended: {known}; {self._order.stage} cannot "
            "begin until it has. Restore the filesystem it waits for, or restart the node; "
            "retrying meanwhile"
        )

    async def _take_over(self, lock: int) -> None:
        """Kill what an operation left that was interrupted with its agent, then record this attempt; the lock must be
        held.

        The lock file names the attempt in progress and exists until the operation ends.
        """
        home = self._home
        interrupted = os.pread(lock, _ATTEMPT_BYTES, 0).strip(b"\0 ")
        if interrupted.isdigit():
            left = await asyncio.to_thread(kill_operation, self._marker(int(interrupted)))
            if left:
                logger.error(
                    "job %s: processes %s of an earlier operation cannot be killed",
                    self._order.job,
                    left,
                    extra=about(job=self._order.job),
                )
        mine = str(self._order.attempt).encode().ljust(_ATTEMPT_BYTES)
        await home.disk_full.keep_trying(order_label(self._order), lambda: _write_at_start(lock, mine), self._ending)

    def _marker(self, attempt: int) -> str:
        return f"{self._home.marker(self._order.job)}.{attempt}"

    async def _work(self, order: Order, lock: int, left: Orphans | None = None) -> Outcome | None:
        """Have a worker carry out an order; failing to start it becomes a result too."""
        if self._is_done_without(order):
            return OperationDone()
        try:
            return await self._run_worker(order, lock, left)
        except OSError as error:
            return failure(f"the worker of {order.stage} could not be started: {error.strerror}")

    def _is_done_without(self, order: Order) -> bool:
        """Return whether a worker is unnecessary: a stage-out without transfers whose buffer exists.

        Any irregularity is left for a worker to report.
        """
        if order.stage != "stage_out" or order.provision is not None or order.transfers or order.special or order.uses:
            return False
        try:
            account_for(self._settings.accounts, order.user)
            os.close(capacity.open_buffer(self._home.buffers, str(order.job)))
        except (AccountRefused, ImageFailed, OSError):
            return False
        return True

    async def _run_worker(self, order: Order, lock: int, left: Orphans | None) -> Outcome | None:
        progress = SharedCounters.create()
        counters = self._counters = SharedCounters(progress)
        control = self._control = TransferControl()
        cgroup: Cgroup | None = None
        if self._stands_until_s is not None:
            control.stands_until_s = self._stands_until_s
        try:
            if order.stage in MOVING:
                own_bytes_s = self._settings.copy_rate_bytes_s
                self._governor.begin(order.job, order.user, own_bytes_s, self._order.shares, control, counters)
            if self._home.cgroups is not None and order.provision is None:
                # Processes that a provider leaves running on purpose belong to no job.
                cgroup = self._home.cgroups.operation(order.job, order.attempt, next(_numbers))
            # Use files instead of pipes, so that neither side has to read while the other writes.
            with (
                closing(os.memfd_create("forebay-work", os.MFD_CLOEXEC)) as request,
                closing(os.memfd_create("forebay-result", os.MFD_CLOEXEC)) as answer,
            ):
                write_all(request, msgspec.json.encode(self._task(order, left, progress, control)))
                os.lseek(request, 0, os.SEEK_SET)
                worker = self._home.fork_server.spawn(
                    "forebay.cluster.agent.worker.worker",
                    (),
                    descriptors=(progress, control.descriptor, lock),
                    stdin=request,
                    stdout=answer,
                    stderr=None,
                    new_session=False,
                    new_group=True,
                    variables={OPERATION_VARIABLE: self._marker(order.attempt)} if _runs_programs(order) else {},
                    cgroup=cgroup,
                )
                end = await supervise(
                    worker,
                    order.job,
                    self._ending,
                    _bounds(order),
                    self._home.hung,
                    signs=lambda: (counters.read(), counters.waits),
                    stop=lambda: control.stop(resuming=self._resuming or not self._ending.is_set()),
                )
                code = worker.poll()
                self._orderly = code == 0
                if end.hangs:
                    logger.error(
                        "%s: %s; the node continues without it",
                        order_label(order),
                        end.hangs,
                        extra=about(job=order.job),
                    )
                if self._ending.is_set():
                    return None
                if end.late or end.hangs:
                    self.counters()
                    return failure(_lateness(order, end, self._last, self._last_file))
                return _result(code, os.pread(answer, RESULT_BYTES_MAX + 1, 0), order)
        finally:
            self._governor.end(order.job)
            self.counters()
            self._counters = None
            self._control = None
            counters.close()
            control.close()
            os.close(progress)
            if cgroup is not None:
                await self._end_cgroup(cgroup)

    def _task(self, order: Order, left: Orphans | None, progress: int, control: TransferControl) -> WorkerTask:
        """Return the task of the worker, which inherits both descriptors."""
        return WorkerTask(
            order=order,
            home=str(self._home.path),
            storage_id=self._home.storage_id,
            accounts=self._settings.accounts,
            progress=progress,
            control=control.descriptor,
            process=self._settings.process,
            capacity_control=self._home.capacity_control.word,
            tools=self._settings.tools,
            cluster=self._settings.cluster,
            left=left,
            agent=os.getpid(),
            local=self._settings.local,
            node=self._settings.node,
            cgroups=self._home.cgroups_of(order.job) if self._settings.accounts == "switch" else "",
        )

    async def _end_cgroup(self, cgroup: Cgroup) -> None:
        """Kill processes of the operation that outlived its worker."""
        job = self._order.job
        try:
            if not cgroup.is_empty:
                left = set(await asyncio.to_thread(cgroup.kill, KILL_WAIT_S)) - set(self._home.hung.of(job))
                if hangs := await self._home.hung.take_what_stays(job, left):
                    logger.error(
                        "%s: %s; the node continues without it",
                        order_label(self._order),
                        hangs,
                        extra=about(job=self._order.job),
                    )
            cgroup.remove()
        finally:
            cgroup.close()


def _write_at_start(descriptor: int, data: bytes) -> None:
    os.pwrite(descriptor, data, 0)


def _limit_s(order: Order) -> float | None:
    """Return the worker's time limit, seconds. A provider's worker limits each of its operations itself."""
    if order.provision is None:
        return order.timeout_s or None
    most_s = max(order.provision.stage_in_timeout_s, order.provision.stage_out_timeout_s)
    if order.stage == PERSISTENT_CHANGE:
        return order.provision.other_timeout_s + PROVIDER_SLACK_S
    return 2 * most_s + 3 * order.provision.other_timeout_s + PROVIDER_SLACK_S


def _runs_programs(order: Order) -> bool:
    """Return whether the order may run external programs: a provider's, a command or a backend."""
    if order.provision is not None or order.stage not in MOVING:
        return order.provision is not None
    rules = order.rules or DEFAULT_TRANSFER_RULES
    return order.special is not None or default_backend(rules.backends) != "native"


def _bounds(order: Order) -> WorkerLimits:
    """Return the worker's limits. A transfer that makes progress is bounded only by its hard limit."""
    rules = order.rules
    stall_s = rules.stall_s if rules is not None and rules.timeouts == "progress" and order.stage in MOVING else None
    return WorkerLimits(_limit_s(order), stall_s, WORKER_GRACE_S if order.provision is None else PROVIDER_GRACE_S)


def _lateness(order: Order, end: WorkerEnd, counters: Counters, file: str) -> str:
    """Return the message about a worker that was ended for being late, or that hangs."""
    message = f"{order.stage} {end.late or 'has a process that did not end with it'} and was ended"
    if order.stage in MOVING and counters.files_total:
        message += (
            f": {counters.files_done} of {format_count(counters.files_total, 'file')}, "
            f"{format_bytes(counters.bytes_done)} of {format_bytes(counters.bytes_total)} were done"
        )
    if order.stage in MOVING and file:
        message += f"; current file: {file}"
    if end.hangs:
        message += f"; {end.hangs}"
    return message + ("; the buffer is kept" if order.stage == "stage_out" else "")


def _result(code: int | None, data: bytes, order: Order) -> Outcome:
    if code == 0 and len(data) <= RESULT_BYTES_MAX:
        try:
            return msgspec.json.decode(data, type=OperationDone | OperationFailed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return failure(f"the worker of {order.stage} returned an unreadable result: {error}")
    assert code is not None
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return failure(f"the worker of {order.stage} {how} before it returned a result; see the agent's log")
