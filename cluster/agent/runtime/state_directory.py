"""State directory of an agent: its content, its lock and its report outbox.

lock held by the running agent storage-id created once; a different ID means that the data belongs to another disk
buffers/JOB/ striped and private: the directories the job sees buffers/.images/JOB.ext4 image mounted on the buffer, if
buffers are images; likewise for persistent ones operations/JOB held by the worker of the job's operation while it runs
steps/JOB/ one run of one script (cluster.agent.script_run) outbox/ results that the controller has not acknowledged
spare/ reserve files for results and locks on a full disk (cluster.agent.files.durable) leftovers/JOB where a killed
transfer may leave files (cluster.agent.worker.orphans) transfers/JOB.STAGE.* progress of a transfer, for its next
attempt (cluster.agent.transfer.workspace) receipts/JOB.ATTEMPT.STAGE one line for each file that was moved cgroup
location of this agent's cgroups, for the next agent

Results are durable in the outbox before they are sent, and are resent until acknowledged. A report is idempotent by
(job, attempt): the controller rejects a duplicate as stale, which acknowledges it too. While the disk is full, reports
use reserve files, which are reused after acknowledgement. Everything else waits for space, with a warning once a
minute, while the agent keeps running.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from forebay.cluster.agent.files import (
    BUFFERS,
    CALLS,
    LEFTOVERS,
    OPERATIONS,
    OUTBOX,
    PERSISTENT,
    RESERVE_SUFFIX,
    SPARE,
    STEPS,
    TEMPORARY_SUFFIX,
    FileIdentity,
    ImageFailed,
    ReserveFiles,
    capacity,
    identity_of,
    is_resource_exhausted,
    read_bounded,
    write_durably,
)
from forebay.cluster.agent.limits import (
    COMMAND_AGE_S_MAX,
    DISK_FULL_RETRY_S,
    DISK_FULL_RETRY_S_MAX,
    DISK_FULL_WARNING_S,
    REPORTS_PER_REQUEST_MAX,
    START_GATHER_S,
)
from forebay.cluster.agent.processes import (
    Cgroup,
    CgroupName,
    CgroupRefused,
    CgroupTree,
    ForkServer,
    Mode,
    cgroup_of_script,
    open_tree,
)
from forebay.cluster.agent.runtime.buffer_syncs import BufferSyncs
from forebay.cluster.agent.runtime.worker_watchdog import HungWorkers
from forebay.cluster.schemas import OperationReport, instant_of, new_command_id
from forebay.cluster.system import Clock, SystemClock, names_in, open_directory
from forebay.replica.messages import ScriptStarted
from forebay.replica.values import seconds

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class RetryAbandoned(Exception):
    """Raised when an operation waiting for disk space is no longer needed."""


class DiskFullRetry:
    """Retries on one agent's full disk."""

    def __init__(self, shown: str, clock: Clock) -> None:
        """Begin without warnings; `shown` names the disk in log lines."""
        self._shown = shown
        self._clock = clock
        self._warned_s: float | None = None

    async def keep_trying(self, what: str, act: Callable[[], _T], given_up: asyncio.Event) -> _T:
        """Call `act` until there is space for it and return its result; `what` describes it in log lines.

        Raises:
            RetryAbandoned: `given_up` was set.
            OSError: The error has another cause than exhausted resources.
        """
        wait_s = DISK_FULL_RETRY_S
        while not given_up.is_set():
            try:
                result = act()
            except OSError as error:
                if not is_resource_exhausted(error):
                    raise
                self.warn(what, error)
            else:
                self.note_space_available()
                return result
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(given_up.wait(), wait_s)
            wait_s = min(DISK_FULL_RETRY_S_MAX, 2 * wait_s)
        raise RetryAbandoned

    def warn(self, what: str, error: OSError) -> None:
        """Log that `what` has to wait, at most once a minute."""
        now_s = self._clock.monotonic_s()
        if self._warned_s is None or now_s - self._warned_s >= DISK_FULL_WARNING_S:
            self._warned_s = now_s
            logger.warning("%s: %s: %s waits for space; free some, nothing is lost", self._shown, error.strerror, what)

    def note_space_available(self) -> None:
        """Log the end of a shortage."""
        if self._warned_s is not None:
            self._warned_s = None
            logger.info("%s: there is space again", self._shown)


_CGROUP: Final = "cgroup"
_STORAGE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PRIVATE: Final = 0o700
_PASSABLE: Final = 0o711
"""Mode of directories that a job's user must traverse, without listing them, to reach the buffer."""


class AgentFailed(Exception):
    """Fatal error of an agent; the message names the file and the remedy."""


class StateDirectory:
    """Open and locked state directory of an agent."""

    def __init__(self, path: Path, accounts: Mode, clock: Clock | None = None, *, images: bool = False) -> None:
        """Open the directory, creating it if necessary. `images` makes each new buffer an image.

        Raises:
            AgentFailed: Another agent uses the directory, or it is unusable.
            OSError: There is no space for the files to create.
        """
        self._open: list[int] = []
        self.fork_server = ForkServer(clock)
        """Starts workers and supervisors; until `start`, each is a new interpreter."""
        try:
            path.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
            self.path = Path(os.path.realpath(path))
            """Absolute path without links, as in a job's environment."""
            self.descriptor = self._keep(open_directory(self.path))
            self._lock()
            mode = _PASSABLE if accounts == "switch" else _PRIVATE
            os.fchmod(self.descriptor, mode)
            self.buffers = self._subdirectory(BUFFERS, mode)
            self.operations = self._subdirectory(OPERATIONS, _PRIVATE)
            self.steps = self._subdirectory(STEPS, mode)
            self.outbox = self._subdirectory(OUTBOX, _PRIVATE)
            self.leftovers = self._subdirectory(LEFTOVERS, _PRIVATE)
            self.calls = self._subdirectory(CALLS, _PRIVATE)
            self.persistent = self._subdirectory(PERSISTENT, mode)
            self.storage_id = self._storage_id()
            self.capacity_control = self._find_control(images)
            """Mechanism that enforces the capacity of buffers; they are watched in any case."""
            self.hung = HungWorkers()
            self.buffer_syncs = BufferSyncs()
            self.cgroups: CgroupTree | None = None
            """Cgroups for the processes of jobs; None if processes are only found by listing."""
            self._loose: frozenset[int] = frozenset()
            """Jobs that may have processes elsewhere, because an earlier agent used other cgroups or none."""
            self.disk_full = DiskFullRetry(str(self.path), clock or SystemClock())
            self.reserve_files = ReserveFiles(self._subdirectory(SPARE, _PRIVATE))
        except OSError as error:
            self.close()
            if is_resource_exhausted(error):
                raise
            raise AgentFailed(f"{path}: the agent's directory cannot be used: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> FileIdentity:
        """Device and inode of the directory: jobs may not name files in it."""
        return identity_of(self.descriptor)

    def hold_processes(self, where: str) -> str:
        """Set up cgroups for jobs; return "" or the reason why there are none. `where` is as for `open_tree`.

        Processes in an earlier agent's cgroups are killed, except for recorded scripts.

        Raises:
            OSError: The location of the cgroups cannot be recorded.
        """
        scripts = [int(name) for name in names_in(self.steps) if name.isdecimal()]
        refused = ""
        try:
            self.cgroups = open_tree(where, self.storage_id)
        except CgroupRefused as error:
            refused = str(error)
        earlier: CgroupName | None = None
        data = read_bounded(self.descriptor, _CGROUP)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            earlier = None if data is None else msgspec.json.decode(data, type=CgroupName)
            if earlier is not None and (found := Cgroup.find(earlier)) is not None:
                found.close()
                CgroupTree(earlier.path).sweep(scripts)
        if self.cgroups is not None:
            self.cgroups.sweep(scripts)
            known = () if earlier is not None and earlier.path == self.cgroups.path else names_in(self.buffers)
            free = (str(job) for job in scripts if cgroup_of_script(str(self.path), job) is None)
            self._loose = frozenset(int(name) for name in (*known, *free) if name.isdecimal())
            write_durably(self.descriptor, _CGROUP, msgspec.json.encode(self.cgroups.name))
        return refused

    def cgroups_of(self, job: int) -> str:
        """Return the cgroup tree that contains all of a job's scripts; empty if some processes may be outside."""
        return "" if self.cgroups is None or job in self._loose else self.cgroups.path

    def marker(self, job: int) -> str:
        """Return the marker of a job's processes."""
        return f"{self.storage_id}.{job}"

    def close(self) -> None:
        """Close the directory and release the lock."""
        self.fork_server.close()
        while self._open:
            os.close(self._open.pop())

    def _keep(self, descriptor: int) -> int:
        self._open.append(descriptor)
        return descriptor

    def _lock(self) -> None:
        # The lock file can be removed while it is held, so the lock on the directory counts. It uses a descriptor of
        # its own that
        # no helper inherits, because a helper must not hold it after the agent's death.
        directory = self._keep(open_directory(".", dir_fd=self.descriptor))
        file = self._keep(
            os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        )
        try:
            for lock in (directory, file):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AgentFailed(
                f"{self.path}: another agent uses this directory; stop it, or configure another directory"
            ) from None

    def _subdirectory(self, name: str, mode: int) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _PRIVATE, dir_fd=self.descriptor)
            os.fsync(self.descriptor)
        descriptor = self._keep(open_directory(name, dir_fd=self.descriptor))
        os.fchmod(descriptor, mode)
        for entry in names_in(descriptor):
            if entry.endswith(TEMPORARY_SUFFIX) and name in (OUTBOX, LEFTOVERS):
                os.unlink(entry, dir_fd=descriptor)
        return descriptor

    def _find_control(self, images: bool) -> capacity.CapacityControl:
        for parent in (self.buffers, self.persistent):
            for fault in capacity.see_all_mounted(parent):
                logger.error("%s: %s", self.path, fault)
        if not images:
            return capacity.find_control(self.buffers)
        try:
            return capacity.hold_by_images(self.buffers)
        except ImageFailed as error:
            raise AgentFailed(f'{self.path}: buffer_image = "ext4": {error}; or write "none"') from error

    def _storage_id(self) -> str:
        data = read_bounded(self.descriptor, "storage-id")
        if data is None:
            if names_in(self.buffers):
                raise AgentFailed(
                    f"{self.path}: storage-id is missing although there are buffers; "
                    "restore the file, or empty buffers/ if the data can be lost"
                )
            data = uuid.uuid4().hex.encode() + b"\n"
            write_durably(self.descriptor, "storage-id", data)
        text = data.decode("ascii", "replace").strip()
        if _STORAGE_ID.fullmatch(text) is None:
            raise AgentFailed(
                f"{self.path}/storage-id does not contain 32 hexadecimal digits; restore the original file"
            )
        return text


_SYNCED: Final = "json"
_UNSYNCED: Final = "unsynced"
"""Suffixes of report files: durable before they are sent, and recoverable after a power failure by other means."""

_REPORT_NAME: Final = re.compile(rf"([0-9]{{20}})\.({_SYNCED}|{_UNSYNCED})", re.ASCII)


class ReportOutbox:
    """Reports of an agent that are not yet acknowledged, in order."""

    def __init__(self, directory: int, clock: Clock, reserve_files: ReserveFiles) -> None:
        """Load the reports in an open directory.

        Raises:
            AgentFailed: A report is damaged; the message names the file.
        """
        self._directory = directory
        self._spares = reserve_files
        self._clock = clock
        self._reports: dict[int, OperationReport] = {}
        self._names: dict[int, str] = {}
        self.changed = asyncio.Event()
        """Set while there may be reports to send."""
        for name in sorted(names_in(directory)):
            found = _REPORT_NAME.fullmatch(name)
            if found is None:
                # Return an unused reserve file.
                if name.endswith(RESERVE_SUFFIX):
                    reserve_files.drop(directory, name)
                continue
            try:
                self._reports[int(found.group(1))] = msgspec.json.decode(
                    read_bounded(directory, name) or b"", type=OperationReport
                )
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if found.group(2) == _UNSYNCED:
                    reserve_files.drop(directory, name)
                    continue
                raise AgentFailed(
                    f"outbox/{name} is damaged ({error}); the disk may be failing: "
                    "move the file away; its operation will be ordered again"
                ) from error
            self._names[int(found.group(1))] = name
        self._next = max(self._reports, default=0) + 1
        if self._reports:
            self.changed.set()

    def __len__(self) -> int:
        return len(self._reports)

    def reports(self) -> list[OperationReport]:
        """Return all unacknowledged reports, oldest first."""
        return list(self._reports.values())

    def add(self, job: int, attempt: int, stage: str, result: object, *, lasting: bool = True) -> None:
        """Store a result until it is acknowledged; durable on return if `lasting`.

        A result that is not `lasting` survives a restart of the agent, but perhaps not a power failure. The caller must
        then be able to obtain it again.

        Raises:
            OSError: The disk is full or fails; nothing is stored and the call can be repeated.
        """
        report = msgspec.convert(
            {
                "command_id": new_command_id(self._clock),
                "job": job,
                "attempt": attempt,
                "stage": stage,
                "result": msgspec.to_builtins(result),
            },
            type=OperationReport,
        )
        number = self._next
        name = f"{number:020}.{_SYNCED if lasting else _UNSYNCED}"
        self._spares.write(self._directory, name, msgspec.json.encode(report), lasting=lasting)
        self._next += 1
        self._spares.fill()
        self._reports[number] = report
        self._names[number] = name
        if isinstance(report.result, ScriptStarted):
            # Wait briefly, so that the script's end can go in the same request.
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().call_later(START_GATHER_S, self.changed.set)
                return
        self.changed.set()

    def batch(self) -> list[OperationReport]:
        """Return the oldest reports for one request, with new command IDs where the controller would reject the old
        ones.
        """
        chosen: list[OperationReport] = []
        for number in sorted(self._reports)[:REPORTS_PER_REQUEST_MAX]:
            report = self._reports[number]
            if abs(self._clock.now() - instant_of(report.command_id)) > seconds(COMMAND_AGE_S_MAX):
                report = msgspec.structs.replace(report, command_id=new_command_id(self._clock))
                self._reports[number] = report
            chosen.append(report)
        return chosen

    def acknowledge(self, command_id: str) -> OperationReport | None:
        """Remove and return the report sent under this ID; None if there is none."""
        for number, report in self._reports.items():
            if report.command_id == command_id:
                # No sync is needed: a report that reappears after a crash is rejected as stale.
                self._spares.drop(self._directory, self._names.pop(number))
                del self._reports[number]
                return report
        return None
