"""Which of the site's programs may be run: those that nobody but root and the account of this service can change."""

from __future__ import annotations

import os
import stat

from cluster.providers.limits import SCRIPT_BYTES_MAX


class ProgramRefused(Exception):
    """A program that is not run; the message names the path, what is wrong and what would be right."""


def open_trusted(path: str, *, executable: bool = False) -> int:
    """Return a descriptor of the regular file at `path`, reading; ProgramRefused unless it can be trusted.

    It and every directory on its way, links followed first, must belong to root or to this process's account and be
    writable by nobody else; a directory may be writable by all if it is sticky, as /tmp is.
    """
    if not path.startswith("/"):
        raise ProgramRefused(f"the path {path!r} of the site's program is not absolute; write it from / on")
    steps = os.path.realpath(path).split("/")[1:]
    directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(directory, path, "/")
        for number, step in enumerate(steps[:-1], start=2):
            inner = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inner
            _check(directory, path, "/" + "/".join(steps[: number - 1]))
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


def read_trusted(path: str) -> bytes:
    """Return what the trusted script holds; ProgramRefused if it cannot be trusted or is too long."""
    with os.fdopen(open_trusted(path), "rb") as file:
        data = file.read(SCRIPT_BYTES_MAX + 1)
    if len(data) > SCRIPT_BYTES_MAX:
        raise ProgramRefused(f"the site's script {path} is longer than {SCRIPT_BYTES_MAX} bytes; make it shorter")
    return data


def check_command(path: str) -> str:
    """Return where the command at `path` is, links followed; ProgramRefused if it cannot be trusted or executed."""
    os.close(open_trusted(path, executable=True))
    return os.path.realpath(path)


def _check_file(file: int, path: str, executable: bool) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise ProgramRefused(f"the site's program {path} is no regular file; name a file")
    _check(file, path, path)
    if executable and not status.st_mode & 0o111:
        raise ProgramRefused(f"the site's program {path} may not be executed; chmod +x it")


def _check(descriptor: int, path: str, shown: str) -> None:
    status = os.fstat(descriptor)
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
