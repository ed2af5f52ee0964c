"""Project quotas: what a directory tree may take of its file system, kept by the kernel, which refuses what is more.

xfs and ext4 have them where they are mounted with `prjquota` (and ext4 was made with `-O quota,project`). Every file
that is made in a directory with a project id gets that id; blocks and inodes are counted per id. Setting limits needs
root. Sources: quotactl(2) and quotactl_fd(2), <linux/dqblk_xfs.h>, <linux/fs.h>: the calls of xfs, which ext4 knows
too."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import struct
import sys
from typing import Final, NamedTuple

_QUOTACTL_FD: Final = 443
"""Number of the call on all architectures, since Linux 5.14."""

_PROJECT: Final = 2
_GET_QUOTA: Final = (ord("X") << 8) + 3
_SET_LIMITS: Final = (ord("X") << 8) + 4
_GET_STATE: Final = (ord("X") << 8) + 5
_ENFORCED: Final = 1 << 5
"""FS_QUOTA_PDQ_ENFD in what _GET_STATE gives."""

_STATE_BYTES: Final = 1024
_LIMITS: Final = struct.Struct("=bbHIQQQQQQ56x")
"""struct fs_disk_quota: version, flags, mask, id; blocks hard and soft, inodes hard and soft, blocks and inodes held,
..."""

_VERSION: Final = 1
_FLAGS_PROJECT: Final = 2
_INODES_HARD: Final = 1 << 1
_BLOCKS_HARD: Final = 1 << 3
_BLOCK_BYTES: Final = 512

_GET_ATTRIBUTES: Final = 0x801C581F
_SET_ATTRIBUTES: Final = 0x401C5820
_ATTRIBUTES: Final = struct.Struct("=IIIII8s")
"""struct fsxattr: flags, extent size, extents, project id, extent size of copies."""
_INHERIT: Final = 0x200

_LEAST_ID: Final = 1 << 30
"""Ids below are left to a site's own /etc/projid, count."""

_PROBES_MAX: Final = 256
"""Ids that are tried until one is free, count: as many buffers of other agents would have to stand in a row."""

_libc = ctypes.CDLL(None, use_errno=True)


class Held(NamedTuple):
    """What a project has."""

    size_bytes: int
    inodes: int


def is_enforced(descriptor: int) -> bool:
    """Return whether the file system of an open directory keeps project quotas, and this process may set them."""
    state = ctypes.create_string_buffer(bytes([_VERSION]), _STATE_BYTES)
    try:
        _control(descriptor, _GET_STATE, 0, state)
        if not int.from_bytes(state.raw[2:4], sys.byteorder) & _ENFORCED:
            return False
        _set(descriptor, _LEAST_ID, 0)
    except OSError:
        return False
    return True


def hold(directory: int, seed: str, most_bytes: int) -> None:
    """Have an open and empty directory take at most so many bytes of blocks, with all that will be in it. OSError.

    One that has a project of ours keeps it. `seed` tells it from others: its project id follows from it.
    """
    project = project_of(directory)
    if project < _LEAST_ID:
        project = _free_id(directory, seed)
        _join(directory, project)
    _set(directory, project, _BLOCKS_HARD, blocks=most_bytes // _BLOCK_BYTES)


def hold_inodes(directory: int, more: int) -> None:
    """Have an open directory with a project of ours take at most so many inodes more than it has. OSError."""
    project = project_of(directory)
    if project >= _LEAST_ID:
        _set(directory, project, _INODES_HARD, inodes=held(directory, project).inodes + more)


def project_of(directory: int) -> int:
    """Return the project id of an open directory, 0 if it has none, or if its file system does not know any."""
    attributes = bytearray(_ATTRIBUTES.size)
    try:
        fcntl.ioctl(directory, _GET_ATTRIBUTES, attributes)
    except OSError:
        return 0
    return int(_ATTRIBUTES.unpack(attributes)[3])


def held(descriptor: int, project: int) -> Held:
    """Return what a project has on the file system of an open file. OSError."""
    found = ctypes.create_string_buffer(_LIMITS.size)
    try:
        _control(descriptor, _GET_QUOTA, project, found)
    except OSError as error:
        # xfs knows nothing of an id that nobody has.
        if error.errno == errno.ENOENT:
            return Held(0, 0)
        raise
    fields = _LIMITS.unpack(found.raw)
    return Held(fields[8] * _BLOCK_BYTES, fields[9])


def release(descriptor: int, project: int) -> None:
    """Take the limits of a project of ours away, on the file system of an open file: its directory is gone. OSError."""
    if project >= _LEAST_ID:
        _set(descriptor, project, _BLOCKS_HARD | _INODES_HARD)


def _free_id(directory: int, seed: str) -> int:
    first = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big") % _LEAST_ID
    for step in range(_PROBES_MAX):
        project = _LEAST_ID + (first + step) % _LEAST_ID
        if held(directory, project) == (0, 0):
            return project
    raise OSError(errno.ENOSPC, "no project id is free")


def _join(directory: int, project: int) -> None:
    attributes = bytearray(_ATTRIBUTES.size)
    fcntl.ioctl(directory, _GET_ATTRIBUTES, attributes)
    flags, extent, extents, _, copies, rest = _ATTRIBUTES.unpack(attributes)
    attributes[:] = _ATTRIBUTES.pack(flags | _INHERIT, extent, extents, project, copies, rest)
    fcntl.ioctl(directory, _SET_ATTRIBUTES, attributes)


def _set(descriptor: int, project: int, mask: int, *, blocks: int = 0, inodes: int = 0) -> None:
    """Set the limits that the mask names; 0 is none."""
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
