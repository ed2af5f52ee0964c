"""Transfer backends besides Forebay itself: rsync, rclone and a site's own program, all used in the same way.

Theory of operation
===================

A program copies files into a *scratch directory* inside the attempt's staging directory, so that it is fenced, swept
and on the destination's filesystem like every temporary file. The program's own report is not trusted. Its output is
compared with the manifest and the source (sizes, and digests of both sides at levels with digests), gets its metadata,
is made durable and is renamed like a file copied natively. Receipts, checkpoints and the state of destinations after an
interruption (absent, old or complete) therefore do not depend on the backend.

Programs
========

rsync and rclone copy between two local directories: no remote is configured and no configuration file is read.

A site's own program (`template`) is a command line with {source} and {destination} for paths; no shell is involved. For
a directory, both paths end in `/`, and the content of the source goes into the destination, which exists (empty, or
with the output of an interrupted attempt). For a single file, both are file paths. Examples are `rsync -a {source}
{destination}` and `cp -aT {source} {destination}`; {kind} is `file` or `directory`.

The kernel counts the program's progress (`IoWatch`): bytes read and written by its processes. A program that hangs
therefore shows no progress, like a native transfer, and a program ahead of its rate is stopped for a while.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple

from forebay.cluster.agent.limits import KILL_PAUSE_S, KILL_ROUNDS_MAX
from forebay.cluster.agent.processes import BASE_LANG, BASE_PATH, OPERATION_VARIABLE
from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.agent.transfer.rate_limit import Pace
from forebay.cluster.agent.transfer.transfer_state import MovedAmounts, TransferState
from forebay.cluster.providers import Local, ProgramRefused, check_command, guard
from forebay.cluster.system import become_subreaper, closing, descendants, send, write_all
from forebay.replica.model import template_fault, template_words


class CopyJob(NamedTuple):
    """Files for a program to copy in one run."""

    source: int
    """Open source directory."""
    scratch: int
    """Open directory to copy to; files keep their relative paths."""
    names: Sequence[bytes]
    """Regular files below `source`."""
    whole: bool
    """True if `names` is the complete content of `source`."""


class ProgramCall(NamedTuple):
    """Command line and standard input of a program."""

    argv: tuple[bytes, ...]
    """Arguments, without a shell; the first is searched for in the standard directories."""
    stdin: bytes = b""
    """Content of its standard input."""
    program: str = ""
    """Checked path of the program; empty to search for the first argument in the standard directories."""


class Backend:
    """External transfer program."""

    name: ClassVar[str]
    """Name in configuration and receipts."""
    at_once: ClassVar[bool] = False
    """True if it copies a whole item, such as a directory with its content, instead of named files."""

    def fault(self, name: bytes) -> str | None:
        """Return why the program cannot take a file name, worded to follow `its name `; None if it can."""
        return None

    def call(self, job: CopyJob) -> ProgramCall:
        """Return the command to run in `job.source`.

        Raises:
            TransferFailed: The program may not be run.
        """
        raise NotImplementedError


class Rsync(Backend):
    """Backend rsync; names are passed zero-terminated, so any name is possible."""

    name = "rsync"

    def __init__(self, *, sparse: bool = True) -> None:
        """Preserve holes if `sparse`."""
        self._sparse = sparse

    def call(self, job: CopyJob) -> ProgramCall:
        """Return the rsync command."""
        options = [
            b"--from0",
            b"--files-from=-",
            b"--no-implied-dirs",
            # Copy only regular files: no links, devices or pipes.
            b"--no-links",
            b"--no-devices",
            b"--no-specials",
            # Forebay sets the permissions; until then the files belong to their owner alone.
            b"--chmod=D700,F600",
            b"--times",
            b"--whole-file",
            b"--inplace",
            b"--no-motd",
        ]
        if self._sparse:
            options.append(b"--sparse")
        # The prefix protects names that begin with - # or ;.
        stdin = b"".join(b"./" + name + b"\0" for name in job.names)
        return ProgramCall((b"rsync", *options, b"./", b"/proc/self/fd/%d/" % job.scratch), stdin)


class Rclone(Backend):
    """Backend rclone; names are passed one per line."""

    name = "rclone"

    def fault(self, name: bytes) -> str | None:
        """Return why rclone cannot take a file name: it reads names as lines of UTF-8."""
        if b"\n" in name or b"\r" in name:
            return "contains a line break"
        try:
            name.decode("utf-8")
        except UnicodeDecodeError:
            return "is not UTF-8"
        return None

    def call(self, job: CopyJob) -> ProgramCall:
        """Return the rclone command."""
        return ProgramCall(
            (
                b"rclone",
                b"copy",
                b".",
                b"/proc/self/fd/%d" % job.scratch,
                b"--files-from-raw=-",
                b"--no-traverse",
                b"--config=",
                b"--retries=1",
                b"--low-level-retries=1",
                b"--log-level=ERROR",
                b"--stats=0",
                b"--local-no-check-updated",
            ),
            b"".join(name + b"\n" for name in job.names),
        )


class Template(Backend):
    """Backend for the site's configured command."""

    name = "template"
    at_once = True

    def __init__(self, template: str, local: Local) -> None:
        """Parse the command line.

        Raises:
            TransferFailed: The command line is invalid.
        """
        fault = template_fault(template)
        if fault is not None:
            raise TransferFailed(
                f"the site's program for transfers cannot be run: its command line {fault}; set TransferTemplate"
            )
        self._local = local
        self._words = [os.fsencode(word) for word in template_words(template)]

    def call(self, job: CopyJob) -> ProgramCall:
        """Return the command for one item.

        Raises:
            TransferFailed: The program is not permitted on this machine.
        """
        try:
            program = check_command(os.fsdecode(self._words[0]), self._local)
        except ProgramRefused as error:
            raise TransferFailed(str(error)) from error
        name = b"" if job.whole else job.names[0]
        paths = {
            b"{source}": _path_of(job.source) + b"/" + name,
            b"{destination}": _path_of(job.scratch) + b"/" + name,
            b"{kind}": b"directory" if job.whole else b"file",
        }
        words = []
        for word in self._words:
            for place, text in paths.items():
                if place in word:
                    word = word.replace(place, text)
                    break
            words.append(word)
        return ProgramCall(tuple(words), program=program)


def _path_of(descriptor: int) -> bytes:
    return os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}")).rstrip(b"/")


_EXECUTABLE: Final = os.X_OK


def run_program(transfer: TransferState, backend: str, call: ProgramCall, job: CopyJob) -> None:
    """Run a program to its end.

    Raises:
        ProgramFailed: The program failed; the message has the last line of its output.
        TransferFailed: The program is not installed.
        OSError: No process can be started.
    """
    program = call.program or shutil.which(os.fsdecode(call.argv[0]), _EXECUTABLE, BASE_PATH)
    if program is None:
        raise TransferFailed(
            f"{os.fsdecode(call.argv[0])} is not installed on this node, or is not executable; "
            "install it or use another backend"
        )
    become_subreaper()
    with closing(os.memfd_create("forebay-names", os.MFD_CLOEXEC)) as stdin:
        write_all(stdin, call.stdin)
        os.lseek(stdin, 0, os.SEEK_SET)
        ran = guard.run(
            lambda returned: _become(program, call, job, stdin, returned),
            timeout_s=NO_LIMIT_S,
            clock=transfer.context.clock,
            keep=(job.source, job.scratch, stdin),
            poll=IoWatch(lambda: transfer.advance(MovedAmounts(steps=1)), transfer.context.pace).poll,
            poll_s=POLL_S,
        )
    end_program(backend, ran)


def end_program(shown: str, ran: guard.CallResult) -> None:
    """Kill the program's remaining processes and check its exit code.

    Raises:
        ProgramFailed: The program failed, or a process cannot be killed.
    """
    left = end_descendants()
    if ran.code:
        raise ProgramFailed(f"{shown} {guard.describe_exit(ran.code)}{last_output_line(ran)}")
    if left:
        raise ProgramFailed(f"{shown} left processes that cannot be killed: {', '.join(map(str, left[:20]))}")


def _become(program: str, call: ProgramCall, job: CopyJob, stdin: int, returned: int) -> None:
    """Become the program, in the child process."""
    os.close(returned)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.fchdir(job.source)
    # The command line refers to this descriptor number.
    os.set_inheritable(job.scratch, True)
    os.umask(0o077)
    environment = {"PATH": BASE_PATH, "LANG": BASE_LANG, "HOME": "/"}
    if OPERATION_VARIABLE in os.environ:
        environment[OPERATION_VARIABLE] = os.environ[OPERATION_VARIABLE]
    os.execve(program, [os.fsencode(word) for word in call.argv], environment)


NO_LIMIT_S: Final = 10.0 * 366 * 86_400
"""Substitute for a time limit, seconds: the agent ends the worker, and so the command, when it is late."""

MESSAGE_CHARACTERS: Final = 400
"""Characters of a program's last output line in an error message."""


class ProgramFailed(TransferFailed):
    """A program ended with a nonzero exit code; a retry may help."""


def last_output_line(ran: guard.CallResult) -> str:
    """Return the last line of a program's standard error, or else standard output, worded to follow how it ended."""
    for output in (ran.complained, ran.printed):
        lines = output.decode("utf-8", "backslashreplace").strip().splitlines()
        if lines:
            line = "".join(character if character.isprintable() else "�" for character in lines[-1].strip())
            return f": {line[-MESSAGE_CHARACTERS:]}"
    return " without output"


def end_descendants() -> list[int]:
    """Kill all descendants of this process, which is their subreaper; return the IDs of those that cannot be killed."""
    left: list[int] = []
    for _ in range(KILL_ROUNDS_MAX):
        left = descendants(os.getpid())
        for pid in left:
            send(pid, signal.SIGKILL)
        guard.reap()
        if not left:
            return []
        guard.pause(KILL_PAUSE_S)
    return left


POLL_S: Final = 0.1
"""Seconds between two progress checks of a program: a program ahead of its rate is stopped this soon, and checking
costs a hundredth of a processor.
"""

_IO_BYTES_MAX: Final = 4096
"""Bytes read from /proc/PID/io: seven lines."""

_STEP_BYTES: Final = 1 << 40
"""Larger than any rate allows at a time: a smaller result means that there is a rate."""


class _Io(NamedTuple):
    """I/O of a process and its reaped children, bytes."""

    read: int
    written: int
    """Bytes written to files and pipes."""
    dirtied: int
    """Bytes of pages that go to a disk."""


class IoWatch:
    """Progress watch and rate limit for a program; guard.run calls `poll` regularly."""

    def __init__(self, alive: Callable[[], None], pace: Pace) -> None:
        """Call `alive` whenever a check finds progress."""
        self._alive = alive
        self._pace = pace
        self._seen: dict[int, int] = {}
        # A process's count includes the children it has reaped, so the sum over all living processes, including this
        # one, loses
        # nothing and only grows.
        own = _io_of(os.getpid())
        self._written, self._handed = (0, 0) if own is None else (own.dirtied, own.written)

    def poll(self, _child: int) -> None:
        """Check the I/O of all descendants since the last call. Raises the exceptions of the pace."""
        self._pace.check()
        pids = descendants(os.getpid())
        counts = {pid: count for pid in (os.getpid(), *pids) if (count := _io_of(pid)) is not None}
        seen = {pid: count.read + count.written for pid, count in counts.items() if pid != os.getpid()}
        if any(moved > self._seen.get(pid, 0) for pid, moved in seen.items()):
            self._alive()
        self._seen = seen
        written = max(self._written, sum(count.dirtied for count in counts.values()))
        handed = max(self._handed, sum(count.written for count in counts.values()))
        # The kernel does not count filesystems without a local disk, so writes including pipes count instead: the
        # program is then
        # rather too slow than too fast.
        ahead = written - self._written or handed - self._handed
        self._written, self._handed = written, handed
        if ahead and self._pace.step_bytes(_STEP_BYTES) < _STEP_BYTES:
            self._hold(pids, ahead)

    def _hold(self, pids: list[int], written: int) -> None:
        for pid in pids:
            send(pid, signal.SIGSTOP)
        try:
            # Take the bytes as a debt, then wait for it with the next byte.
            self._pace.take(written)
            self._pace.take(1)
        finally:
            for pid in pids:
                send(pid, signal.SIGCONT)


def _io_of(pid: int) -> _Io | None:
    """Return the I/O of a process, or None if it has ended."""
    found: dict[bytes, int] = {}
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            for line in file.read(_IO_BYTES_MAX).splitlines():
                name, _, number = line.partition(b":")
                found[name] = int(number)
        return _Io(found[b"rchar"], found[b"wchar"], found[b"write_bytes"])
    except (OSError, ValueError, KeyError):
        return None
