"""Which of a site's programs may be run: those that this machine's configuration names, and nobody else can change.

What replicas agree on can be changed over the API, and would make an operator root on every node. Nor does a program
lie where this service keeps what others wrote. The kernel is asked about each step of the way, by descriptor, when it
is to be run; only root or this process's account could make any of them another one afterwards.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable

from cluster.providers.interface import Local
from cluster.providers.limits import SCRIPT_BYTES_MAX


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
    return _open(path, f"the site's program {path}", "run", local, executable=executable)


def check_module(path: str, local: Local) -> None:
    """Raise ProgramRefused unless the Lua module at `path` can be trusted as far as a program has to be.

    This machine's configuration need not name it.
    """
    os.close(_open(path, f"the Lua module {path}", "loaded", local))


def _open(path: str, what: str, verb: str, local: Local, *, executable: bool = False) -> int:
    """Return a descriptor of a file; `what` names it in messages, `verb` says what is not done with it."""
    if not path.startswith("/"):
        raise ProgramRefused(f"the path of {what} is not absolute; write it from / on")
    closed = _identities(local.closed)
    refused = f"{what} is not {verb}"
    steps = os.path.realpath(path).split("/")[1:]
    directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(directory, refused, "/", closed)
        for number, step in enumerate(steps[:-1], start=2):
            inner = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inner
            _check(directory, refused, "/" + "/".join(steps[: number - 1]), closed)
        file = os.open(steps[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        raise ProgramRefused(
            f"{what} cannot be opened: {error.strerror}; put it there, or correct its path in the site's configuration"
        ) from error
    finally:
        os.close(directory)
    try:
        _check_file(file, what, refused, path, executable)
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


def _check_file(file: int, what: str, refused: str, path: str, executable: bool) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise ProgramRefused(f"{what} is no regular file; name a file")
    _check(file, refused, path)
    if executable and not status.st_mode & 0o111:
        raise ProgramRefused(f"{what} may not be executed; chmod +x it")


def _identities(directories: Iterable[str]) -> frozenset[tuple[int, int]]:
    """Return what the kernel knows these directories by, whatever links lead to them; those that are not there, not."""
    found = set()
    for directory in directories:
        with contextlib.suppress(OSError):
            status = os.stat(directory)
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def _check(descriptor: int, refused: str, shown: str, closed: frozenset[tuple[int, int]] = frozenset()) -> None:
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) in closed:
        raise ProgramRefused(
            f"{refused}: it lies below {shown}, where this service keeps what others wrote; put it elsewhere"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ProgramRefused(
            f"{refused}: {shown} belongs to user {status.st_uid}; "
            "make root its owner, or the account that Forebay runs as"
        )
    shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & 0o022 and not shared:
        raise ProgramRefused(f"{refused}: others may write to {shown}; take that from them with chmod go-w")
