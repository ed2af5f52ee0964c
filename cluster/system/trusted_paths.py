"""Trusted files: files that only root and this process's account can change, opened once and checked by descriptor.

Each directory of the path is checked by descriptor. If the whole path is trusted, no other account can replace the file
afterwards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFile(Exception):
    """File that another account could change, or that is not regular; `remedy` says how to fix it."""

    def __init__(self, sentence: str, remedy: str) -> None:
        """Store message and remedy."""
        super().__init__(sentence)
        self.remedy = remedy


def open_trusted(path: str, look: Callable[[os.stat_result, str], None] | None = None) -> int:
    """Return a descriptor for reading the regular file at an absolute path without links.

    The file and every directory of its path must belong to root or to this process's account and be writable by no
    other account. A directory may be writable by all if it is sticky, as /tmp is: accounts cannot replace each other's
    files there. `look` is called with the status and the path of each directory.

    Raises:
        UntrustedFile: The file cannot be trusted.
        OSError: The file cannot be opened, or its last part is a link (ELOOP).
    """
    *above, name = path.split("/")[1:]
    directory = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number in range(len(above) + 1):
            shown = "/" + "/".join(above[:number])
            status = os.fstat(directory)
            if look is not None:
                look(status, shown)
            _check(status, shown)
            if number < len(above):
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(above[number], flags, dir_fd=directory)
                os.close(directory)
                directory = inner
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedFile(f"{path} is not a regular file", "name a file")
        _check(status, path)
    except BaseException:
        os.close(file)
        raise
    return file


def _check(status: os.stat_result, shown: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedFile(
            f"{shown} belongs to user {status.st_uid}", "make root its owner, or the account that Forebay runs as"
        )
    is_shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_WRITE and not is_shared:
        raise UntrustedFile(f"others may write to {shown}", "run chmod go-w on it")
