"""Operation as the agent sees it: a worker that is started, watched, timed and, if need be, ended."""

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

from cluster.agent.files import FileRefused, ImageRefused, capacity
from cluster.agent.home import Bounds, End, GivenUp, Home, see_through, whereabouts
from cluster.agent.limits import (
    KILL_WAIT_S,
    LOCK_RETRY_S,
    LOCK_WAIT_S,
    ORDER_AGE_S_MAX,
    PROVIDER_GRACE_S,
    RESULT_BYTES_MAX,
    SWEEP_TIMEOUT_S,
    WORKER_GRACE_S,
)
from cluster.agent.messages import count, failure, figure, order_named, result_message
from cluster.agent.processes import OPERATION_VARIABLE, AccountRefused, Cgroup, Mode, account_for, kill_operation
from cluster.agent.rate_governor import RateGovernor
from cluster.agent.transfer import Control, Counters, SharedCounters
from cluster.agent.worker import PERSISTENT_CHANGE, Orphans, Outcome, Work, orphans
from cluster.providers import NO_LOCAL, Local
from cluster.system import JobProcess, about, closing, is_disk_full, write_all
from replica.messages import OperationDone, OperationFailed, PersistentChanged
from replica.model import DEFAULT_TRANSFER_RULES, Order, default_backend

logger = logging.getLogger(__name__)

_ATTEMPT_BYTES: Final = 20
"""Length of an attempt's number in the file of a lock, bytes."""

MOVING: Final = frozenset({"stage_in", "stage_out"})
"""Stages that move data."""

_numbers = itertools.count(1)
"""Numbers of this agent's workers, so that no two of their cgroups have one name."""

KILL_LOOKS: Final = 4
"""How often what an ended operation left is looked for and killed before what stays counts as hung, count: a fifth of a
second."""

PROVIDER_SLACK_S: Final = 30
"""What a worker may take beside the time of its operations, seconds: less than the leader allows the whole stage."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says about one agent."""

    node: str
    accounts: Mode
    copy_rate_bytes_s: int = 0
    kill_wait_s: float = 30.0
    process: JobProcess = JobProcess()
    """What every process of a job gets."""
    local: Local = NO_LOCAL
    """Where this machine has the programs of the site's provider."""
    cluster: str = ""
    """The cluster's id."""
    mover: bool = False
    """Whether it stages for places, and runs no scripts."""
    order_age_s_max: float = ORDER_AGE_S_MAX
    """How long an order counts as standing since the agent asked for it."""


class Operation:
    """Worker of one order."""

    def __init__(
        self,
        home: Home,
        order: Order,
        settings: Settings,
        governor: RateGovernor | None = None,
        on_changed: Callable[[PersistentChanged], object] = lambda changed: None,
    ) -> None:
        """Prepare; nothing is started yet. `governor` shares out what may be moved; `on_changed` is called for each
        persistent buffer that is there or gone, and keeps that (OSError: it is to be called again).
        """
        self._home = home
        self._order = order
        self._settings = settings
        self._governor = governor or RateGovernor()
        self._on_changed = on_changed
        self._stands_until_s: float | None = None
        self._control: Control | None = None
        self._ending = asyncio.Event()
        self._counters: SharedCounters | None = None
        self._last = Counters()
        self._last_file = ""
        self._last_waits = 0
        self._resuming = False
        """Whether what is half done is for the next attempt: the agent ends, and nobody cancelled anything."""
        self._orderly = False
        """Whether the last worker came to its own end, and so removed whatever it had to remove."""

    @property
    def order(self) -> Order:
        """What it carries out, as it stands now."""
        return self._order

    def end(self, *, resuming: bool = False) -> None:
        """Have the worker ended; `run` then returns None. What is half done stays where it is if it is `resuming`."""
        self._resuming = resuming
        self._ending.set()

    def stands_until(self, at_s: float) -> None:
        """The order is certain to stand until a moment of the monotonic clock; what was said before counts no more."""
        self._stands_until_s = at_s
        if self._control is not None:
            self._control.stands_until_s = at_s

    def change(self, order: Order) -> None:
        """What the transfer may do has changed, maybe: the same order with other shares."""
        if order.shares != self._order.shares:
            self._order = order
            self._governor.change(order.job, order.shares)

    def counters(self) -> Counters:
        """Return how far it is."""
        if self._counters is not None:
            self._last, self._last_file = self._counters.read(), self._counters.file
            self._last_waits = self._counters.waits
        return self._last

    @property
    def file(self) -> str:
        """The file that it was at when the counters were last looked at."""
        return self._last_file

    @property
    def waits(self) -> int:
        """How often its rate had held it back when the counters were last looked at."""
        return self._last_waits

    async def run(self) -> Outcome | None:
        """Do the operation and return its result, or None if it was ended."""
        home, name = self._home, str(self._order.job)
        if await self._is_seen_to():
            return None if self._ending.is_set() else OperationDone()
        try:
            lock = await home.disk_full.keep_trying(order_named(self._order), self._open_lock, self._ending)
        except GivenUp:
            return None
        try:
            if not await self._locked(lock):
                return None if self._ending.is_set() else self._kept_out()
            if _runs_programs(self._order):
                await self._succeed(lock)
            result = await self._do(lock)
            if not home.hung.of(self._order.job):
                # A process that hangs holds the lock of this very file.
                home.reserve_files.drop(home.operations, name)
            return result
        except GivenUp:
            return None
        finally:
            os.close(lock)

    async def _is_seen_to(self) -> bool:
        """Whether this is a post-run that leaves nothing to do: the supervisor did it when the script had ended."""
        order = self._order
        is_native_end = order.stage == "post_run" and order.provision is None and not (order.creates or order.destroys)
        return is_native_end and await self._home.buffer_syncs.is_done(order.job, self._ending)

    def _open_lock(self) -> int:
        name, directory = str(self._order.job), self._home.operations
        how = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, how | os.O_CREAT, 0o600, dir_fd=directory)
        except OSError as error:
            # Not even an empty file can be made: a reserve file will do, whatever is in it.
            if not is_disk_full(error) or not self._home.reserve_files.lend(directory, name):
                raise
            return os.open(name, how, dir_fd=directory)

    async def _do(self, lock: int) -> Outcome | None:
        """With the lock held: do the operation, and whatever an earlier one left undone before it."""
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
        left = orphans.expected(order) if order.stage in MOVING else None
        if left is None or not left.directories:
            return await self._work_and_end(order, lock)
        known = self._known_left()
        if known is not None and not left.covers(known):
            # Elsewhere than this attempt will write: the record can only tell of one of them.
            swept = await self._sweep(lock)
            if ended() or (isinstance(swept, OperationFailed) and not swept.final):
                return swept
        await home.disk_full.keep_trying(
            order_named(order),
            lambda: orphans.begin(home.leftovers, home.reserve_files, order.job, left),
            self._ending,
        )
        result = await self._work_and_end(order, lock)
        if isinstance(result, OperationDone):
            orphans.forget(home.leftovers, home.reserve_files, order.job)
        return result

    async def _change_persistent(self, lock: int) -> OperationFailed | None:
        """Remove and make the persistent buffers of the order, one after the other; return what failed.

        Each is said as soon as it is so: those who wait for it need nothing else that the order says.
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
            logger.info("%s %s", order_named(order), result_message(order.stage, changed), extra=about(job=order.job))
            await self._home.disk_full.keep_trying(order_named(order), partial(self._on_changed, changed), self._ending)
        return None

    async def _work_and_end(self, order: Order, lock: int) -> Outcome | None:
        """Let a worker carry an order out, and end what is left of the programs of one that did not end by itself."""
        try:
            return await self._work(order, lock)
        finally:
            if not self._orderly and _runs_programs(order):
                left = await asyncio.to_thread(kill_operation, self._marker(order.attempt), KILL_LOOKS)
                if hangs := await self._home.hung.take_what_stays(order.job, left):
                    logger.error(
                        "%s: %s; the node goes on without it", order_named(order), hangs, extra=about(job=order.job)
                    )

    async def _sweep(self, lock: int) -> Outcome | None:
        """Remove what a transfer that was killed left in destinations; None if nothing was, or if it was ended."""
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
                orphans.forget(home.leftovers, home.reserve_files, job)
                if files:
                    logger.info(
                        "job %s: removed %s of a transfer that was ended",
                        job,
                        count(files, "temporary file"),
                        extra=about(job=job),
                    )
            case OperationFailed(message, final):
                logger.warning(
                    "job %s: what a transfer that was ended left cannot be removed: %s; %s",
                    job,
                    message,
                    f"remove .forebay-*-{job} and .forebay-*-{job}-* there by hand"
                    if final
                    else "it is tried again later",
                    extra=about(job=job),
                )
                if final:
                    orphans.forget(home.leftovers, home.reserve_files, job)
        return result

    def _known_left(self) -> Orphans | None:
        job = self._order.job
        try:
            return orphans.read(self._home.leftovers, job)
        except FileRefused as error:
            logger.error("job %s: %s", job, error, extra=about(job=job))
            return None

    async def _locked(self, lock: int) -> bool:
        """Wait until no earlier worker of the job holds it: its kernel may still be ending it, or it may hang there."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LOCK_WAIT_S
        while not self._ending.is_set() and loop.time() < until_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), LOCK_RETRY_S)
        return False

    def _kept_out(self) -> Outcome:
        job = self._order.job
        known = "; ".join(map(whereabouts, self._home.hung.of(job))) or "it is not known here, an earlier agent's maybe"
        return failure(
            f"a process of an earlier operation of job {job} has not ended: {known}; {self._order.stage} must not "
            "begin beside it. Bring back the file system that it waits for, or restart the node; "
            "it is tried again meanwhile"
        )

    async def _succeed(self, lock: int) -> None:
        """With the lock held: end what an operation left that was interrupted with its agent, and take its place.

        The file of the lock says whose place that is. It is there for as long as an operation has not come to its end.
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
        await home.disk_full.keep_trying(order_named(self._order), lambda: _write_at_start(lock, mine), self._ending)

    def _marker(self, attempt: int) -> str:
        return f"{self._home.marker(self._order.job)}.{attempt}"

    async def _work(self, order: Order, lock: int, left: Orphans | None = None) -> Outcome | None:
        """Let a worker carry an order out; what prevents even that is a result too."""
        if self._is_done_without(order):
            return OperationDone()
        try:
            return await self._worked(order, lock, left)
        except OSError as error:
            return failure(f"the worker of {order.stage} could not be started: {error.strerror}")

    def _is_done_without(self, order: Order) -> bool:
        """Return whether a worker would find nothing to do: a stage-out that names nothing, of a buffer that is here.

        Whatever is not as it should be is for a worker to say.
        """
        if order.stage != "stage_out" or order.provision is not None or order.transfers or order.special or order.uses:
            return False
        try:
            account_for(self._settings.accounts, order.user)
            os.close(capacity.open_buffer(self._home.buffers, str(order.job)))
        except (AccountRefused, ImageRefused, OSError):
            return False
        return True

    async def _worked(self, order: Order, lock: int, left: Orphans | None) -> Outcome | None:
        progress = SharedCounters.create()
        counters = self._counters = SharedCounters(progress)
        control = self._control = Control()
        cgroup: Cgroup | None = None
        if self._stands_until_s is not None:
            control.stands_until_s = self._stands_until_s
        try:
            if order.stage in MOVING:
                own_bytes_s = self._settings.copy_rate_bytes_s
                self._governor.begin(order.job, order.user, own_bytes_s, self._order.shares, control, counters)
            if self._home.cgroups is not None and order.provision is None:
                # What a site's provider leaves running on purpose is nobody's job.
                cgroup = self._home.cgroups.operation(order.job, order.attempt, next(_numbers))
            work = Work(
                order=order,
                home=str(self._home.path),
                storage_id=self._home.storage_id,
                accounts=self._settings.accounts,
                progress=progress,
                control=control.descriptor,
                process=self._settings.process,
                capacity_control=self._home.capacity_control.word,
                cluster=self._settings.cluster,
                left=left,
                agent=os.getpid(),
                local=self._settings.local,
                node=self._settings.node,
                cgroups=self._home.cgroups_of(order.job) if self._settings.accounts == "switch" else "",
            )
            # In files and not pipes: nobody has to read while the other writes.
            with (
                closing(os.memfd_create("forebay-work", os.MFD_CLOEXEC)) as request,
                closing(os.memfd_create("forebay-result", os.MFD_CLOEXEC)) as answer,
            ):
                write_all(request, msgspec.json.encode(work))
                os.lseek(request, 0, os.SEEK_SET)
                worker = self._home.fork_server.spawn(
                    "cluster.agent.worker.worker",
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
                end = await see_through(
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
                        "%s: %s; the node goes on without it", order_named(order), end.hangs, extra=about(job=order.job)
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

    async def _end_cgroup(self, cgroup: Cgroup) -> None:
        """End whatever of the operation outlived its worker."""
        job = self._order.job
        try:
            if not cgroup.is_empty:
                left = set(await asyncio.to_thread(cgroup.kill, KILL_WAIT_S)) - set(self._home.hung.of(job))
                if hangs := await self._home.hung.take_what_stays(job, left):
                    logger.error(
                        "%s: %s; the node goes on without it",
                        order_named(self._order),
                        hangs,
                        extra=about(job=self._order.job),
                    )
            cgroup.remove()
        finally:
            cgroup.close()


def _write_at_start(descriptor: int, data: bytes) -> None:
    os.pwrite(descriptor, data, 0)


def _limit_s(order: Order) -> float | None:
    """Return how long the worker may take, seconds. A provider's keeps the time of each of its operations itself."""
    if order.provision is None:
        return order.timeout_s or None
    most_s = max(order.provision.stage_in_timeout_s, order.provision.stage_out_timeout_s)
    if order.stage == PERSISTENT_CHANGE:
        return order.provision.other_timeout_s + PROVIDER_SLACK_S
    return 2 * most_s + 3 * order.provision.other_timeout_s + PROVIDER_SLACK_S


def _runs_programs(order: Order) -> bool:
    """Return whether others' programs may be run for the order: a provider's, a command's, a backend's."""
    if order.provision is not None or order.stage not in MOVING:
        return order.provision is not None
    rules = order.rules or DEFAULT_TRANSFER_RULES
    return order.special is not None or default_backend(rules.backends) != "native"


def _bounds(order: Order) -> Bounds:
    """Return when the worker is late: a transfer that advances has all the time up to its hard cap."""
    rules = order.rules
    stall_s = rules.stall_s if rules is not None and rules.timeouts == "progress" and order.stage in MOVING else None
    return Bounds(_limit_s(order), stall_s, WORKER_GRACE_S if order.provision is None else PROVIDER_GRACE_S)


def _lateness(order: Order, end: End, counters: Counters, file: str) -> str:
    """Return what is said of a worker that was ended because it was late, or that hangs."""
    message = f"{order.stage} {end.late or 'has a process that did not end with it'} and was ended"
    if order.stage in MOVING and counters.files_total:
        message += (
            f": {counters.files_done} of {count(counters.files_total, 'file')}, "
            f"{figure(counters.bytes_done)} of {figure(counters.bytes_total)} were there"
        )
    if order.stage in MOVING and file:
        message += f"; it was at {file}"
    if end.hangs:
        message += f"; {end.hangs}"
    return message + ("; the buffer is kept" if order.stage == "stage_out" else "")


def _result(code: int | None, data: bytes, order: Order) -> Outcome:
    if code == 0 and len(data) <= RESULT_BYTES_MAX:
        try:
            return msgspec.json.decode(data, type=OperationDone | OperationFailed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return failure(f"the worker of {order.stage} gave no result that can be read: {error}")
    assert code is not None
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return failure(f"the worker of {order.stage} {how} before it had a result; the agent's log may say why")
