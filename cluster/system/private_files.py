"""Private files: state, history, reports and configuration, readable only by their owner, in private directories.

Every file of the product is created here, or with an explicit mode by descriptor; `tests/repo/test_private_files.py`
finds exceptions. The temporary name beside a replaced file is unpredictable and never an existing one, so an attacker
with write access to the directory can neither plant a link there nor block the name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from forebay.cluster.system.descriptors import sync_directory

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700

_TOKEN_BYTES: Final = 8
"""Number of random bytes in a temporary name: too many to guess."""


def make_private_directory(directory: Path) -> None:
    """Create a directory and its missing parents, accessible only to their owner.

    An existing directory keeps its mode.

    Raises:
        OSError: A directory cannot be created.
    """
    if not directory.is_dir():
        make_private_directory(directory.parent)
        # Another process may have created it meanwhile.
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def name_beside(path: Path) -> Path:
    """Return an unpredictable temporary name in the same directory."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")


@contextlib.contextmanager
def new_private_file(path: Path, mode: int = FILE_MODE) -> Iterator[IO[bytes]]:
    """Create a new file; remove it if the block fails.

    Raises:
        FileExistsError: The file exists.
        OSError: The file cannot be created.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # The umask may have removed some bits.
            os.fchmod(file.fileno(), mode)
            yield file
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def open_private_file(path: Path, flags: int) -> int:
    """Return a descriptor of a file, created if missing, without following a link.

    Raises:
        OSError: The file cannot be opened or created.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def replace_private(path: Path, data: bytes, *, durable: bool = True, mode: int = FILE_MODE) -> None:
    """Replace the whole file, or create it with this mode.

    A crash leaves the old or the new file. With `durable`, the new file is on disk on return.

    Raises:
        OSError: The file cannot be written; the old file remains.
    """
    beside = name_beside(path)
    with new_private_file(beside, mode) as file:
        file.write(data)
        file.flush()
        keep_ownership(file.fileno(), path)
        if durable:
            os.fsync(file.fileno())
        beside.replace(path)
    if durable:
        sync_directory(path.parent)


def keep_ownership(descriptor: int, name: str | os.PathLike[str], *, directory: int | None = None) -> None:
    """Give an open file the owner, group and mode of the file `name`, if `name` exists and is a regular file.

    Call it before the rename. Otherwise a command run by root would leave a service with a file that the service cannot
    read. `name` is relative to the open `directory` if given. A file in a directory that other accounts may write to is
    ignored, because an attacker may have created it to receive a key.

    Raises:
        OSError: The owner, group or mode cannot be set.
    """
    try:
        replaced = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    above = os.stat(os.path.dirname(name) or ".", dir_fd=directory)
    if not stat.S_ISREG(replaced.st_mode) or above.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (replaced.st_uid, replaced.st_gid):
        # Only root may change the owner. Other accounts replace files as before.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    # After fchown, which clears the set-user-ID and set-group-ID bits.
    os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))
