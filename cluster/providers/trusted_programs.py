"""Which of a site's programs may be run: those that this machine's configuration names, and nobody else can change.

What replicas agree on can be changed over the API, and would make an operator root on every node. Nor does a program
lie where this service keeps what others wrote. The kernel is asked about each step of the way, by descriptor, when it
is to be run; only root or this process's account could make any of them another one afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from cluster.providers.interface import Local
from cluster.providers.limits import SCRIPT_BYTES_MAX
from cluster.system import UntrustedFile
from cluster.system import open_trusted as open_path_trusted


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

    def check_closed(status: os.stat_result, shown: str) -> None:
        if (status.st_dev, status.st_ino) in closed:
            raise UntrustedFile(
                f"it lies below {shown}, where this service keeps what others wrote", "put it elsewhere"
            )

    try:
        file = open_path_trusted(os.path.realpath(path), check_closed)
        if executable and not os.fstat(file).st_mode & 0o111:
            os.close(file)
            raise ProgramRefused(f"{what} may not be executed; chmod +x it")
        return file
    except UntrustedFile as error:
        raise ProgramRefused(f"{what} is not {verb}: {error}; {error.remedy}") from error
    except OSError as error:
        raise ProgramRefused(
            f"{what} cannot be opened: {error.strerror}; put it there, or correct its path in the site's configuration"
        ) from error


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


def _identities(directories: Iterable[str]) -> frozenset[tuple[int, int]]:
    """Return what the kernel knows these directories by, whatever links lead to them; those that are not there, not."""
    found = set()
    for directory in directories:
        with contextlib.suppress(OSError):
            status = os.stat(directory)
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)
