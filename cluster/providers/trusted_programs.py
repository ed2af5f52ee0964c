"""Trust check of a site's programs, before each run.

A program must be named in this machine's configuration: the replicated configuration can be changed over the API, and
would make an operator root on every node. No other account may be able to change the program, and it must not be in a
directory where this service stores data of others. Each path component is checked by descriptor, so after the check
only root or this process's account can replace it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from forebay.cluster.providers.interface import Local
from forebay.cluster.providers.limits import SCRIPT_BYTES_MAX
from forebay.cluster.system import UntrustedFile
from forebay.cluster.system import open_trusted as open_path_trusted


class ProgramRefused(Exception):
    """The program may not be run; the message names the path, the reason and the remedy."""


def open_trusted(path: str, local: Local, *, executable: bool = False) -> int:
    """Return a descriptor for reading the regular file at `path`, after checking that it can be trusted.

    The machine's configuration `local` must name it. After resolving links, the file and all its parent directories
    must belong to root or this process's account and not be writable by other accounts; a sticky directory such as /tmp
    may be writable by all. No parent may be a `closed` directory.

    Raises:
        ProgramRefused: The file cannot be trusted.
    """
    if path not in local.program_paths:
        raise ProgramRefused(
            f"the site's program {path} may not be run on this machine, because its forebay.toml does not name it; "
            "add the path to allowed_programs in [provider] and restart this service"
        )
    return _open(path, f"the site's program {path}", "run", local, executable=executable)


def check_module(path: str, local: Local) -> None:
    """Raise ProgramRefused unless the Lua module at `path` is as trustworthy as a program.

    The machine's configuration need not name it.
    """
    os.close(_open(path, f"the Lua module {path}", "loaded", local))


def _open(path: str, what: str, verb: str, local: Local, *, executable: bool = False) -> int:
    """Return a descriptor of a file; `what` and `verb` are its name and use in messages."""
    if not path.startswith("/"):
        raise ProgramRefused(f"the path of {what} is not absolute; start it with /")
    closed = _identities(local.closed)

    def check_closed(status: os.stat_result, shown: str) -> None:
        if (status.st_dev, status.st_ino) in closed:
            raise UntrustedFile(f"it is below {shown}, where this service stores data of others", "move it elsewhere")

    try:
        file = open_path_trusted(os.path.realpath(path), check_closed)
        if executable and not os.fstat(file).st_mode & 0o111:
            os.close(file)
            raise ProgramRefused(f"{what} is not executable; run chmod +x on it")
        return file
    except UntrustedFile as error:
        raise ProgramRefused(f"{what} is not {verb}: {error}; {error.remedy}") from error
    except OSError as error:
        raise ProgramRefused(
            f"{what} cannot be opened: {error.strerror}; install it, or correct its path in the site's configuration"
        ) from error


def read_trusted(path: str, local: Local) -> bytes:
    """Return the content of a trusted script.

    Raises:
        ProgramRefused: The script cannot be trusted or is too long.
    """
    with os.fdopen(open_trusted(path, local), "rb") as file:
        data = file.read(SCRIPT_BYTES_MAX + 1)
    if len(data) > SCRIPT_BYTES_MAX:
        raise ProgramRefused(f"the site's script {path} is longer than {SCRIPT_BYTES_MAX} bytes; make it shorter")
    return data


def check_command(path: str, local: Local) -> str:
    """Return the resolved path of the command at `path`.

    Raises:
        ProgramRefused: The command cannot be trusted or executed.
    """
    os.close(open_trusted(path, local, executable=True))
    return os.path.realpath(path)


def _identities(directories: Iterable[str]) -> frozenset[tuple[int, int]]:
    """Return device and inode of each existing directory."""
    found = set()
    for directory in directories:
        with contextlib.suppress(OSError):
            status = os.stat(directory)
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)
