"""Control groups (cgroup v2) that hold and end all processes of a script or an operation, however they fork.

A process can leave its cgroup only with write permission to another one, which a job's user lacks, and the kernel kills
a whole cgroup at once. Completeness therefore does not depend on how fast processes are listed. Sources: the kernel's
Documentation/admin-guide/cgroup-v2.rst; for delegation, systemd's CGROUP_DELEGATION.

The agent has a subtree `forebay-<storage id>` with `job-JOB-ATTEMPT` for each script and `operation-JOB-ATTEMPT` for
each worker. Users choose no name in it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from forebay.cluster.agent.adapters import type_of
from forebay.cluster.agent.files import STEPS, read_record
from forebay.cluster.agent.limits import CGROUP_BYTES_MAX, FREEZE_WAIT_S, KILL_PAUSE_S, KILL_ROUNDS_MAX
from forebay.cluster.system import SYSTEMD, SystemClock, boot_id, cgroup_of, closing, open_directory, send, write_all

AUTO: Final = "auto"
OWN: Final = "own"
NONE: Final = "none"
"""Values of an agent's `cgroup` setting besides a directory: use the agent's own cgroup if it is delegated, require
that, or use none.
"""

_CGROUP2: Final = 0x63677270
"""Filesystem type of cgroup v2 in statfs(2)."""

_DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""Extended attributes with which systemd marks a cgroup delegated to its unit."""


class CgroupRefused(Exception):
    """No cgroup can be used; the message gives the reason and the remedy."""


class CgroupName(msgspec.Struct, frozen=True, kw_only=True):
    """Unambiguous name of a cgroup: path, inode and boot ID."""

    path: str
    inode: int
    boot: str


CGROUP_FILE: Final = "cgroup.json"
"""File in a script's record, beneath steps/JOB, that names its cgroup."""


def cgroup_of_script(home: str, job: int) -> CgroupName | None:
    """Return the cgroup recorded for a job's script, or None.

    Raises:
        FileRefused: The record is damaged.
    """
    try:
        directory = open_directory(os.path.join(home, STEPS, str(job)))
    except FileNotFoundError:
        return None
    with closing(directory):
        return read_record(directory, CGROUP_FILE, CgroupName, shown=f"{STEPS}/{job}/{CGROUP_FILE}")


class Cgroup:
    """Open cgroup of one script or operation."""

    def __init__(self, path: str, directory: int) -> None:
        """Take ownership of the open directory."""
        self.path = path
        self.directory = directory
        """Open descriptor of the cgroup's directory."""

    @classmethod
    def find(cls, name: CgroupName | None) -> Cgroup | None:
        """Return the named cgroup, or None if it no longer exists; a new cgroup at the same path does not count."""
        if name is None or name.boot != boot_id():
            return None
        try:
            directory = open_directory(name.path)
        except OSError:
            return None
        if os.fstat(directory).st_ino == name.inode and type_of(directory) == _CGROUP2:
            return cls(name.path, directory)
        os.close(directory)
        return None

    @property
    def name(self) -> CgroupName:
        """Name that finds this cgroup again."""
        return CgroupName(path=self.path, inode=os.fstat(self.directory).st_ino, boot=boot_id())

    def close(self) -> None:
        """Close the directory; the cgroup remains."""
        os.close(self.directory)

    def open_entrance(self) -> int:
        """Return a descriptor that a child can inherit to join the cgroup (`join`).

        Raises:
            OSError: The cgroup cannot be joined.
        """
        return os.open("cgroup.procs", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)

    def pids(self) -> list[int]:
        """Return the IDs of the processes in the cgroup and below, except those of other PID namespaces."""
        found: list[int] = []
        for directory in self._each():
            with contextlib.suppress(OSError):
                found.extend(int(line) for line in _read_at(directory, "cgroup.procs").split() if line != "0")
        return found

    @property
    def is_empty(self) -> bool:
        """True if no process lives in the cgroup or below, or the cgroup does not exist."""
        return self._event("populated") != "1"

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the cgroup while in the context; without effect before Linux 5.2."""
        try:
            self._write("cgroup.freeze", "1")
        except FileNotFoundError:
            yield
            return
        try:
            self._wait("frozen", "1", FREEZE_WAIT_S)
            yield
        finally:
            self._write("cgroup.freeze", "0")

    def signal(self, number: signal.Signals) -> None:
        """Signal each process; SIGKILL also reaches processes that are being forked."""
        if number is not signal.SIGKILL:
            for pid in self.pids():
                send(pid, number)
            return
        try:
            self._write("cgroup.kill", "1")
        except FileNotFoundError:
            # Before Linux 5.14: frozen processes cannot fork, but SIGKILL still ends them.
            with self.frozen():
                for pid in self.pids():
                    send(pid, number)

    def kill(self, wait_s: float) -> list[int]:
        """Kill all processes; return the IDs of those left after `wait_s` seconds, which hang in the kernel."""
        clock = SystemClock()
        until_s = clock.monotonic_s() + wait_s
        while True:
            with contextlib.suppress(OSError):
                self.signal(signal.SIGKILL)
            if self._wait("populated", "0", max(0.0, min(KILL_PAUSE_S, until_s - clock.monotonic_s()))):
                return []
            if clock.monotonic_s() >= until_s:
                return self.pids()

    def remove(self) -> bool:
        """Remove the cgroup and those below it; return False if processes remain or permission is denied."""
        try:
            _remove_below(self.directory)
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _each(self) -> Iterator[int]:
        """Yield descriptors of the cgroup and all below it, which only the agent's account can create."""
        for _, _, _, directory in os.fwalk(".", dir_fd=self.directory, follow_symlinks=False):
            yield directory

    def _event(self, key: str) -> str:
        with contextlib.suppress(OSError):
            for line in _read_at(self.directory, "cgroup.events").splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return value
        return ""

    def _wait(self, key: str, value: str, wait_s: float) -> bool:
        """Wait until a key in cgroup.events has this value or the cgroup is deleted; return False after `wait_s`
        seconds.
        """
        clock = SystemClock()
        until_s = clock.monotonic_s() + wait_s
        try:
            events = os.open("cgroup.events", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)
        except OSError:
            return True
        with closing(events):
            poller = select.poll()
            # The kernel signals a change since the last read as an exceptional condition.
            poller.register(events, select.POLLPRI)
            while True:
                try:
                    said = os.pread(events, CGROUP_BYTES_MAX, 0).decode("ascii", "replace").split()
                except OSError:
                    return True
                if (key, value) in zip(said[::2], said[1::2], strict=False):
                    return True
                left_s = until_s - clock.monotonic_s()
                if left_s <= 0:
                    return False
                poller.poll(1000 * left_s)

    def _write(self, file: str, text: str) -> None:
        with closing(os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)) as descriptor:
            write_all(descriptor, text.encode())


def join(entrance: int) -> None:
    """Move this process into the cgroup of an `open_entrance` descriptor, and close it.

    Raises:
        OSError: The cgroup cannot be joined.
    """
    with closing(entrance):
        write_all(entrance, b"0")


def enter(directory: int) -> None:
    """Move this process into the cgroup of an open directory, and close it.

    Raises:
        OSError: The cgroup cannot be joined.
    """
    with closing(directory):
        join(os.open("cgroup.procs", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory))


class CgroupTree:
    """Cgroup subtree of one agent."""

    def __init__(self, path: str) -> None:
        """Use the given path; `open_tree` checks that it works."""
        self.path = path

    @property
    def name(self) -> CgroupName:
        """Name that finds this cgroup again.

        Raises:
            OSError: The cgroup does not exist.
        """
        return CgroupName(path=self.path, inode=os.stat(self.path).st_ino, boot=boot_id())

    @property
    def is_ended_at_once(self) -> bool:
        """True if the kernel kills a whole cgroup in one call (5.14), instead of one process at a time while frozen."""
        return os.path.exists(os.path.join(self.path, "cgroup.kill"))

    def script(self, job: int, attempt: int) -> Cgroup:
        """Create an empty cgroup for a job's script.

        Raises:
            OSError: The cgroup cannot be created.
        """
        return self._make(f"job-{job}-{attempt}")

    def operation(self, job: int, attempt: int, number: int) -> Cgroup:
        """Create an empty cgroup for a worker; `number` is unique among this agent's workers.

        Raises:
            OSError: The cgroup cannot be created.
        """
        return self._make(f"operation-{job}-{attempt}-{number}")

    def end_scripts(self, job: int) -> list[int]:
        """Kill all processes of a job's scripts; return the IDs of those that cannot be killed.

        Raises:
            OSError: The cgroups cannot be read.
        """
        try:
            names = [name for name in os.listdir(self.path) if name.startswith(f"job-{job}-")]
        except FileNotFoundError:
            return []
        left: list[int] = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                cgroup = self._open(name)
                try:
                    left += cgroup.kill(KILL_PAUSE_S * KILL_ROUNDS_MAX)
                    cgroup.remove()
                finally:
                    cgroup.close()
        return sorted(left)

    def sweep(self, scripts: Iterable[int]) -> None:
        """Kill processes of an earlier agent, except for these jobs' scripts: a worker does not outlive its agent."""
        kept = {str(job) for job in scripts}
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self.path)):
                kind, _, rest = name.partition("-")
                if kind not in ("job", "operation") or (kind == "job" and rest.partition("-")[0] in kept):
                    continue
                with contextlib.suppress(OSError):
                    cgroup = self._open(name)
                    try:
                        cgroup.kill(KILL_PAUSE_S)
                        cgroup.remove()
                    finally:
                        cgroup.close()

    def remove(self) -> None:
        """Remove the subtree if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _make(self, name: str) -> Cgroup:
        try:
            os.mkdir(os.path.join(self.path, name), 0o755)
        except FileNotFoundError:
            # The owner of the parent cgroup removed the subtree while it was empty.
            os.mkdir(self.path, 0o755)
            os.mkdir(os.path.join(self.path, name), 0o755)
        except FileExistsError:
            # An agent died between creating the cgroup and recording it.
            cgroup = self._open(name)
            if left := cgroup.kill(KILL_PAUSE_S * 10):
                cgroup.close()
                raise OSError(16, f"processes {', '.join(map(str, left[:20]))} in it cannot be killed", name) from None
            return cgroup
        return self._open(name)

    def _open(self, name: str) -> Cgroup:
        path = os.path.join(self.path, name)
        return Cgroup(path, open_directory(path))


def open_tree(where: str, storage_id: str) -> CgroupTree:
    """Create or open the subtree of the agent with this storage.

    `where` is `auto` or `own` for the agent's own cgroup, `none`, or the directory of a cgroup the agent may use.

    Raises:
        CgroupRefused: There can be no subtree; the message gives the reason.
    """
    if where == NONE:
        raise CgroupRefused('cgroup = "none" is configured')
    try:
        parent = cgroup_of(os.getpid()) if where in (AUTO, OWN) else where
    except LookupError as error:
        raise CgroupRefused(str(error)) from error
    try:
        with closing(open_directory(parent)) as directory:
            if type_of(directory) != _CGROUP2:
                raise CgroupRefused(f"{parent} is not a cgroup (v2); configure one below /sys/fs/cgroup")
            if where in (AUTO, OWN) and not _is_ours(parent, directory):
                raise CgroupRefused(
                    f"its own cgroup {parent} belongs to systemd; set Delegate=yes in the agent's unit, "
                    "or start it by systemd-run --scope -p Delegate=yes"
                )
        path = os.path.join(parent, f"forebay-{storage_id}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
    except OSError as error:
        raise CgroupRefused(
            f"no cgroup can be created below {parent}: {error.strerror}; delegate one to the agent's account"
        ) from error
    tree = CgroupTree(path)
    try:
        _try(tree)
    except OSError as error:
        tree.remove()
        raise CgroupRefused(f"no process can be moved below {parent}: {error.strerror}") from error
    return tree


def _is_ours(path: str, directory: int) -> bool:
    """Return whether the agent's own cgroup is delegated to it, which systemd must confirm if it is running."""
    if not os.path.isdir(SYSTEMD) or not os.path.exists(os.path.join(path, "cgroup.type")):
        return True
    for attribute in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, attribute) == b"1":
                return True
    # For an ordinary user, owning the cgroup means delegation.
    return os.geteuid() != 0 and os.fstat(directory).st_uid == os.geteuid()


def _try(tree: CgroupTree) -> None:
    """Check that a process can be moved into the tree.

    Raises:
        OSError: The process cannot be moved.
    """
    cgroup = tree._make(f"operation-try-{os.getpid()}")
    try:
        with closing(cgroup.open_entrance()) as entrance:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    write_all(entrance, b"0")
                    code = 0
                except OSError as error:
                    code = error.errno or 1
                finally:
                    os._exit(code)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            raise OSError(code, os.strerror(code))
    finally:
        cgroup.remove()
        cgroup.close()


def _read_at(directory: int, name: str) -> str:
    """Return a whole cgroup file; the kernel returns at most a page per read."""
    with closing(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)) as descriptor:
        parts = []
        size = 0
        while size < CGROUP_BYTES_MAX and (part := os.read(descriptor, CGROUP_BYTES_MAX - size)):
            parts.append(part)
            size += len(part)
        return b"".join(parts).decode("ascii", "replace")


def _remove_below(directory: int) -> None:
    for entry in list(os.scandir(directory)):
        if entry.is_dir(follow_symlinks=False):
            with closing(open_directory(entry.name, dir_fd=directory)) as below:
                _remove_below(below)
            os.rmdir(entry.name, dir_fd=directory)
