"""Filesystem types, as the kernel reports them.

Sources: statfs(2), syncfs(2).
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_STATFS_BYTES: Final = 256
"""Space for `struct statfs` of any architecture; its first field, a long, is the type."""

_EXT: Final = 0xEF53
_XFS: Final = 0x58465342
BTRFS: Final = 0x9123683E
_TMPFS: Final = 0x01021994

LOCAL: Final = frozenset({_EXT, _XFS, BTRFS, _TMPFS})
"""Local filesystems whose syncfs(2) writes everything and reports lost writes. Others, such as network or user-space
filesystems, do not guarantee this, so files are synced individually.
"""

_libc = ctypes.CDLL(None, use_errno=True)


def type_of(descriptor: int) -> int:
    """Return the type number of the filesystem of an open file.

    Raises:
        OSError: The type cannot be determined.
    """
    room = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(descriptor, room) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return ctypes.c_ulong.from_buffer(room).value & 0xFFFFFFFF


def is_local(descriptor: int) -> bool:
    """Return whether an open file is on one of the LOCAL filesystems; False if unknown."""
    try:
        return type_of(descriptor) in LOCAL
    except OSError:
        return False
