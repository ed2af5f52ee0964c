"""What may move data beside Forebay itself: rsync, rclone, a site's own program. One way for all of them.

Theory of operation
===================

A program is told what to copy and writes it into a *scratch directory*, which is ours: in the staging directory of the
attempt, so that it is fenced, swept and on the destination's file system like every temporary file. Nothing that a
program says is believed. What lies in the scratch directory is compared with the manifest and with the source (sizes,
and the digests of both sides at the levels that have digests), gets its metadata, is made durable, and takes its name
by the same rename as a file that Forebay copied itself. So the receipts, the checkpoints and what an interrupted
transfer leaves at the destination (absent, old or complete) do not depend on who moved the data.

Programs
========

rsync and rclone work between two directories of this machine: no remote is configured and no configuration is read.

A site's own program (`template`) is a command line in which {source} and {destination} stand for paths. No shell reads
it. For a directory both paths end in `/`, and everything beneath the one goes into the other, which is there (and
empty, or has what an interrupted try left). For a single file both are paths of files. `rsync -a {source}
{destination}` and `cp -aT {source} {destination}` are such command lines; {kind} is `file` or `directory` for programs
that need to know.

How far a program is, the kernel counts (`IoWatch`): what its processes have read and written. That makes its work
visible (one that is stuck stands still, as a transfer of ours does) and holds it to a rate: its processes are stopped
while it is ahead."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple

from cluster.agent.limits import KILL_PAUSE_S, KILL_ROUNDS_MAX
from cluster.agent.processes import BASE_LANG, BASE_PATH, OPERATION_VARIABLE
from cluster.agent.transfer.errors import TransferFailed
from cluster.agent.transfer.rate_limit import Pace
from cluster.agent.transfer.transfer_state import Moved, TransferState
from cluster.providers import Local, ProgramRefused, check_command, guard
from cluster.system import become_subreaper, closing, descendants, send, write_all
from replica.model import template_fault, template_words


class Job(NamedTuple):
    """What a program is to copy at once."""

    source: int
    """An open directory."""
    scratch: int
    """The open directory that it copies to; files keep their names and the directories that they are in."""
    names: Sequence[bytes]
    """Regular files beneath `source`."""
    whole: bool
    """Whether `names` is everything beneath `source`."""


class Call(NamedTuple):
    """Call of a program: its arguments and its standard input."""

    argv: tuple[bytes, ...]
    """Without a shell; the first word is looked up in the standard places."""
    stdin: bytes = b""
    """What it reads on its standard input."""
    program: str = ""
    """Where it is, where that was said and checked; empty: the first argument, in the standard places."""


class Backend:
    """Such a program."""

    name: ClassVar[str]
    """As it is configured, and as receipts name it."""
    at_once: ClassVar[bool] = False
    """Whether it copies a whole item at once: a directory with all that is in it, instead of files that are named."""

    def fault(self, name: bytes) -> str | None:
        """Return why it cannot be told of a file, in words that follow `its name `; None if it can."""
        return None

    def call(self, job: Job) -> Call:
        """Return what is to be run; its working directory is `job.source`. TransferFailed if it cannot be."""
        raise NotImplementedError


class Rsync(Backend):
    """Tells rsync every name, ended by a zero byte, so that any name goes."""

    name = "rsync"

    def __init__(self, *, sparse: bool = True) -> None:
        """`sparse`: holes stay holes."""
        self._sparse = sparse

    def call(self, job: Job) -> Call:
        """Return how rsync is run."""
        options = [
            b"--from0",
            b"--files-from=-",
            b"--no-implied-dirs",
            # What a name leads to is copied only if it is a regular file: no links, devices or pipes.
            b"--no-links",
            b"--no-devices",
            b"--no-specials",
            # The permissions are ours to give; until then the files are their owner's.
            b"--chmod=D700,F600",
            b"--times",
            b"--whole-file",
            b"--inplace",
            b"--no-motd",
        ]
        if self._sparse:
            options.append(b"--sparse")
        # The prefix keeps names that begin with - # or ; from being anything but names.
        stdin = b"".join(b"./" + name + b"\0" for name in job.names)
        return Call((b"rsync", *options, b"./", b"/proc/self/fd/%d/" % job.scratch), stdin)


class Rclone(Backend):
    """Tells rclone the names, one a line."""

    name = "rclone"

    def fault(self, name: bytes) -> str | None:
        """Return why rclone cannot be told of a file: it reads names by lines, and as UTF-8."""
        if b"\n" in name or b"\r" in name:
            return "has a line break"
        try:
            name.decode("utf-8")
        except UnicodeDecodeError:
            return "is not UTF-8"
        return None

    def call(self, job: Job) -> Call:
        """Return how rclone is run."""
        return Call(
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
    """Runs what the site configured."""

    name = "template"
    at_once = True

    def __init__(self, template: str, local: Local) -> None:
        """TransferFailed if it is no command line."""
        fault = template_fault(template)
        if fault is not None:
            raise TransferFailed(
                f"the site's program for transfers cannot be run: its command line {fault}; set TransferTemplate"
            )
        self._local = local
        self._words = [os.fsencode(word) for word in template_words(template)]

    def call(self, job: Job) -> Call:
        """Return what is to be run for one item; TransferFailed where its program may not be run here."""
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
        return Call(tuple(words), program=program)


def _path_of(descriptor: int) -> bytes:
    return os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}")).rstrip(b"/")


_EXECUTABLE: Final = os.X_OK


def run_program(transfer: TransferState, backend: str, call: Call, job: Job) -> None:
    """Run it to its end. ProgramFailed has its last words; TransferFailed if it is not there; OSError."""
    program = call.program or shutil.which(os.fsdecode(call.argv[0]), _EXECUTABLE, BASE_PATH)
    if program is None:
        raise TransferFailed(
            f"{os.fsdecode(call.argv[0])} is not on this node, or cannot be executed; "
            "install it here, or use another backend"
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
            poll=IoWatch(lambda: transfer.advance(Moved(steps=1)), transfer.context.pace).poll,
            poll_s=POLL_S,
        )
    end_program(backend, ran)


def end_program(shown: str, ran: guard.Finished) -> None:
    """End what a program left running; ProgramFailed if it failed itself, with its last words, or left what stays."""
    left = end_descendants()
    if ran.code:
        raise ProgramFailed(f"{shown} {guard.how(ran.code)}{last_words(ran)}")
    if left:
        raise ProgramFailed(f"{shown} left processes that cannot be ended: {', '.join(map(str, left[:20]))}")


def _become(program: str, call: Call, job: Job, stdin: int, returned: int) -> None:
    """In the child: become the program."""
    os.close(returned)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.fchdir(job.source)
    # It names its destination by this number.
    os.set_inheritable(job.scratch, True)
    os.umask(0o077)
    environment = {"PATH": BASE_PATH, "LANG": BASE_LANG, "HOME": "/"}
    if OPERATION_VARIABLE in os.environ:
        environment[OPERATION_VARIABLE] = os.environ[OPERATION_VARIABLE]
    os.execve(program, [os.fsencode(word) for word in call.argv], environment)


NO_LIMIT_S: Final = 10.0 * 366 * 86_400
"""In place of a time limit, seconds: the agent ends the worker, and with it the command, when it is late."""

MESSAGE_CHARACTERS: Final = 400
"""Characters of a program's last line that a failure repeats."""


class ProgramFailed(TransferFailed):
    """A program that ended with something else than 0; trying again may help."""


def last_words(ran: guard.Finished) -> str:
    """Return the last line that a program complained with, or else printed, in words that follow how it ended."""
    for output in (ran.complained, ran.printed):
        lines = output.decode("utf-8", "backslashreplace").strip().splitlines()
        if lines:
            line = "".join(character if character.isprintable() else "�" for character in lines[-1].strip())
            return f": {line[-MESSAGE_CHARACTERS:]}"
    return ", and said nothing"


def end_descendants() -> list[int]:
    """Kill every process that this one has started and adopted; return the ids of what cannot be killed.

    This process is their subreaper.
    """
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
"""Seconds between two polls at how far a program is: it is stopped as soon as it is ahead of its rate by as much, and
this is what looking costs of a hundredth of a processor."""

_IO_BYTES_MAX: Final = 4096
"""What is read of /proc/PID/io, bytes: seven lines."""

_STEP_BYTES: Final = 1 << 40
"""More than any rate moves at once: what is allowed of it says whether there is a rate."""


class _Io(NamedTuple):
    """What a process has done, and the children that it waited for, bytes."""

    read: int
    written: int
    """To files and pipes."""
    dirtied: int
    """Of pages that go to a disk."""


class IoWatch:
    """Told of a program from time to time (`poll`, for guard.run); says that it lives, and holds it to the pace."""

    def __init__(self, alive: Callable[[], None], pace: Pace) -> None:
        """`alive` is told of every look that found it further than the one before."""
        self._alive = alive
        self._pace = pace
        self._seen: dict[int, int] = {}
        # A process has in its count what those of its children did that it waited for, so that none is lost, and none
        # counted twice: the sum over all that live, this one among them, only grows.
        own = _io_of(os.getpid())
        self._written, self._handed = (0, 0) if own is None else (own.dirtied, own.written)

    def poll(self, _child: int) -> None:
        """See what the processes beneath this one have done since the last look; raises what ends the transfer."""
        self._pace.check()
        pids = descendants(os.getpid())
        counts = {pid: count for pid in (os.getpid(), *pids) if (count := _io_of(pid)) is not None}
        seen = {pid: count.read + count.written for pid, count in counts.items() if pid != os.getpid()}
        if any(moved > self._seen.get(pid, 0) for pid, moved in seen.items()):
            self._alive()
        self._seen = seen
        written = max(self._written, sum(count.dirtied for count in counts.values()))
        handed = max(self._handed, sum(count.written for count in counts.values()))
        # File systems without a disk of this machine are not counted by the kernel: what was handed to it is, with what
        # went through pipes, so that such a program is rather slower than its rate than faster.
        ahead = written - self._written or handed - self._handed
        self._written, self._handed = written, handed
        if ahead and self._pace.step_bytes(_STEP_BYTES) < _STEP_BYTES:
            self._hold(pids, ahead)

    def _hold(self, pids: list[int], written: int) -> None:
        for pid in pids:
            send(pid, signal.SIGSTOP)
        try:
            # The bucket owes what was taken ahead, and waits for it with the next byte.
            self._pace.take(written)
            self._pace.take(1)
        finally:
            for pid in pids:
                send(pid, signal.SIGCONT)


def _io_of(pid: int) -> _Io | None:
    """Return what a process has done; None if it is gone."""
    found: dict[bytes, int] = {}
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            for line in file.read(_IO_BYTES_MAX).splitlines():
                name, _, number = line.partition(b":")
                found[name] = int(number)
        return _Io(found[b"rchar"], found[b"wchar"], found[b"write_bytes"])
    except (OSError, ValueError, KeyError):
        return None
