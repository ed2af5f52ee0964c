"""Run of a site's command: checked, without a shell, with little of this process's environment; and the log of a call.

The log has one line for one thing, whatever a site's program wrote in it.

A program is only run if this machine's own forebay.toml names it: what replicas agree on can be changed over the API,
and would make an operator root on every node. And only if nobody but root and the account of this service can change
it, and it does not lie where this service keeps what others wrote. The kernel is asked about each step of the way, by
descriptor, when it is to be run; only root or that account could make any of them another one afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cluster.providers import guard
from cluster.providers.interface import Local, OperationError, Provider
from cluster.providers.limits import LOGGED_BYTES_MAX, OUTPUT_BYTES_MAX, SCRIPT_BYTES_MAX
from cluster.providers.private_directory import MARK
from cluster.system import Clock
from replica.model import Provision
from replica.values import plain


class ProgramRefused(Exception):
    """A program that is not run; the message names the path, what is wrong and what would be right."""


def open_trusted(path: str, local: Local, *, executable: bool = False) -> int:
    """Return a descriptor of the regular file at `path`, reading; ProgramRefused unless it can be trusted.

    This machine's configuration, `local`, must name it. It and every directory on its way, links followed first, must
    belong to root or to this process's account and be writable by nobody else; a directory may be writable by all if it
    is sticky, as /tmp is: nobody replaces there what is another's. None may be a directory that is `closed`.
    """
    if path not in local.named:
        raise ProgramRefused(
            f"the site's program {path} is not run on this machine, whose forebay.toml does not name it; "
            "if it is to be run here, add its path to allowed_programs in [provider] there and start this service again"
        )
    if not path.startswith("/"):
        raise ProgramRefused(f"the path {path!r} of the site's program is not absolute; write it from / on")
    closed = _identities(local.closed)
    steps = os.path.realpath(path).split("/")[1:]
    directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(directory, path, "/", closed)
        for number, step in enumerate(steps[:-1], start=2):
            inner = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inner
            _check(directory, path, "/" + "/".join(steps[: number - 1]), closed)
        file = os.open(steps[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        raise ProgramRefused(
            f"the site's program {path} cannot be opened: {error.strerror}; "
            "put it there, or correct its path in the site's configuration"
        ) from error
    finally:
        os.close(directory)
    try:
        _check_file(file, path, executable)
    except BaseException:
        os.close(file)
        raise
    return file


def read_trusted(path: str, local: Local) -> bytes:
    """Return what the trusted script holds; ProgramRefused if it cannot be trusted or is too long."""
    with os.fdopen(open_trusted(path, local), "rb") as file:
        data = file.read(SCRIPT_BYTES_MAX + 1)
    if len(data) > SCRIPT_BYTES_MAX:
        raise ProgramRefused(f"the site's script {path} is longer than {SCRIPT_BYTES_MAX} bytes; make it shorter")
    return data


def check_command(path: str, local: Local) -> str:
    """Return where the command at `path` is, links followed; ProgramRefused if it cannot be trusted or executed."""
    os.close(open_trusted(path, local, executable=True))
    return os.path.realpath(path)


def _check_file(file: int, path: str, executable: bool) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise ProgramRefused(f"the site's program {path} is no regular file; name a file")
    _check(file, path, path)
    if executable and not status.st_mode & 0o111:
        raise ProgramRefused(f"the site's program {path} may not be executed; chmod +x it")


def _identities(directories: Iterable[str]) -> frozenset[tuple[int, int]]:
    """Return what the kernel knows these directories by, whatever links lead to them; those that are not there, not."""
    found = set()
    for directory in directories:
        with contextlib.suppress(OSError):
            status = os.stat(directory)
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def _check(descriptor: int, path: str, shown: str, closed: frozenset[tuple[int, int]] = frozenset()) -> None:
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) in closed:
        raise ProgramRefused(
            f"the site's program {path} is not run: it lies below {shown}, where this service keeps what others wrote; "
            "put it elsewhere"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ProgramRefused(
            f"the site's program {path} is not run: {shown} belongs to user {status.st_uid}; "
            "make root its owner, or the account that Forebay runs as"
        )
    shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & 0o022 and not shared:
        raise ProgramRefused(
            f"the site's program {path} is not run: others may write to {shown}; take that from them with chmod go-w"
        )


logger = logging.getLogger(__name__)

_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", MARK)


class CommandOutput(NamedTuple):
    """End of a command, and what it printed: standard output, or standard error where that is empty."""

    code: int
    text: str
    printed: bytes


class Commands:
    """Runs commands with the environment that the site wants for them."""

    def __init__(self, local: Local, clock: Clock) -> None:
        """`local` says which may be run here, and what is added to PATH, LANG, LC_ALL and TMPDIR of this process."""
        self._local = local
        self._environment = environment_for(local.environment)
        self._clock = clock

    def run(self, operation: str, path: str, arguments: Sequence[str], timeout_s: float) -> CommandOutput:
        """Run it to its end; OperationError if it cannot be run, is over its time or prints without end."""
        if not path:
            raise OperationError(
                operation, "the site's configuration names no program for it; see forebay config show", final=True
            )
        try:
            program = check_command(path, self._local)
        except ProgramRefused as error:
            raise OperationError(operation, str(error), final=True) from error
        argv = (os.path.basename(path), *arguments)
        if any("\0" in argument for argument in argv):
            raise OperationError(operation, "an argument has a NUL character in it", final=True)
        try:
            finished = guard.execute(argv, self._environment, timeout_s=timeout_s, clock=self._clock, program=program)
        except OSError as error:
            raise OperationError(operation, f"{path} cannot be run: {error.strerror}") from error
        log_output(f"{os.path.basename(path)} {' '.join(arguments[:4])}", finished)
        if finished.timed_out:
            raise OperationError(operation, timed_out(timeout_s, finished))
        text = (finished.printed.strip() or finished.complained.strip())[:OUTPUT_BYTES_MAX].decode("utf-8", "replace")
        return CommandOutput(finished.code, text, finished.printed)

    def check(self, operation: str, path: str, arguments: Sequence[str], timeout_s: float) -> CommandOutput:
        """Run it; OperationError with what it said if its exit code is not 0."""
        output = self.run(operation, path, arguments, timeout_s)
        if output.code != 0:
            raise failure(operation, path, output)
        return output


class CommandProvider(Provider):
    """A provider whose operations are a site's commands: GetSysState for most, GetSysStatus for the status."""

    def __init__(self, provision: Provision, local: Local, clock: Clock) -> None:
        """Prepare; nothing is run yet."""
        super().__init__(provision, local, clock)
        self._state = local.get_sys_state or provision.get_sys_state
        self._status = local.get_sys_status or provision.get_sys_status
        self._commands = Commands(local, clock)


def failure(operation: str, path: str, output: CommandOutput) -> OperationError:
    """Return the error that a command's end is."""
    return OperationError(operation, output.text or f"{path} {guard.how(output.code)} and said nothing")


def environment_for(site: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the whole environment of a call; `site` is `[provider] environment`."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | dict(site)


def timed_out(timeout_s: float, finished: guard.Finished) -> str:
    """Return what is said of a call that was over its time, in Slurm's words, and what could not be killed."""
    message = f"Timeout @ {round(timeout_s * 1000)} msec"
    if finished.unkillable:
        message += f"; processes {', '.join(map(str, finished.unkillable[:20]))} cannot be killed"
    return message


def log_output(what: str, finished: guard.Finished) -> None:
    """Log the beginning of what a call printed, a line each."""
    for stream in (finished.printed, finished.complained):
        for line in stream[:LOGGED_BYTES_MAX].decode("utf-8", "replace").splitlines():
            if line.strip():
                logger.info("%s: %s", plain(what), plain(line.rstrip()))
