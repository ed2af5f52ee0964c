"""Linux system calls for copying that Python lacks: clones and preallocation.

Sources: ioctl_ficlonerange(2), fallocate(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from typing import Final

_FICLONE: Final = 0x40049409
_NO_CLONE: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EBADF, errno.ETXTBSY}
)
_NO_ALLOCATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


def clone(reading: int, writing: int) -> bool:
    """Share the blocks of one open file with another; return False if the filesystem cannot.

    Raises:
        OSError: The disk is full or fails.
    """
    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError as error:
        if error.errno in _NO_CLONE:
            return False
        raise
    return True


def allocate(writing: int, size_bytes: int) -> None:
    """Allocate the blocks of an open file if the filesystem can, so that a full disk is noticed before the copy.

    Raises:
        OSError: There is no space.
    """
    # Not posix_fallocate, which writes a byte into every block if the filesystem cannot allocate.
    if size_bytes and _libc.fallocate(writing, 0, 0, size_bytes) != 0:
        number = ctypes.get_errno()
        if number not in _NO_ALLOCATION:
            raise OSError(number, os.strerror(number))


def open_direct(directory: int, name: bytes, writing: int) -> int | None:
    """Return another descriptor of an open file that bypasses the page cache, or None."""
    try:
        direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    same, other = os.fstat(writing), os.fstat(direct)
    if (same.st_dev, same.st_ino) == (other.st_dev, other.st_ino):
        return direct
    with contextlib.suppress(OSError):
        os.close(direct)
    return None


READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

XATTR_CLASS: Final = "user."
"""Prefix of the extended attributes that a file's owner may always set."""
