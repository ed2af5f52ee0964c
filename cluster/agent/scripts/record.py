"""The durable record of one run of one script: what was ordered, that it was started, how it ended.

    order.json     what is to be run, written before anything else
    script         the script, executable by its user
    lock           held without a gap by whoever is responsible: first the agent, then the supervisor
    cgroup.json    the cgroup that the script lives in, where there is one: written before a supervisor is launched
    launches       a byte for each supervisor that was launched; not synced, it only keeps one that dies from being
                   launched for ever
    reported       for which attempt the start of the script is in the outbox; not synced: without it, it is reported
                   once more, which is refused
    supervisor.json  who the supervisor is
    started.json   written before the script can run: without it, it never has
    overrun        why it is ended at once: its buffer holds too much
    status.json    how it ended
    *.room         room for those of the files above that are written later, when the disk may be full

Whoever holds the lock and finds neither started.json nor status.json knows that the script never ran; with started.json
alone the outcome is unknown. So the script runs at most once for one record, whatever is killed when."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from typing import Final, TypeVar

import msgspec

from cluster.agent.files import (
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
from cluster.agent.processes import CGROUP_FILE, Account, CgroupName, Mode
from cluster.system import JobProcess, closing, names_in, open_directory, write_all
from replica.messages import ScriptEnded
from replica.model import Order
from replica.values import SUBMITTED_SCRIPT_BYTES_MAX

SUSPEND: Final = signal.SIGINT
RESUME: Final = signal.SIGUSR2
OVERRUN: Final = signal.SIGUSR1
"""What the agent sends a supervisor to have its script stand still, go on, and end at once for what its buffer
holds."""

PREPARED_PREFIX: Final = ".new-"
"""A record that is being written has this before its name; one that is found at a start was never launched."""


_WRITTEN_LATER: Final = ("supervisor.json", "started.json", "overrun", "status.json")
"""What is written when the script may run: it may have filled the disk."""


class ScriptOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor needs to know."""

    order: Order
    node: str
    home: str
    storage_id: str
    accounts: Mode
    kill_wait_s: float
    process: JobProcess = JobProcess()
    """What the script's process gets."""
    paths: tuple[tuple[str, str], ...] = ()
    """What a site's provider adds to the script's environment."""


class ProcessName(msgspec.Struct, frozen=True, kw_only=True):
    """A process for ever: its number, when it started (clock ticks since boot), and in which boot."""

    pid: int
    started: int
    boot: str


_T = TypeVar("_T")


class ScriptRecord:
    """Record of a script, open."""

    def __init__(self, steps: int, job: int) -> None:
        """Open the record of `job` in the open directory `steps`; FileNotFoundError if there is none."""
        self.job = job
        self.directory = open_directory(str(job), dir_fd=steps)

    def close(self) -> None:
        """Close the directory; the record stays."""
        os.close(self.directory)

    def order(self) -> ScriptOrder | None:
        """Return what is to be run; None if the file is missing."""
        return self._read("order.json", ScriptOrder)

    def started(self) -> ProcessName | None:
        """Return the script's own process if it may have run, None if it never has."""
        return self._read("started.json", ProcessName)

    def supervisor(self) -> ProcessName | None:
        """Return the last supervisor that came up."""
        return self._read("supervisor.json", ProcessName)

    def cgroup(self) -> CgroupName | None:
        """Return the cgroup that the script lives in; None if it has none."""
        return self._read(CGROUP_FILE, CgroupName)

    def status(self) -> ScriptEnded | None:
        """Return how the script ended, None if that is not known."""
        return self._read("status.json", ScriptEnded)

    def write(self, name: str, what: ProcessName | ScriptEnded | CgroupName | str) -> None:
        """Record something, durably: `cgroup.json` and `started.json` before the script may run, `supervisor.json`,
        and `status.json` at its end.
        """
        data = msgspec.json.encode(what)
        if not write_reserved(self.directory, name, data):
            write_durably(self.directory, name, data)

    def overrun(self) -> str:
        """Return why the script is ended at once; empty if it is not."""
        return self._read("overrun", str) or ""

    def forget_cgroup(self) -> None:
        """Record that the script will live in no cgroup: the one of a launch that came to nothing is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(CGROUP_FILE, dir_fd=self.directory)
            os.fsync(self.directory)

    def count_launch(self) -> int:
        """Count one more launch, and return the count."""
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open("launches", how, 0o600, dir_fd=self.directory)) as launches:
            write_all(launches, b".")
            return os.fstat(launches).st_size

    def note_reported(self, attempt: int) -> None:
        """Keep that the start of the script was reported for an attempt, for as long as the machine is up."""
        write_durably(self.directory, "reported", str(attempt).encode(), lasting=False)

    def reported_attempt(self) -> int:
        """Return the attempt for which the start of the script was reported, 0 if it was not."""
        text = (read_bounded(self.directory, "reported") or b"").strip()
        return int(text) if text.isdigit() else 0

    def try_lock(self) -> int | None:
        """Return a descriptor that holds the lock, or None while somebody else does."""
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def open_report(self) -> int:
        """Return a descriptor of the file that takes what a supervisor says before it dies."""
        return os.open(
            "supervisor.err",
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=self.directory,
        )

    def last_words(self) -> str:
        """Return the last line that a supervisor said, empty if it was silent."""
        with contextlib.suppress(FileRefused):
            lines = (
                (read_bounded(self.directory, "supervisor.err") or b"").decode("utf-8", "replace").strip().splitlines()
            )
            return lines[-1] if lines else ""
        return ""

    def _read(self, name: str, kind: type[_T]) -> _T | None:
        return read_record(self.directory, name, kind, shown=f"steps/{self.job}/{name}")


UNPACKING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Memory for unpacking one script, bytes: seven times what LZMA takes at its default preset."""


def unpacked(script: str) -> str:
    """Return the script that this is the packed form of; the text itself if it is none, or would be too long."""
    import base64
    import lzma

    from replica.grammar import split_packed  # few scripts need it

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


def create_record(steps: int, wanted: ScriptOrder, account: Account, cgroup: CgroupName | None = None) -> ScriptRecord:
    """Make the record of a script that is to be run, in a cgroup if one is given: whole or not at all.

    FileExistsError or OSError if it cannot be made.
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
            unpacked(wanted.order.script).encode(),
            mode=0o500,
            owner=(account.uid, account.gid) if account.switch else None,
        )
        # The script may fill the disk, and how it ended has to be written nevertheless.
        for later in _WRITTEN_LATER:
            reserve(directory, later + RESERVE_SUFFIX)
        for empty in ("lock", "supervisor.err"):
            os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory))
        # The user passes through to his script; everything else in here stays the agent's.
        os.fchmod(directory, 0o711 if account.switch else 0o700)
        os.fsync(directory)
    if name in names_in(steps):
        raise FileExistsError(17, os.strerror(17), f"steps/{name}")
    os.rename(prepared, name, src_dir_fd=steps, dst_dir_fd=steps)
    os.fsync(steps)
    return ScriptRecord(steps, job)


def remove_record(steps: int, job: int, *, lasting: bool = True) -> None:
    """Remove the record of a job, if there is one; so that it does not come back, if the removal is `lasting`."""
    remove_tree(steps, str(job), shown=f"steps/{job}", lasting=False)
    if lasting:
        os.fsync(steps)


def recorded_jobs(steps: int) -> list[int]:
    """Return the jobs of which there is a record."""
    return sorted(int(name) for name in names_in(steps) if name.isdecimal())
