"""The directory of an agent: what it holds, whose it is, and that only one agent works in it.

lock          held by the agent that works here
storage-id    made once: another one means that the data is another disk's
buffers/JOB/  striped and private: what the job sees
operations/JOB  held by the worker of the job's operation while it lives
steps/JOB/    one run of one script (cluster.agent.script_run)
outbox/       results that the controller has not acknowledged
spare/        room for results and locks when the disk is full (cluster.agent.files.reserve_files)
leftovers/JOB  where a transfer may leave something if it is killed (cluster.agent.worker.orphans)
transfers/JOB.STAGE.*  what a transfer has done, for its next attempt (cluster.agent.transfer.workspace)
receipts/JOB.ATTEMPT.STAGE  a line for each file that was moved
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from pathlib import Path
from typing import Final

from cluster.agent.files import (
    BUFFERS,
    CALLS,
    LEFTOVERS,
    OPERATIONS,
    OUTBOX,
    PERSISTENT,
    SPARE,
    STEPS,
    TEMPORARY_SUFFIX,
    Identity,
    ReserveFiles,
    identity_of,
    is_no_room,
    read_bounded,
    write_durably,
)
from cluster.agent.home.disk_full_retry import DiskFullRetry
from cluster.agent.home.worker_watchdog import Hung
from cluster.agent.processes import Mode
from cluster.system import Clock, SystemClock, open_directory

_STORAGE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PRIVATE: Final = 0o700
_PASSABLE: Final = 0o711
"""Mode of what a job's user has to pass through, without listing it, on the way to his own buffer."""


class AgentFailed(Exception):
    """The agent cannot work; the message is a sentence that names the file and the remedy."""


class Home:
    """An agent's directory, opened and locked."""

    def __init__(self, path: Path, accounts: Mode, clock: Clock | None = None) -> None:
        """Open the directory, making it if need be; AgentFailed if another agent works in it or it cannot be used.

        OSError if there is no room for what has to be made.
        """
        self._open: list[int] = []
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
            self.hung = Hung()
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

    def marker(self, job: int) -> str:
        """Return what marks the processes of a job of this agent."""
        return f"{self.storage_id}.{job}"

    def close(self) -> None:
        """Give the directory up; the lock is free afterwards."""
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
        for entry in os.listdir(descriptor):
            if entry.endswith(TEMPORARY_SUFFIX) and name in (OUTBOX, LEFTOVERS):
                os.unlink(entry, dir_fd=descriptor)
        return descriptor

    def _storage_id(self) -> str:
        data = read_bounded(self.descriptor, "storage-id")
        if data is None:
            if os.listdir(self.buffers):
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
