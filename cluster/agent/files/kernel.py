"""What Linux does for a copy and Python has no name for: clones, room in advance, and which file system it is.

Sources: ioctl_ficlonerange(2), fallocate(2), statfs(2), syncfs(2)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from typing import Final

_FICLONE: Final = 0x40049409
_STATFS_BYTES: Final = 256
"""Room for `struct statfs` of any architecture; its first field, a long, is the type."""

_EXT: Final = 0xEF53
_XFS: Final = 0x58465342
BTRFS: Final = 0x9123683E
_TMPFS: Final = 0x01021994

LOCAL: Final = frozenset({_EXT, _XFS, BTRFS, _TMPFS})
"""File systems of this machine whose syncfs(2) writes everything and says if anything was lost. With others, such as a
file server's or one in user space, that is not certain, and each file is synced by itself."""

_NO_CLONE: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EBADF, errno.ETXTBSY}
)
_NO_ALLOCATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


def type_of(descriptor: int) -> int:
    """Return the number of the type of the file system that an open file is on. OSError."""
    room = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(descriptor, room) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return ctypes.c_ulong.from_buffer(room).value & 0xFFFFFFFF


def is_local(descriptor: int) -> bool:
    """Return whether the file system that an open file is on is one of LOCAL; not if that cannot be found out."""
    try:
        return type_of(descriptor) in LOCAL
    except OSError:
        return False


def clone(reading: int, writing: int) -> bool:
    """Have one open file share the blocks of another; False if the file system cannot. OSError."""
    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError as error:
        if error.errno in _NO_CLONE:
            return False
        raise
    return True


def allocate(writing: int, size_bytes: int) -> None:
    """Reserve the blocks of an open file, where the file system can: what does not fit is known before it is copied.

    OSError if there is no room.
    """
    # Not posix_fallocate: where the file system cannot, that writes a byte into every block.
    if size_bytes and _libc.fallocate(writing, 0, 0, size_bytes) != 0:
        number = ctypes.get_errno()
        if number not in _NO_ALLOCATION:
            raise OSError(number, os.strerror(number))


def open_direct(directory: int, name: bytes, writing: int) -> int | None:
    """Return another descriptor of an open file, one that goes past the page cache; None if there can be none."""
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
"""The only extended attributes that a user may set on whatever he owns."""
