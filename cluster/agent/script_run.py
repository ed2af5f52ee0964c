"""Agent's side of a script: a durable record and a supervisor that is launched once and re-attached to.

The supervisor's records decide how the script ended. With an external provider, its operation pre_run comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable

import msgspec

from forebay.cluster.agent.files import (
    STEPS,
    FileRefused,
    FilesystemRefused,
    ImageFailed,
    RemovalFailed,
    capacity,
    is_resource_exhausted,
    open_parent,
)
from forebay.cluster.agent.limits import (
    DISK_FULL_RETRY_S,
    DISK_FULL_RETRY_S_MAX,
    SUPERVISOR_LAUNCHES_MAX,
    SUPERVISOR_POLL_S,
)
from forebay.cluster.agent.messages import failure, signal_name
from forebay.cluster.agent.operation import AgentSettings, WorkerOperation
from forebay.cluster.agent.processes import (
    CANNOT_EXECUTE,
    CGROUP_FILE,
    AccountRefused,
    Cgroup,
    CgroupName,
    ChildProcess,
    account_for,
    kill_job,
)
from forebay.cluster.agent.runtime import BufferSync, Handle, RetryAbandoned, StateDirectory
from forebay.cluster.agent.scripts import (
    OVERRUN,
    RESUME,
    SUSPEND,
    ScriptOrder,
    ScriptRecord,
    create_record,
    recorded_jobs,
    remove_record,
)
from forebay.cluster.agent.worker import PRE_RUN, inodes_of, paths_of
from forebay.cluster.system import about, boot_id, closing, open_directory, start_time
from forebay.replica.messages import OperationFailed, ScriptEnded
from forebay.replica.model import JobState, Order, OrderFilesystem

logger = logging.getLogger(__name__)


class BufferMissing(Exception):
    """Buffer of a job is missing where its script expects it."""


class ScriptRun:
    """Run of a job's script, started by this agent or an earlier one."""

    def __init__(
        self, home: StateDirectory, order: Order, settings: AgentSettings, on_started: Callable[[], object]
    ) -> None:
        """Prepare; `on_started` is called once when the script is known to run and this has not been reported yet."""
        self._home = home
        self._order = order
        self._settings = settings
        self._on_started = on_started
        self._paths: tuple[tuple[str, str], ...] = ()
        """Environment variables from an external provider."""
        self._ending = asyncio.Event()
        self._suspended: bool | None = None
        self._changed = asyncio.Event()
        """Set when the script is to be suspended, resumed or ended at once; the supervisor is signalled once it runs.
        """
        self._overrun = ""
        self._overrun_told = False
        self._child: ChildProcess | None = None
        self._supervisor_code: int | None = None
        """Exit code of this agent's last supervisor, negative for a signal; None while it runs or is not a child."""
        self._sync: BufferSync | None = None
        """Messages of the supervisor, if it is this agent's child and syncs the job's buffer."""
        self._start_reported = False

    def end(self) -> None:
        """End the script: SIGTERM, grace period, SIGKILL. `run` then returns how it ended."""
        self._ending.set()

    def suspend(self, suspended: bool) -> None:
        """Suspend or resume the script."""
        if suspended != self._suspended:
            self._suspended = suspended
            self._changed.set()

    @property
    def order(self) -> Order:
        """Order being carried out."""
        return self._order

    @property
    def is_overrun(self) -> bool:
        """True if the script is to be ended because its buffer exceeds its capacity."""
        return bool(self._overrun)

    def overrun(self, reason: str) -> None:
        """End the script at once because its buffer exceeds its capacity; `run` then returns the reason."""
        self._overrun = reason
        self._changed.set()

    async def run(self) -> ScriptEnded | OperationFailed:
        """Supervise the script until it ends and return the result. Cancelling this coroutine leaves the script
        running.
        """
        try:
            await self._clear_older()
            if self._order.job not in recorded_jobs(self._home.steps):
                if self._order.started:
                    return _node_fail("the node has no record of the script, which was started; its outcome is unknown")
                if self._ending.is_set() or self._order.cancel:
                    return ScriptEnded(JobState.CANCELLED)
                await self._home.disk_full.keep_trying(
                    f"the script of job {self._order.job}", self._create, self._ending
                )
            record = ScriptRecord(self._home.steps, self._order.job)
        except RetryAbandoned:
            return ScriptEnded(JobState.CANCELLED)
        except AccountRefused as error:
            return ScriptEnded(JobState.FAILED, CANNOT_EXECUTE, 0, str(error))
        except (FilesystemRefused, BufferMissing) as error:
            # The script has not begun, so the job is kept and shows this reason.
            return failure(str(error))
        except (FileRefused, RemovalFailed, ImageFailed) as error:
            return _node_fail(str(error))
        except OSError as error:
            return _node_fail(f"the script could not be prepared: {error.strerror}")
        try:
            return await self._see_through(record)
        except FileRefused as error:
            return _node_fail(str(error))
        finally:
            record.close()
            if self._sync is not None and self._sync.has_ended():
                # The sync continues in the background and is awaited there.
                self._home.buffer_syncs.take(self._order.job, self._sync)
            else:
                if self._sync is not None:
                    self._sync.close()
                if self._child is not None:
                    self._child.poll()

    async def _clear_older(self) -> None:
        """Remove the record of an older attempt: an order with a newer one starts the job anew."""
        while self._order.job in recorded_jobs(self._home.steps):
            record = ScriptRecord(self._home.steps, self._order.job)
            try:
                wanted = record.order()
                if wanted is None or wanted.order.attempt >= self._order.attempt:
                    return
                lock = record.try_lock()
                if lock is not None:
                    remove_record(self._home.steps, self._order.job)
                    os.close(lock)
                    return
            finally:
                record.close()
            # Its supervisor was told to end the script when the old order disappeared; wait until it has.
            await asyncio.sleep(SUPERVISOR_POLL_S)

    def _create(self) -> None:
        self._see_mounted()
        self._hold_inodes()
        account = account_for(self._settings.accounts, self._order.user)
        create_record(
            self._home.steps,
            ScriptOrder(
                order=self._order,
                node=self._settings.node,
                home=str(self._home.path),
                storage_id=self._home.storage_id,
                accounts=self._settings.accounts,
                kill_wait_s=self._settings.kill_wait_s,
                process=self._settings.process,
                paths=self._paths,
            ),
            account,
            self._new_cgroup(),
        ).close()

    def _new_cgroup(self) -> CgroupName | None:
        """Create a cgroup for the script if this agent uses cgroups.

        Raises:
            OSError: The cgroup cannot be created.
        """
        if self._home.cgroups is None:
            return None
        with contextlib.closing(self._home.cgroups.script(self._order.job, self._order.attempt)) as cgroup:
            return cgroup.name

    def _see_mounted(self) -> None:
        """Check that the script's buffers are mounted.

        Raises:
            ImageFailed: An image cannot be mounted.
            FilesystemRefused: A shared filesystem is not mounted.
            BufferMissing: The job's buffer does not exist.
        """
        filesystem = self._order.filesystem
        placed = dict(self._order.persistent)
        if filesystem is not None:
            self._check_filesystem(filesystem)
        elif self._order.provision is None:
            capacity.see_mounted(self._home.buffers, str(self._order.job))
            self._see_buffer()
        for name in self._order.uses:
            if name in placed:
                self._check_filesystem(placed[name])
            elif self._order.provision is None:
                capacity.see_mounted(self._home.persistent, name)

    def _see_buffer(self) -> None:
        """Check that the job's own buffer exists: a restored cluster may not know that it was torn down."""
        if self._order.has_buffer:
            try:
                os.close(open_directory(str(self._order.job), dir_fd=self._home.buffers))
            except OSError as error:
                job = self._order.job
                raise BufferMissing(
                    f"the buffer of job {job} is not on this node: {error.strerror}; to stage it in again: "
                    f"forebay buffer clear {job} --discard, then forebay job requeue {job}"
                ) from error

    def _check_filesystem(self, filesystem: OrderFilesystem) -> None:
        """Check that this node has mounted the shared filesystem and the buffer exists there."""
        try:
            parent, name = open_parent(filesystem, switch=self._settings.accounts == "switch")
            with closing(parent):
                os.close(open_directory(name, dir_fd=parent))
        except OSError as error:
            sentence = (
                f"node {self._settings.node} does not see {filesystem.directory} "
                f"in shared filesystem {filesystem.name} ({filesystem.path})"
            )
            raise FilesystemRefused(f"{sentence}: {error.strerror}; check what is mounted there") from error

    def _hold_inodes(self) -> None:
        """Limit the files the script may create, beyond those staged in, if the filesystem can enforce it."""
        order, control = self._order, self._home.capacity_control.word
        if (
            control == capacity.WATCH
            or order.filesystem is not None
            or order.provision is not None
            or not (order.pool_is_bytes and order.has_buffer)
        ):
            return
        if order.capacity_bytes:
            with contextlib.suppress(FileNotFoundError):
                with closing(open_directory(str(order.job), dir_fd=self._home.buffers)) as buffer:
                    capacity.hold_inodes(buffer, control, str(order.job), inodes_of(order.capacity_bytes))

    async def _see_through(self, record: ScriptRecord) -> ScriptEnded:
        while True:
            try:
                ended = await self._poll(record)
            except OSError as error:
                if not is_resource_exhausted(error):
                    raise
                self._home.disk_full.warn(f"the script of job {self._order.job}", error)
                await asyncio.sleep(DISK_FULL_RETRY_S_MAX)
                continue
            if ended is not None:
                return ended

    async def _poll(self, record: ScriptRecord) -> ScriptEnded | None:
        """Take the next step for the script; return its result once it has ended and its start is reported."""
        if self._sync is not None and self._sync.has_ended() and (ended := record.status()) is not None:
            return await self._started_reported(record, ended)
        lock = record.try_lock()
        if lock is None:
            await self._watch(record)
            return None
        with closing(lock):
            ended = self._find_end(record)
            if ended is None:
                self._launch(record, lock)
                return None
            return await self._started_reported(record, ended)

    async def _started_reported(self, record: ScriptRecord, ended: ScriptEnded) -> ScriptEnded | None:
        """Return the result once the script's start is reported, or None while the disk is too full for that."""
        if not self._report_start(record) and record.started_process() is not None:
            await asyncio.sleep(DISK_FULL_RETRY_S)
            return None
        return ended

    def _find_end(self, record: ScriptRecord) -> ScriptEnded | None:
        """Return the script's result, or None if it never began and must be launched; the lock must be held."""
        ended = record.status()
        if ended is not None:
            return ended
        if record.started_process() is not None:
            ended = self._end_lost_script(record)
        elif self._ending.is_set() or self._order.cancel:
            ended = ScriptEnded(JobState.CANCELLED)
        elif self._order.started:
            ended = _node_fail("the script was started, but its record does not show it; its outcome is unknown")
        elif record.count_launch() > SUPERVISOR_LAUNCHES_MAX:
            message = record.last_report_line() or "it printed nothing"
            ended = _node_fail(
                f"the supervisor died {SUPERVISOR_LAUNCHES_MAX} times before it could start the script: {message}"
            )
        else:
            return None
        if (cgroup := Cgroup.find(record.cgroup())) is not None:
            # No supervisor will remove the cgroup, and a job without a buffer has no teardown.
            cgroup.remove()
            cgroup.close()
        try:
            record.write("status.json", ended)
        except OSError as error:
            if not is_resource_exhausted(error):
                raise
            # A later check reaches the same result, so nothing depends on this write.
            self._home.disk_full.warn(f"the record of job {self._order.job}", error)
        return ended

    def _end_lost_script(self, record: ScriptRecord) -> ScriptEnded:
        """Kill the remaining processes of a script whose supervisor died without recording the result."""
        process = record.started_process()
        leader = (process.pid, process.started) if process is not None and process.boot == boot_id() else None
        left: list[int] = []
        try:
            account = account_for(self._settings.accounts, self._order.user)
            marker = self._home.marker(self._order.job)
            left = kill_job(marker, account.uid, leader=leader, cgroup=record.cgroup())
        except AccountRefused as error:
            logger.warning("job %s: %s", self._order.job, error, extra=about(job=self._order.job))
        rest = f"; processes {', '.join(map(str, left[:20]))} cannot be killed" if left else ""
        message = f"the script's supervisor {self._supervisor_end(record)}; its outcome is unknown{rest}"
        logger.error("job %s: %s", self._order.job, message, extra=about(job=self._order.job))
        return _node_fail(message)

    def _supervisor_end(self, record: ScriptRecord) -> str:
        """Describe how the supervisor ended, from its exit code and the last line it wrote, as far as known."""
        code, words = self._supervisor_code, record.last_report_line()
        if code is None:
            end = "died"
        elif code < 0:
            end = f"was killed by signal {signal_name(-code)}"
        else:
            end = f"exited with code {code}"
        return f"{end} ({words})" if words else end

    def _launch(self, record: ScriptRecord, lock: int) -> None:
        self._hold_in_cgroup(record)
        with (
            closing(record.open_report()) as report,
            closing(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) as nothing,
        ):
            self._home.buffer_syncs.forget(self._order.job)
            told: int | None = None
            says: tuple[int, ...] = ()
            with contextlib.ExitStack() as its_own, contextlib.ExitStack() as unheard:
                if self._syncs:
                    told, tells = os.pipe2(os.O_CLOEXEC)
                    its_own.callback(os.close, tells)
                    unheard.callback(os.close, told)
                    says = (tells,)
                # The child inherits the lock, so it is never free between agent and supervisor.
                self._child = self._home.fork_server.spawn(
                    "forebay.cluster.agent.scripts.supervisor",
                    (os.path.join(self._home.path, STEPS, str(self._order.job)), str(lock), *map(str, says)),
                    descriptors=(lock, *says),
                    stdin=nothing,
                    stdout=report,
                    stderr=report,
                    new_session=True,
                )
                unheard.pop_all()
            if self._sync is not None:
                self._sync.close()
            self._sync = None if told is None else BufferSync(told, self._child)

    @property
    def _syncs(self) -> bool:
        """True if the supervisor syncs the buffer, which post-run would otherwise do."""
        order = self._order
        return order.has_buffer and order.provision is None and order.filesystem is None

    def _hold_in_cgroup(self, record: ScriptRecord) -> None:
        """Ensure that the script has a cgroup, if this agent uses cgroups, and that its record names it."""
        cgroup = Cgroup.find(record.cgroup())
        if cgroup is not None:
            cgroup.close()
        elif (name := self._new_cgroup()) is not None:
            record.write(CGROUP_FILE, name)
        else:
            record.forget_cgroup()

    async def _watch(self, record: ScriptRecord) -> None:
        """Wait until the supervisor has ended, or reports that only the sync of the buffer remains."""
        handle = self._hold(record)
        if handle is None:
            # The supervisor is starting, or has just ended.
            await asyncio.sleep(SUPERVISOR_POLL_S)
            return
        signalled = False
        try:
            while not handle.has_ended and not (self._sync is not None and self._sync.ended.is_set()):
                # Report the start first. A script that has begun by now is then signalled below or checked again soon.
                # In the other order
                # a change could remain pending for ever, since nothing else wakes this loop.
                known = self._report_start(record)
                if self._changed.is_set() and record.started_process() is not None:
                    if self._overrun and not self._overrun_told:
                        record.write("overrun", self._overrun)
                        handle.send(OVERRUN)
                        self._overrun_told = True
                    if not handle.awaits(SUSPEND, RESUME):
                        if self._suspended is not None:
                            handle.send(SUSPEND if self._suspended else RESUME)
                        self._changed.clear()
                if self._ending.is_set() and not signalled:
                    signalled = True
                    handle.send(signal.SIGTERM)
                # A start that cannot be reported waits for disk space.
                soon_s: float | None = SUPERVISOR_POLL_S if record.started_process() is None else DISK_FULL_RETRY_S
                if known:
                    # Retry pending signals soon.
                    soon_s = SUPERVISOR_POLL_S if self._changed.is_set() else None
                await self._pause(handle, signalled, soon_s)
        finally:
            over = handle.has_ended
            handle.close()
            if self._child is not None and over:
                self._supervisor_code = self._child.wait()
                self._child = None

    async def _pause(self, handle: Handle, signalled: bool, timeout_s: float | None) -> None:
        """Wait for the supervisor's end, a request to end it, or `timeout_s` seconds."""
        waits = {asyncio.ensure_future(handle.wait())}
        if not signalled:
            waits.add(asyncio.ensure_future(self._ending.wait()))
        if not self._changed.is_set():
            waits.add(asyncio.ensure_future(self._changed.wait()))
        if self._sync is not None:
            waits.add(asyncio.ensure_future(self._sync.ended.wait()))
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _hold(self, record: ScriptRecord) -> Handle | None:
        if self._child is not None:
            return Handle(self._child.pid)
        process = record.supervisor()
        if process is None or process.boot != boot_id():
            return None
        try:
            handle = Handle(process.pid)
        except ProcessLookupError:
            return None
        if start_time(process.pid) == process.started:
            return handle
        handle.close()
        return None

    def _report_start(self, record: ScriptRecord) -> bool:
        """Report once that the script runs; return True if that is done or was not needed."""
        if record.started_process() is None:
            return False
        if self._start_reported or record.reported_attempt() == self._order.attempt:
            return True
        try:
            if not self._order.started:
                self._on_started()
            self._start_reported = True
            # Only saves the next agent a duplicate report, which would be rejected without harm.
            record.note_reported(self._order.attempt)
        except OSError as error:
            if not is_resource_exhausted(error):
                raise
            self._home.disk_full.warn(f"the start of job {self._order.job}", error)
        return self._start_reported


def _node_fail(message: str) -> ScriptEnded:
    return ScriptEnded(JobState.NODE_FAIL, 0, 0, failure(message).message)


class ProviderScriptRun(ScriptRun):
    """Run of a job with an external provider: its operation pre_run, then the script."""

    def __init__(
        self, home: StateDirectory, order: Order, settings: AgentSettings, on_started: Callable[[], object]
    ) -> None:
        """Prepare as ScriptRun does."""
        super().__init__(home, order, settings, on_started)
        self._operation = WorkerOperation(home, msgspec.structs.replace(order, stage=PRE_RUN), settings)
        self.preparing = True
        """True until the script is handed over; ending the run then leaves nothing behind."""

    def end(self) -> None:
        """End the part in progress; `run` then returns the result."""
        super().end()
        self._operation.end()

    async def run(self) -> ScriptEnded | OperationFailed:
        """Supervise the run until it ends and return the result. Cancelling this coroutine leaves a script running."""
        order = self._order
        if not (order.started or self._ending.is_set() or order.cancel or self._is_recorded()):
            outcome = await self._operation.run()
            if outcome is None:
                return ScriptEnded(JobState.CANCELLED)
            if isinstance(outcome, OperationFailed):
                return outcome if outcome.operation else msgspec.structs.replace(outcome, operation=PRE_RUN)
        try:
            self._paths = paths_of(self._home.calls, order.job)
        except (FileRefused, msgspec.DecodeError) as error:
            return OperationFailed(f"the output of paths cannot be read: {error}", True, "paths")
        self.preparing = False
        return await super().run()

    def _is_recorded(self) -> bool:
        """Return whether the script of this order was already handed over, so that pre_run is complete."""
        if self._order.job not in recorded_jobs(self._home.steps):
            return False
        record = ScriptRecord(self._home.steps, self._order.job)
        try:
            wanted = record.order()
        except FileRefused:
            # ScriptRun reports the damaged record.
            return True
        finally:
            record.close()
        return wanted is not None and wanted.order.attempt >= self._order.attempt
