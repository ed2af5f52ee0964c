"""Project quotas: kernel-enforced limits on a directory tree.

xfs and ext4 support them if mounted with `prjquota` (ext4 must be created with `-O quota,project`). A file created in a
directory with a project ID inherits it; blocks and inodes are counted per ID. Setting limits requires root. Sources:
quotactl(2) and quotactl_fd(2), <linux/dqblk_xfs.h>, <linux/fs.h>: the calls of xfs, which ext4 supports too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
from typing import Final

from forebay.cluster.agent.adapters import project_ids
from forebay.cluster.agent.adapters.interface import QuotaUsage

_QUOTACTL_FD: Final = 443
"""System call number on all architectures, since Linux 5.14."""

_PROJECT: Final = 2
_GET_QUOTA: Final = (ord("X") << 8) + 3
_SET_LIMITS: Final = (ord("X") << 8) + 4
_GET_STATE: Final = (ord("X") << 8) + 5
_ENFORCED: Final = 1 << 5
"""FS_QUOTA_PDQ_ENFD in the result of _GET_STATE."""

_STATE_BYTES: Final = 1024
_LIMITS: Final = struct.Struct("=bbHIQQQQQQ56x")
"""struct fs_disk_quota: version, flags, mask, ID; block limits hard and soft, inode limits hard and soft, blocks and
inodes in use, ...
"""

_VERSION: Final = 1
_FLAGS_PROJECT: Final = 2
_INODES_HARD: Final = 1 << 1
_BLOCKS_HARD: Final = 1 << 3
_BLOCK_BYTES: Final = 512

_GET_ATTRIBUTES: Final = 0x801C581F
_SET_ATTRIBUTES: Final = 0x401C5820
_ATTRIBUTES: Final = struct.Struct("=IIIII8s")
"""struct fsxattr: flags, extent size, extents, project ID, extent size of copies."""
_INHERIT: Final = 0x200

_libc = ctypes.CDLL(None, use_errno=True)


def is_enforced(descriptor: int) -> bool:
    """Return whether the filesystem of an open directory enforces project quotas and this process may set them."""
    state = ctypes.create_string_buffer(bytes([_VERSION]), _STATE_BYTES)
    try:
        _control(descriptor, _GET_STATE, 0, state)
        if not int.from_bytes(state.raw[2:4], sys.byteorder) & _ENFORCED:
            return False
        _set_limits(descriptor, project_ids.LEAST, 0)
    except OSError:
        return False
    return True


def hold(directory: int, seed: str, most_bytes: int) -> None:
    """Limit the bytes that an open, empty directory and its future content may take.

    A directory that already has one of our projects keeps it. The project ID is derived from `seed`.

    Raises:
        OSError: The limit cannot be set.
    """
    project = project_of(directory)
    if project < project_ids.LEAST:
        project = _free_id(directory, seed)
        _join(directory, project)
    _set_limits(directory, project, _BLOCKS_HARD, blocks=most_bytes // _BLOCK_BYTES)


def limit_inodes(directory: int, inodes: int) -> None:
    """Limit the inodes of an open directory with one of our projects; 0 means unlimited.

    Raises:
        OSError: The limit cannot be set.
    """
    project = project_of(directory)
    if project >= project_ids.LEAST:
        _set_limits(directory, project, _INODES_HARD, inodes=inodes)


def project_of(directory: int) -> int:
    """Return the project ID of an open directory; 0 if it has none or the filesystem has no projects."""
    attributes = bytearray(_ATTRIBUTES.size)
    try:
        fcntl.ioctl(directory, _GET_ATTRIBUTES, attributes)
    except OSError:
        return 0
    return int(_ATTRIBUTES.unpack(attributes)[3])


def read_usage(descriptor: int, project: int) -> QuotaUsage:
    """Return the usage of a project on the filesystem of an open file.

    Raises:
        OSError: The quota cannot be read.
    """
    found = ctypes.create_string_buffer(_LIMITS.size)
    try:
        _control(descriptor, _GET_QUOTA, project, found)
    except OSError as error:
        # xfs does not know unused IDs.
        if error.errno == errno.ENOENT:
            return QuotaUsage(0, 0)
        raise
    fields = _LIMITS.unpack(found.raw)
    return QuotaUsage(fields[8] * _BLOCK_BYTES, fields[9])


def release(descriptor: int, project: int) -> None:
    """Clear the limits of one of our projects, after its directory was removed.

    Raises:
        OSError: The limits cannot be changed.
    """
    if project >= project_ids.LEAST:
        _set_limits(descriptor, project, _BLOCKS_HARD | _INODES_HARD)


def _free_id(directory: int, seed: str) -> int:
    for project in project_ids.candidates(seed):
        if read_usage(directory, project) == (0, 0):
            return project
    raise OSError(errno.ENOSPC, "no project ID is free")


def _join(directory: int, project: int) -> None:
    attributes = bytearray(_ATTRIBUTES.size)
    fcntl.ioctl(directory, _GET_ATTRIBUTES, attributes)
    flags, extent, extents, _, copies, rest = _ATTRIBUTES.unpack(attributes)
    attributes[:] = _ATTRIBUTES.pack(flags | _INHERIT, extent, extents, project, copies, rest)
    fcntl.ioctl(directory, _SET_ATTRIBUTES, attributes)


def _set_limits(descriptor: int, project: int, mask: int, *, blocks: int = 0, inodes: int = 0) -> None:
    """Set the limits selected by the mask; 0 means unlimited."""
    limits = _LIMITS.pack(_VERSION, _FLAGS_PROJECT, mask, project, blocks, 0, inodes, 0, 0, 0)
    _control(descriptor, _SET_LIMITS, project, ctypes.create_string_buffer(limits, _LIMITS.size))


def _control(descriptor: int, command: int, project: int, address: ctypes.Array[ctypes.c_char]) -> None:
    found = _libc.syscall(
        ctypes.c_long(_QUOTACTL_FD),
        ctypes.c_uint(descriptor),
        ctypes.c_uint(command << 8 | _PROJECT),
        ctypes.c_uint(project),
        address,
    )
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
