"""The directory of an agent: what it holds, whose it is, and that only one agent works in it.

lock          held by the agent that works here
storage-id    made once: another one means that the data is another disk's
buffers/JOB/  striped and private: what the job sees
buffers/.images/JOB.ext4  what is mounted there, where buffers are images; persistent ones likewise
operations/JOB  held by the worker of the job's operation while it lives
steps/JOB/    one run of one script (cluster.agent.script_run)
outbox/       results that the controller has not acknowledged
spare/        room for results and locks when the disk is full (cluster.agent.files.durable)
leftovers/JOB  where a transfer may leave something if it is killed (cluster.agent.worker.orphans)
transfers/JOB.STAGE.*  what a transfer has done, for its next attempt (cluster.agent.transfer.workspace)
receipts/JOB.ATTEMPT.STAGE  a line for each file that was moved
cgroup        where this agent's cgroups are, for the next one

The outbox has results on disk before they are sent, and they are sent until they are acknowledged. A report is
idempotent by (job, attempt): sent twice, the second is refused as stale, which acknowledges it too. While the disk is
full, reports are written into reserve files, which come back when they are acknowledged. Whatever else needs room waits
until there is some, and says so once a minute: the agent goes on meanwhile.
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

from cluster.agent.files import (
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
    Identity,
    ImageRefused,
    ReserveFiles,
    capacity,
    identity_of,
    is_no_room,
    read_bounded,
    write_durably,
)
from cluster.agent.home.buffer_syncs import BufferSyncs
from cluster.agent.home.worker_watchdog import Hung
from cluster.agent.limits import (
    COMMAND_AGE_S_MAX,
    DISK_FULL_RETRY_S,
    DISK_FULL_RETRY_S_MAX,
    DISK_FULL_WARNING_S,
    REPORTS_PER_REQUEST_MAX,
    START_GATHER_S,
)
from cluster.agent.processes import (
    Cgroup,
    CgroupName,
    CgroupRefused,
    CgroupTree,
    ForkServer,
    Mode,
    cgroup_of_script,
    open_tree,
)
from cluster.schemas import Report, instant_of, new_command_id
from cluster.system import Clock, SystemClock, names_in, open_directory
from replica.messages import ScriptStarted
from replica.values import seconds

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class GivenUp(Exception):
    """What waited for room is not wanted any more."""


class DiskFullRetry:
    """The room on the disk of one agent, as those see it who need some."""

    def __init__(self, shown: str, clock: Clock) -> None:
        """Begin with no complaint; `shown` names the disk."""
        self._shown = shown
        self._clock = clock
        self._warned_s: float | None = None

    async def keep_trying(self, what: str, act: Callable[[], _T], given_up: asyncio.Event) -> _T:
        """Return what `act` returns as soon as there is room for it; `what` is what waits, in words.

        GivenUp once `given_up` is set; OSError that has nothing to do with room.
        """
        wait_s = DISK_FULL_RETRY_S
        while not given_up.is_set():
            try:
                result = act()
            except OSError as error:
                if not is_no_room(error):
                    raise
                self.warn(what, error)
            else:
                self.found()
                return result
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(given_up.wait(), wait_s)
            wait_s = min(DISK_FULL_RETRY_S_MAX, 2 * wait_s)
        raise GivenUp

    def warn(self, what: str, error: OSError) -> None:
        """Say that `what` has to wait, unless something of the kind was said within the last minute."""
        now_s = self._clock.monotonic_s()
        if self._warned_s is None or now_s - self._warned_s >= DISK_FULL_WARNING_S:
            self._warned_s = now_s
            logger.warning(
                "%s: %s: %s waits until there is room; make some, nothing is lost", self._shown, error.strerror, what
            )

    def found(self) -> None:
        """There was room for something."""
        if self._warned_s is not None:
            self._warned_s = None
            logger.info("%s: there is room again", self._shown)


_CGROUP: Final = "cgroup"
_STORAGE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PRIVATE: Final = 0o700
_PASSABLE: Final = 0o711
"""Mode of what a job's user has to pass through, without listing it, on the way to his own buffer."""


class AgentFailed(Exception):
    """The agent cannot work; the message is a sentence that names the file and the remedy."""


class Home:
    """An agent's directory, opened and locked."""

    def __init__(self, path: Path, accounts: Mode, clock: Clock | None = None, *, images: bool = False) -> None:
        """Open the directory, making it if need be; AgentFailed if another agent works in it or it cannot be used.

        `images`: whether each buffer that is made is to be one.

        OSError if there is no room for what has to be made.
        """
        self._open: list[int] = []
        self.fork_server = ForkServer(clock)
        """What makes workers and supervisors: new interpreters, until it is told to start."""
        try:
            path.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
            self.path = Path(os.path.realpath(path))
            """Absolute and without links: what a job's environment names."""
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
            """What holds buffers to their capacity; they are watched whatever it is."""
            self.hung = Hung()
            self.buffer_syncs = BufferSyncs()
            self.cgroups: CgroupTree | None = None
            """Where processes of jobs are held; None: they are found by listing alone."""
            self._loose: frozenset[int] = frozenset()
            """Jobs of which something may live elsewhere: an earlier agent had other cgroups, or none."""
            self.disk_full = DiskFullRetry(str(self.path), clock or SystemClock())
            self.reserve_files = ReserveFiles(self._subdirectory(SPARE, _PRIVATE))
        except OSError as error:
            self.close()
            if is_no_room(error):
                raise
            raise AgentFailed(f"{path}: the agent's directory cannot be used: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> Identity:
        """What the kernel knows the directory by: jobs may not name files in it."""
        return identity_of(self.descriptor)

    def hold_processes(self, where: str) -> str:
        """Have cgroups for the processes of jobs, and return nothing, or why there are none; `where` as `open_tree`.

        What earlier agents left in theirs is ended, but for the scripts of which there is a record. OSError.
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
        """Return the tree of cgroups that all of a job's scripts live in; empty if something may live elsewhere."""
        return "" if self.cgroups is None or job in self._loose else self.cgroups.path

    def marker(self, job: int) -> str:
        """Return what marks the processes of a job of this agent."""
        return f"{self.storage_id}.{job}"

    def close(self) -> None:
        """Give the directory up; the lock is free afterwards."""
        self.fork_server.close()
        while self._open:
            os.close(self._open.pop())

    def _keep(self, descriptor: int) -> int:
        self._open.append(descriptor)
        return descriptor

    def _lock(self) -> None:
        # The file can be removed while it is held, the directory cannot: its lock is the one that counts. It is taken
        # on a descriptor of its own, which no helper is given: a helper must not hold it when the agent is dead.
        directory = self._keep(open_directory(".", dir_fd=self.descriptor))
        file = self._keep(
            os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        )
        try:
            for lock in (directory, file):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AgentFailed(
                f"{self.path}: another agent works in this directory; end it, or give this one its own"
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

    def _find_control(self, images: bool) -> capacity.Control:
        for parent in (self.buffers, self.persistent):
            for fault in capacity.see_all_mounted(parent):
                logger.error("%s: %s", self.path, fault)
        if not images:
            return capacity.find_control(self.buffers)
        try:
            return capacity.hold_by_images(self.buffers)
        except ImageRefused as error:
            raise AgentFailed(f'{self.path}: buffer_image = "ext4": {error}; or write "none"') from error

    def _storage_id(self) -> str:
        data = read_bounded(self.descriptor, "storage-id")
        if data is None:
            if names_in(self.buffers):
                raise AgentFailed(
                    f"{self.path}: there are buffers but no storage-id; "
                    "put the file back, or empty buffers/ if the data may go"
                )
            data = uuid.uuid4().hex.encode() + b"\n"
            write_durably(self.descriptor, "storage-id", data)
        text = data.decode("ascii", "replace").strip()
        if _STORAGE_ID.fullmatch(text) is None:
            raise AgentFailed(f"{self.path}/storage-id does not hold 32 hexadecimal digits; put the right file back")
        return text


_SYNCED: Final = "json"
_UNSYNCED: Final = "unsynced"
"""How the names of reports end: of those that are durable before they are sent, and of those that are found again after
a power cut."""

_REPORT_NAME: Final = re.compile(rf"([0-9]{{20}})\.({_SYNCED}|{_UNSYNCED})", re.ASCII)


class Outbox:
    """The reports of an agent, in the order in which they were made."""

    def __init__(self, directory: int, clock: Clock, reserve_files: ReserveFiles) -> None:
        """Read what is in the open directory; AgentFailed names a file that cannot be read."""
        self._directory = directory
        self._spares = reserve_files
        self._clock = clock
        self._reports: dict[int, Report] = {}
        self._names: dict[int, str] = {}
        self.changed = asyncio.Event()
        """Set while there may be something to send."""
        for name in sorted(names_in(directory)):
            found = _REPORT_NAME.fullmatch(name)
            if found is None:
                # Lent and not used: it comes back.
                if name.endswith(RESERVE_SUFFIX):
                    reserve_files.drop(directory, name)
                continue
            try:
                self._reports[int(found.group(1))] = msgspec.json.decode(
                    read_bounded(directory, name) or b"", type=Report
                )
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if found.group(2) == _UNSYNCED:
                    reserve_files.drop(directory, name)
                    continue
                raise AgentFailed(
                    f"outbox/{name} is damaged ({error}); the disk may be failing: "
                    "move the file away, and its operation is ordered again"
                ) from error
            self._names[int(found.group(1))] = name
        self._next = max(self._reports, default=0) + 1
        if self._reports:
            self.changed.set()

    def __len__(self) -> int:
        return len(self._reports)

    def reports(self) -> list[Report]:
        """Return everything that is not acknowledged, oldest first."""
        return list(self._reports.values())

    def add(self, job: int, attempt: int, stage: str, result: object, *, lasting: bool = True) -> None:
        """Keep a result until it is acknowledged; durable on return, if it is to be `lasting`.

        One that is not outlives this agent, and a power cut perhaps: what it says has to be found again then.

        OSError if the disk does not take it: nothing is kept then, and the same may be added again.
        """
        report = msgspec.convert(
            {
                "command_id": new_command_id(self._clock),
                "job": job,
                "attempt": attempt,
                "stage": stage,
                "result": msgspec.to_builtins(result),
            },
            type=Report,
        )
        number = self._next
        name = f"{number:020}.{_SYNCED if lasting else _UNSYNCED}"
        self._spares.write(self._directory, name, msgspec.json.encode(report), lasting=lasting)
        self._next += 1
        self._spares.fill()
        self._reports[number] = report
        self._names[number] = name
        if isinstance(report.result, ScriptStarted):
            # The next one takes it along, if it comes soon.
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().call_later(START_GATHER_S, self.changed.set)
                return
        self.changed.set()

    def batch(self) -> list[Report]:
        """Return the oldest reports for one request.

        An id that the controller would find too old is replaced by a new one.
        """
        chosen: list[Report] = []
        for number in sorted(self._reports)[:REPORTS_PER_REQUEST_MAX]:
            report = self._reports[number]
            if abs(self._clock.now() - instant_of(report.command_id)) > seconds(COMMAND_AGE_S_MAX):
                report = msgspec.structs.replace(report, command_id=new_command_id(self._clock))
                self._reports[number] = report
            chosen.append(report)
        return chosen

    def acknowledge(self, command_id: str) -> Report | None:
        """Drop the report that was sent with this id and return it; None if there is none."""
        for number, report in self._reports.items():
            if report.command_id == command_id:
                # Not synced: a report that comes back after a crash is refused as stale.
                self._spares.drop(self._directory, self._names.pop(number))
                del self._reports[number]
                return report
        return None
