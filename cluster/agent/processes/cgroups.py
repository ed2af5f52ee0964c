"""Control groups (cgroup v2): all that a script or an operation has started, however it forks, held and ended as one.

A process cannot leave its cgroup without the right to write to another one, which a job's user does not have, and the
kernel kills all of a cgroup at once. So nothing depends on how fast processes can be listed. Source: the kernel's
Documentation/admin-guide/cgroup-v2.rst; which subtree is whose: systemd's CGROUP_DELEGATION.

The agent has a subtree of its own, `forebay-<storage id>`, with `job-JOB-ATTEMPT` for each script and
`operation-JOB-ATTEMPT` for each worker. No name in it is chosen by a user."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from cluster.agent.files import STEPS, read_record, type_of
from cluster.agent.limits import CGROUP_BYTES_MAX, FREEZE_WAIT_S, KILL_PAUSE_S, KILL_ROUNDS_MAX
from cluster.system import SYSTEMD, SystemClock, boot_id, cgroup_of, closing, open_directory, send, write_all

AUTO: Final = "auto"
OWN: Final = "own"
NONE: Final = "none"
"""What `cgroup` of an agent's table may say beside a directory: where the agent's own cgroup is delegated to it, there
or not at all, nowhere."""

_CGROUP2: Final = 0x63677270
"""What statfs(2) says of a cgroup v2 file system."""

_DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""Extended attributes with which systemd marks a cgroup that it leaves to its unit."""


class CgroupRefused(Exception):
    """There can be no cgroup; the message says why, and what would have to be done."""


class CgroupName(msgspec.Struct, frozen=True, kw_only=True):
    """A cgroup for ever: its path, which one of that path it is, and in which boot."""

    path: str
    inode: int
    boot: str


CGROUP_FILE: Final = "cgroup.json"
"""File of a script's record, beneath steps/JOB, that names the cgroup of the script."""


def cgroup_of_script(home: str, job: int) -> CgroupName | None:
    """Return the cgroup of a job's script by its record in the agent's directory, if there is any; FileRefused."""
    try:
        directory = open_directory(os.path.join(home, STEPS, str(job)))
    except FileNotFoundError:
        return None
    with closing(directory):
        return read_record(directory, CGROUP_FILE, CgroupName, shown=f"{STEPS}/{job}/{CGROUP_FILE}")


class Cgroup:
    """Cgroup of one script or operation, open."""

    def __init__(self, path: str, directory: int) -> None:
        """Take over the open directory."""
        self.path = path
        self.directory = directory
        """Open."""

    @classmethod
    def find(cls, name: CgroupName | None) -> Cgroup | None:
        """Return the cgroup of that name, None if there is none any more: another one at its path is not it."""
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
        """What finds it again."""
        return CgroupName(path=self.path, inode=os.fstat(self.directory).st_ino, boot=boot_id())

    def close(self) -> None:
        """Let go of it; it stays."""
        os.close(self.directory)

    def open_entrance(self) -> int:
        """Return a descriptor through which a child joins (`join`), if it is passed on to it. OSError."""
        return os.open("cgroup.procs", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)

    def pids(self) -> list[int]:
        """Return the ids of the processes in it and below it; those of another PID namespace are left out."""
        found: list[int] = []
        for directory in self._each():
            with contextlib.suppress(OSError):
                found.extend(int(line) for line in _read_at(directory, "cgroup.procs").split() if line != "0")
        return found

    @property
    def is_empty(self) -> bool:
        """Whether no process lives in it or below it; also when it is gone."""
        return self._event("populated") != "1"

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Have everything in it stand still meanwhile; nothing happens where the kernel cannot (before 5.2)."""
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
        """Signal each process; SIGKILL reaches also those that are being forked."""
        if number is not signal.SIGKILL:
            for pid in self.pids():
                send(pid, number)
            return
        try:
            self._write("cgroup.kill", "1")
        except FileNotFoundError:
            # A kernel before 5.14. What stands still cannot fork, and dies of SIGKILL nevertheless.
            with self.frozen():
                for pid in self.pids():
                    send(pid, number)

    def kill(self, wait_s: float) -> list[int]:
        """Kill all of it; return the ids of what is still there after so many seconds (it hangs in the kernel)."""
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
        """Remove it with what is below it; False if a process is left in it, or if it may not be removed."""
        try:
            _remove_below(self.directory)
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _each(self) -> Iterator[int]:
        """Give descriptors of it and of all below it: only who has the agent's own account can make any there."""
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
        """Wait until cgroup.events says so of a key, or the cgroup is gone; False if it does not within `wait_s`."""
        clock = SystemClock()
        until_s = clock.monotonic_s() + wait_s
        try:
            events = os.open("cgroup.events", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)
        except OSError:
            return True
        with closing(events):
            poller = select.poll()
            # The kernel reports a change since the file was last read as an exceptional condition.
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
    """Have this process live in the cgroup that the descriptor is an entrance of, which is closed. OSError."""
    with closing(entrance):
        write_all(entrance, b"0")


def enter(directory: int) -> None:
    """Have this process live in the cgroup of an open directory, which is closed. OSError."""
    with closing(directory):
        join(os.open("cgroup.procs", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory))


class CgroupTree:
    """Subtree of cgroups that is an agent's own."""

    def __init__(self, path: str) -> None:
        """Name it; `open_tree` finds out whether there can be one."""
        self.path = path

    @property
    def name(self) -> CgroupName:
        """What finds it again. OSError."""
        return CgroupName(path=self.path, inode=os.stat(self.path).st_ino, boot=boot_id())

    @property
    def is_ended_at_once(self) -> bool:
        """Whether the kernel kills all of a cgroup in one call (5.14), instead of one by one while it is frozen."""
        return os.path.exists(os.path.join(self.path, "cgroup.kill"))

    def script(self, job: int, attempt: int) -> Cgroup:
        """Return a new and empty cgroup for a job's script. OSError."""
        return self._make(f"job-{job}-{attempt}")

    def operation(self, job: int, attempt: int, number: int) -> Cgroup:
        """Return a new and empty cgroup for a worker; `number` differs for all workers of this agent. OSError."""
        return self._make(f"operation-{job}-{attempt}-{number}")

    def end_scripts(self, job: int) -> list[int]:
        """End whatever lives of a job's scripts; return the ids of what cannot be killed. OSError."""
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
        """End what an earlier agent left below it but for these jobs' scripts: a worker does not outlive its agent."""
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
        """Remove it if nothing is in it."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _make(self, name: str) -> Cgroup:
        try:
            os.mkdir(os.path.join(self.path, name), 0o755)
        except FileNotFoundError:
            # Who delegated it tidied up while nothing was in it.
            os.mkdir(self.path, 0o755)
            os.mkdir(os.path.join(self.path, name), 0o755)
        except FileExistsError:
            # Made by an agent that died before it could write that down.
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
    """Return the subtree of the agent with this storage, made if need be; CgroupRefused says why there can be none.

    `where` is `auto` or `own` for below the agent's own cgroup, `none`, or the directory of a cgroup that it may use.
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
                raise CgroupRefused(f"{parent} is no cgroup (v2); write the path of one below /sys/fs/cgroup")
            if where in (AUTO, OWN) and not _is_ours(parent, directory):
                raise CgroupRefused(
                    f"its own cgroup {parent} is systemd's; write Delegate=yes into the agent's unit, "
                    "or start it by systemd-run --scope -p Delegate=yes"
                )
        path = os.path.join(parent, f"forebay-{storage_id}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
    except OSError as error:
        raise CgroupRefused(
            f"no cgroup can be made below {parent}: {error.strerror}; delegate one to the agent's account"
        ) from error
    tree = CgroupTree(path)
    try:
        _try(tree)
    except OSError as error:
        tree.remove()
        raise CgroupRefused(f"no process can be put below {parent}: {error.strerror}") from error
    return tree


def _is_ours(path: str, directory: int) -> bool:
    """Whether the agent's own cgroup is left to it: where systemd rules, it has to say so."""
    if not os.path.isdir(SYSTEMD) or not os.path.exists(os.path.join(path, "cgroup.type")):
        return True
    for attribute in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, attribute) == b"1":
                return True
    # An ordinary user's: what he owns there was given to him.
    return os.geteuid() != 0 and os.fstat(directory).st_uid == os.geteuid()


def _try(tree: CgroupTree) -> None:
    """Put a process into a cgroup of the tree; OSError if that cannot be done."""
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
    """Return a whole file of a cgroup: the kernel gives at most a page of it at once."""
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
