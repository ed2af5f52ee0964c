"""Subvolumes of btrfs: a directory whose size the file system keeps by its quota group, and refuses what is more.

Anybody may make subvolumes in a directory of his own, and snapshots that cannot be written to; they are quota groups of
their own, which nobody limits, and devices of their own to stat(2). Making one limited needs CAP_SYS_ADMIN, and quotas
that an operator has enabled for the file system. Sources: <linux/btrfs.h>, <linux/btrfs_tree.h>,
btrfs-quota(8), btrfs-subvolume(8)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from typing import Final

from cluster.agent.files.kernel import BTRFS, type_of
from cluster.system import closing

_ROOT_INODE: Final = 256
"""BTRFS_FIRST_FREE_OBJECTID: inode of the directory of each subvolume, and of no other directory."""

_NAME_BYTES_MAX: Final = 255
_CREATE: Final = 0x5000940E
_NAMED: Final = struct.Struct("=q4088s")
"""struct btrfs_ioctl_vol_args: descriptor, name."""

_LOOK_UP: Final = 0xD0009412
_LOOKED_UP: Final = struct.Struct("=QQ4080s")
"""struct btrfs_ioctl_ino_lookup_args: tree, object, name. Tree 0 is the one of the open file, and is filled in."""

_GET_FLAGS: Final = 0x80089419
_SET_FLAGS: Final = 0x4008941A
_FLAGS: Final = struct.Struct("=Q")
_READ_ONLY: Final = 1 << 1

_LIMIT: Final = 0x8030942B
_LIMITS: Final = struct.Struct("=QQQQQQ")
"""struct btrfs_ioctl_qgroup_limit_args: group (0: the one of the open file), which limits, most referenced bytes, most
exclusive ones, and two that are reserved."""
_REFERENCED: Final = 1 << 0

_CHANGE_GROUP: Final = 0x4010942A
_CHANGED_GROUP: Final = struct.Struct("=QQ")
"""struct btrfs_ioctl_qgroup_create_args: 1 to make it and 0 to remove it, group."""

_NOBODYS_GROUP: Final = (0xFFFF << 48) + (1 << 47) - 1
"""Number of a group that there is not: levels above 7 are used by nobody."""


def is_subvolume(directory: int) -> bool:
    """Return whether an open directory is the top of a subvolume. OSError."""
    return os.fstat(directory).st_ino == _ROOT_INODE and is_on_btrfs(directory)


def is_on_btrfs(descriptor: int) -> bool:
    """Return whether an open file is on btrfs. OSError."""
    return type_of(descriptor) == BTRFS


def why_unlimited(directory: int) -> str:
    """Return why subvolumes in an open directory cannot be limited by this process; empty if they can."""
    try:
        if not is_on_btrfs(directory):
            return "its file system is not btrfs"
        fcntl.ioctl(directory, _LIMIT, _LIMITS.pack(_NOBODYS_GROUP, 0, 0, 0, 0, 0))
    except OSError as error:
        if error.errno == errno.ENOENT:
            # It looked for the group: so quotas are enabled, and this process may limit them.
            return ""
        if error.errno in (errno.ENOTCONN, errno.EINVAL):
            return "its btrfs has no quotas; `btrfs quota enable` gives it some"
        return f"its btrfs does not let this process limit subvolumes: {error.strerror}"
    return "its btrfs did not say whether it keeps quotas"


def create(parent: int, name: str) -> None:
    """Make a subvolume in an open directory. FileExistsError, OSError."""
    encoded = os.fsencode(name)
    if len(encoded) > _NAME_BYTES_MAX or b"/" in encoded:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    fcntl.ioctl(parent, _CREATE, bytearray(_NAMED.pack(0, encoded)))


def limit(directory: int, most_bytes: int) -> None:
    """Have the subvolume of an open directory refer to at most so many bytes, of files and of their names. OSError."""
    try:
        fcntl.ioctl(directory, _LIMIT, _LIMITS.pack(0, _REFERENCED, most_bytes, 0, 0, 0))
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            said = "the quotas of btrfs were disabled since this agent began; enable them, or restart the agent"
            raise OSError(error.errno, said) from error
        raise


def group_of(directory: int) -> int:
    """Return the number of the quota group of an open directory's subvolume. OSError."""
    found = bytearray(_LOOKED_UP.pack(0, _ROOT_INODE, b""))
    fcntl.ioctl(directory, _LOOK_UP, found)
    return int(_LOOKED_UP.unpack(found)[0])


def release(parent: int, group: int) -> None:
    """Remove the quota group of a subvolume that is gone, on the file system of an open directory.

    Some kernels refuse while they still clean up, and remove it then by themselves (from Linux 6.11 on).
    """
    with contextlib.suppress(OSError):
        fcntl.ioctl(parent, _CHANGE_GROUP, _CHANGED_GROUP.pack(0, group))


def make_writable(handle: int) -> bool:
    """Let a subvolume be written to that its owner, whom this process acts as, has made read-only; True if it was.

    `handle` is any descriptor of its top, O_PATH too. OSError.
    """
    with closing(os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        if not is_subvolume(directory):
            return False
        found = bytearray(_FLAGS.size)
        fcntl.ioctl(directory, _GET_FLAGS, found)
        flags = int(_FLAGS.unpack(found)[0])
        if flags & _READ_ONLY:
            fcntl.ioctl(directory, _SET_FLAGS, _FLAGS.pack(flags & ~_READ_ONLY))
        return bool(flags & _READ_ONLY)
