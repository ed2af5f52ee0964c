"""Btrfs subvolumes: directories whose size the filesystem limits through quota groups.

Any user may create subvolumes in an own directory, and read-only snapshots. These have quota groups of their own
without limits, and their own device numbers in stat(2). Creating a limited one requires CAP_SYS_ADMIN and quotas
enabled by an operator. Sources: <linux/btrfs.h>, <linux/btrfs_tree.h>, btrfs-quota(8), btrfs-subvolume(8).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from typing import Final

from forebay.cluster.agent.adapters.filesystem_type import BTRFS, type_of
from forebay.cluster.system import closing

_ROOT_INODE: Final = 256
"""BTRFS_FIRST_FREE_OBJECTID: inode of the top directory of each subvolume, and of no other directory."""

_NAME_BYTES_MAX: Final = 255
_CREATE: Final = 0x5000940E
_NAMED: Final = struct.Struct("=q4088s")
"""struct btrfs_ioctl_vol_args: descriptor, name."""

_LOOK_UP: Final = 0xD0009412
_LOOKED_UP: Final = struct.Struct("=QQ4080s")
"""struct btrfs_ioctl_ino_lookup_args: tree, object, name. Tree 0 stands for the open file's tree and is filled in."""

_GET_FLAGS: Final = 0x80089419
_SET_FLAGS: Final = 0x4008941A
_FLAGS: Final = struct.Struct("=Q")
_READ_ONLY: Final = 1 << 1

_LIMIT: Final = 0x8030942B
_LIMITS: Final = struct.Struct("=QQQQQQ")
"""struct btrfs_ioctl_qgroup_limit_args: group (0: the open file's), flags, maximum referenced bytes, maximum exclusive
bytes, and two reserved fields.
"""
_REFERENCED: Final = 1 << 0

_CHANGE_GROUP: Final = 0x4010942A
_CHANGED_GROUP: Final = struct.Struct("=QQ")
"""struct btrfs_ioctl_qgroup_create_args: 1 to create or 0 to remove, group."""

_SEARCH: Final = 0xD0009411
_SEARCHED: Final = struct.Struct("=QQQQQQQIIIIQQQQ")
"""struct btrfs_ioctl_search_key: tree; first and last object, offset and transaction; first and last type; items, and
reserved fields.
"""
_SEARCH_BYTES: Final = 4096
_QUOTA_TREE: Final = 8
_GROUP_INFO: Final = 242
"""BTRFS_QGROUP_INFO_KEY"""
_FOUND: Final = struct.Struct("<QQQIIQQ")
"""struct btrfs_ioctl_search_header (transaction, object, offset, type, length), and the first fields of struct
btrfs_qgroup_info_item: generation, referenced bytes.
"""

_NOBODYS_GROUP: Final = (0xFFFF << 48) + (1 << 47) - 1
"""ID of a group that never exists: levels above 7 are unused."""


def is_subvolume(directory: int) -> bool:
    """Return whether an open directory is the top of a subvolume.

    Raises:
        OSError: The filesystem type cannot be determined.
    """
    return os.fstat(directory).st_ino == _ROOT_INODE and is_on_btrfs(directory)


def is_on_btrfs(descriptor: int) -> bool:
    """Return whether an open file is on btrfs.

    Raises:
        OSError: The filesystem type cannot be determined.
    """
    return type_of(descriptor) == BTRFS


def why_unlimited(directory: int) -> str:
    """Return the reason why this process cannot limit subvolumes in an open directory, or ""."""
    try:
        if not is_on_btrfs(directory):
            return "its filesystem is not btrfs"
        fcntl.ioctl(directory, _LIMIT, _LIMITS.pack(_NOBODYS_GROUP, 0, 0, 0, 0, 0))
    except OSError as error:
        if error.errno == errno.ENOENT:
            # The kernel looked for the group, so quotas are enabled and this process may set limits.
            return ""
        if error.errno in (errno.ENOTCONN, errno.EINVAL):
            return "its btrfs has no quotas (see `btrfs quota enable`)"
        return f"its btrfs does not let this process limit subvolumes: {error.strerror}"
    return "its btrfs did not report whether it has quotas"


def create(parent: int, name: str) -> None:
    """Create a subvolume in an open directory.

    Raises:
        FileExistsError: The name exists.
        OSError: The subvolume cannot be created.
    """
    encoded = os.fsencode(name)
    if len(encoded) > _NAME_BYTES_MAX or b"/" in encoded:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    fcntl.ioctl(parent, _CREATE, bytearray(_NAMED.pack(0, encoded)))


def limit(directory: int, most_bytes: int) -> None:
    """Limit the bytes that the subvolume of an open directory may refer to, including file names.

    Raises:
        OSError: The limit cannot be set.
    """
    try:
        fcntl.ioctl(directory, _LIMIT, _LIMITS.pack(0, _REFERENCED, most_bytes, 0, 0, 0))
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            said = "the quotas of btrfs were disabled after this agent started; enable them or restart the agent"
            raise OSError(error.errno, said) from error
        raise


def group_of(directory: int) -> int:
    """Return the quota group ID of an open directory's subvolume.

    Raises:
        OSError: The ID cannot be read.
    """
    found = bytearray(_LOOKED_UP.pack(0, _ROOT_INODE, b""))
    fcntl.ioctl(directory, _LOOK_UP, found)
    return int(_LOOKED_UP.unpack(found)[0])


def referenced_bytes(directory: int) -> int:
    """Return the bytes that the quota group of an open directory's subvolume refers to, as of the last commit.

    Raises:
        OSError: The group has no usage, or this process may not read it.
    """
    group = group_of(directory)
    key = _SEARCHED.pack(_QUOTA_TREE, 0, 0, group, group, 0, 2**64 - 1, _GROUP_INFO, _GROUP_INFO, 1, 0, 0, 0, 0, 0)
    found = bytearray(key.ljust(_SEARCH_BYTES, b"\0"))
    fcntl.ioctl(directory, _SEARCH, found)
    if not _SEARCHED.unpack_from(found)[9]:
        raise OSError(errno.ENOENT, "btrfs has no quota group for this subvolume")
    return int(_FOUND.unpack_from(found, _SEARCHED.size)[6])


def release(parent: int, group: int) -> None:
    """Remove the quota group of a deleted subvolume.

    Linux 6.11 and newer may reject this during cleanup and then remove the group by themselves.
    """
    with contextlib.suppress(OSError):
        fcntl.ioctl(parent, _CHANGE_GROUP, _CHANGED_GROUP.pack(0, group))


def make_writable(handle: int) -> bool:
    """Make a subvolume writable that its owner made read-only; return True if it was. The process must act as the
    owner.

    `handle` may be an O_PATH descriptor of its top.

    Raises:
        OSError: The flags cannot be changed.
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
