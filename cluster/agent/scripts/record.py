"""Durable record of one run of one script: the order, its start and its end.

    order.json     order to run, written first
    script         the script, executable by its user
    lock           held without a gap by the responsible process: first the agent, then the supervisor
    cgroup.json    cgroup of the script, if any; written before a supervisor is launched
    launches       a byte for each launched supervisor; not synced, it only limits relaunches of one that dies
    reported       attempt whose start is in the outbox; not synced: without it, the start is reported again, which the
                   controller rejects
    supervisor.json  process of the supervisor
    started.json   written before the script can run: without it, it never ran
    overrun        reason for ending it at once: its buffer exceeds its capacity
    status.json    result
    *.room         reserved space for the files that are written later, when the disk may be full

A process that holds the lock and finds neither started.json nor status.json knows that the script never ran; with
started.json alone the outcome is unknown. Each record therefore runs its script at most once, whichever process is
killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from typing import Final, TypeVar

import msgspec

from forebay.cluster.agent.files import (
    RESERVE_SUFFIX,
    FileRefused,
    read_bounded,
    read_record,
    remove_tree,
    reserve,
    write_durably,
    write_new,
    write_reserved,
)
from forebay.cluster.agent.processes import CGROUP_FILE, CgroupName, Mode, UnixAccount
from forebay.cluster.system import JobProcess, closing, names_in, open_directory, write_all
from forebay.replica.messages import ScriptEnded
from forebay.replica.model import Order
from forebay.replica.values import SUBMITTED_SCRIPT_BYTES_MAX

SUSPEND: Final = signal.SIGINT
RESUME: Final = signal.SIGUSR2
OVERRUN: Final = signal.SIGUSR1
"""Signals from the agent to a supervisor: suspend, resume, and end at once because the buffer exceeds its capacity."""

PREPARED_PREFIX: Final = ".new-"
"""Name prefix of a record being written; one found at start was never launched."""


_WRITTEN_LATER: Final = ("supervisor.json", "started.json", "overrun", "status.json")
"""Files written while the script may run, when it may have filled the disk."""


class ScriptOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order and settings for a supervisor."""

    order: Order
    node: str
    home: str
    storage_id: str
    accounts: Mode
    kill_wait_s: float
    process: JobProcess = JobProcess()
    """Settings of the script's process."""
    paths: tuple[tuple[str, str], ...] = ()
    """Environment variables from an external provider."""


class ProcessName(msgspec.Struct, frozen=True, kw_only=True):
    """Unambiguous name of a process: ID, start time (clock ticks since boot) and boot ID."""

    pid: int
    started: int
    boot: str


_T = TypeVar("_T")


class ScriptRecord:
    """Open record of a script."""

    def __init__(self, steps: int, job: int) -> None:
        """Open the record of `job` in the open directory `steps`.

        Raises:
            FileNotFoundError: There is no record.
        """
        self.job = job
        self.directory = open_directory(str(job), dir_fd=steps)

    def close(self) -> None:
        """Close the directory; the record remains."""
        os.close(self.directory)

    def order(self) -> ScriptOrder | None:
        """Return the order, or None if the file is missing."""
        return self._read_file("order.json", ScriptOrder)

    def started_process(self) -> ProcessName | None:
        """Return the script's process if the script may have run, otherwise None."""
        return self._read_file("started.json", ProcessName)

    def supervisor(self) -> ProcessName | None:
        """Return the last supervisor that came up."""
        return self._read_file("supervisor.json", ProcessName)

    def cgroup(self) -> CgroupName | None:
        """Return the cgroup of the script, or None."""
        return self._read_file(CGROUP_FILE, CgroupName)

    def status(self) -> ScriptEnded | None:
        """Return the script's result, or None if unknown."""
        return self._read_file("status.json", ScriptEnded)

    def write(self, name: str, what: ProcessName | ScriptEnded | CgroupName | str) -> None:
        """Write a file of the record durably.

        `cgroup.json` and `started.json` are written before the script may run, `status.json` at its end.
        """
        data = msgspec.json.encode(what)
        if not write_reserved(self.directory, name, data):
            write_durably(self.directory, name, data)

    def overrun(self) -> str:
        """Return the reason for ending the script at once, or ""."""
        return self._read_file("overrun", str) or ""

    def forget_cgroup(self) -> None:
        """Record that the script has no cgroup, because the one of a failed launch was deleted."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(CGROUP_FILE, dir_fd=self.directory)
            os.fsync(self.directory)

    def count_launch(self) -> int:
        """Count a launch and return the new count."""
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open("launches", how, 0o600, dir_fd=self.directory)) as launches:
            write_all(launches, b".")
            return os.fstat(launches).st_size

    def note_reported(self, attempt: int) -> None:
        """Record that the start was reported for an attempt; survives the agent but not a reboot."""
        write_durably(self.directory, "reported", str(attempt).encode(), lasting=False)

    def reported_attempt(self) -> int:
        """Return the attempt whose start was reported, or 0."""
        text = (read_bounded(self.directory, "reported") or b"").strip()
        return int(text) if text.isdigit() else 0

    def try_lock(self) -> int | None:
        """Return a descriptor that holds the lock, or None if another process holds it."""
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def open_report(self) -> int:
        """Open the file for a supervisor's error output."""
        return os.open(
            "supervisor.err",
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=self.directory,
        )

    def last_report_line(self) -> str:
        """Return the last line of a supervisor's error output, or ""."""
        with contextlib.suppress(FileRefused):
            lines = (
                (read_bounded(self.directory, "supervisor.err") or b"").decode("utf-8", "replace").strip().splitlines()
            )
            return lines[-1] if lines else ""
        return ""

    def _read_file(self, name: str, kind: type[_T]) -> _T | None:
        return read_record(self.directory, name, kind, shown=f"steps/{self.job}/{name}")


UNPACKING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Memory for unpacking one script, bytes: seven times what LZMA uses at its default preset."""


def unpack_script(script: str) -> str:
    """Unpack a packed script; return the text itself if it is not packed or would be too long."""
    import base64
    import lzma

    from forebay.replica.grammar import split_packed  # few scripts need it

    found = split_packed(script)
    if found is None:
        return script
    head, rest = found
    try:
        reader = lzma.LZMADecompressor(memlimit=UNPACKING_BYTES_MAX)
        data = reader.decompress(base64.b85decode(rest.strip()), SUBMITTED_SCRIPT_BYTES_MAX + 1)
        return head + data.decode() if reader.eof else script
    except (ValueError, lzma.LZMAError, EOFError):
        return script


def create_record(
    steps: int, wanted: ScriptOrder, account: UnixAccount, cgroup: CgroupName | None = None
) -> ScriptRecord:
    """Create the complete record of a script, optionally with its cgroup.

    Raises:
        FileExistsError: There is a record already.
        OSError: The record cannot be created.
    """
    job = wanted.order.job
    prepared, name = f"{PREPARED_PREFIX}{job}", str(job)
    remove_tree(steps, prepared, shown=f"steps/{prepared}", lasting=False)
    os.mkdir(prepared, 0o700, dir_fd=steps)
    with closing(open_directory(prepared, dir_fd=steps)) as directory:
        write_new(directory, "order.json", msgspec.json.encode(wanted))
        if cgroup is not None:
            write_new(directory, CGROUP_FILE, msgspec.json.encode(cgroup))
        write_new(
            directory,
            "script",
            unpack_script(wanted.order.script).encode(),
            mode=0o500,
            owner=(account.uid, account.gid) if account.switch else None,
        )
        # The script may fill the disk, but its result must still be recorded.
        for later in _WRITTEN_LATER:
            reserve(directory, later + RESERVE_SUFFIX)
        for empty in ("lock", "supervisor.err"):
            os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory))
        # The user traverses the directory to the script; everything else stays the agent's.
        os.fchmod(directory, 0o711 if account.switch else 0o700)
        os.fsync(directory)
    if name in names_in(steps):
        raise FileExistsError(17, os.strerror(17), f"steps/{name}")
    os.rename(prepared, name, src_dir_fd=steps, dst_dir_fd=steps)
    os.fsync(steps)
    return ScriptRecord(steps, job)


def remove_record(steps: int, job: int, *, lasting: bool = True) -> None:
    """Remove the record of a job, if any; durably if `lasting`."""
    remove_tree(steps, str(job), shown=f"steps/{job}", lasting=False)
    if lasting:
        os.fsync(steps)


def recorded_jobs(steps: int) -> list[int]:
    """Return the jobs with a record."""
    return sorted(int(name) for name in names_in(steps) if name.isdecimal())
