"""Steps of copying a single file to its destination.

Their order leaves every destination absent, old or complete: check the target, open the source, create the temporary
file, write, check that the source is unchanged, set metadata, sync, verify, rename, sync the directory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from typing import Final

from forebay.cluster.agent.files import READ_FLAGS, XATTR_CLASS, kind_of
from forebay.cluster.agent.transfer.errors import SourceChanged, TransferFailed, special_file_reason
from forebay.cluster.agent.transfer.options import TransferOptions
from forebay.cluster.agent.transfer.status_table import Flag

PART_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FLAGS: Final = PART_FLAGS | os.O_CREAT | os.O_EXCL
MODE_BITS: Final = 0o777
"""Mode bits that are copied; set-user-ID, set-group-ID and sticky are not."""

SETID_BITS: Final = stat.S_ISUID | stat.S_ISGID

_RENAME_NOREPLACE: Final = 1
_CANNOT: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP})
_NO_XATTR: Final = _CANNOT | {errno.E2BIG, errno.ERANGE, errno.ENODATA, errno.ENOSPC}
"""Errors of filesystems that do not accept an attribute; ext4 reports one that is too long as ENOSPC."""

_ACCESS_ACL: Final = "system.posix_acl_access"
_ACLS: Final = frozenset({_ACCESS_ACL, "system.posix_acl_default"})
"""Attributes that hold POSIX access control lists (acl(5); layout in Linux's posix_acl_xattr.h)."""

_ACL_HEAD_BYTES: Final = 4
_ACL_ENTRY: Final = struct.Struct("<HHI")
"""Tag, permissions, ID."""

_ACL_GROUP_OBJ: Final = 0x04

_NO_FLAGS: Final = Flag(0)
"""Created once, because every file needs it."""

_XATTR_FLAGS: Final = (Flag.XATTRS, Flag.XATTRS_LOST)
_ACL_FLAGS: Final = (_NO_FLAGS, Flag.ACLS_LOST)
"""Flags for copied attributes and for lost ones."""

_libc = ctypes.CDLL(None, use_errno=True)


def check_target(directory: int, name: bytes, shown: object, *, replace: bool) -> None:
    """Check that a file may be put at the target.

    Raises:
        TransferFailed: The name is taken by something that may not be replaced.
    """
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not replace:
        raise target_exists_error(shown)
    if not stat.S_ISREG(mode):
        raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}; a file can only replace a regular file")


def target_exists_error(shown: object) -> TransferFailed:
    """Return the error for a destination that may not be replaced."""
    return TransferFailed(
        f"{shown} exists and may not be replaced; remove it, stage to another name, or allow replacing"
    )


def open_source(directory: int, name: bytes, shown: object) -> tuple[int, os.stat_result]:
    """Open a regular file; return its descriptor and status.

    Raises:
        TransferFailed: It is not a regular file.
        OSError: The file cannot be opened.
    """
    # Check the type first: opening a device or a pipe can have side effects.
    why = special_file_reason(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode, shown)
    if why is not None:
        raise TransferFailed(why)
    reading = os.open(name, READ_FLAGS, dir_fd=directory)
    try:
        status = os.fstat(reading)
        why = special_file_reason(status.st_mode, shown)
        if why is not None:
            raise TransferFailed(why)
    except BaseException:
        os.close(reading)
        raise
    return reading, status


def check_unchanged(reading: int, status: os.stat_result) -> None:
    """Raise SourceChanged if the open source has changed since `status`."""
    after = os.fstat(reading)
    if (after.st_size, after.st_mtime_ns, after.st_ctime_ns) != (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ):
        raise SourceChanged


def create_part(directory: int, part: bytes, mode: int = 0o600) -> int:
    """Create an empty temporary file for reading and writing, replacing one of the same name.

    Its mode is `mode` restricted by the umask, and never grants others more than its owner has.

    Raises:
        OSError: The file cannot be created.
    """
    for _ in range(2):
        try:
            return os.open(part, _NEW_FLAGS, mode & MODE_BITS, dir_fd=directory)
        except FileExistsError:
            os.unlink(part, dir_fd=directory)
    return os.open(part, _NEW_FLAGS, mode & MODE_BITS, dir_fd=directory)


def open_part(directory: int, part: bytes, inode: int) -> int | None:
    """Return the temporary file of an earlier attempt, or None if it is gone or a different one."""
    try:
        writing = os.open(part, PART_FLAGS | os.O_NONBLOCK, dir_fd=directory)
    except OSError:
        return None
    status = os.fstat(writing)
    if status.st_ino == inode and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return writing
    os.close(writing)
    return None


def set_metadata(
    reading: int,
    writing: int,
    status: os.stat_result,
    options: TransferOptions,
    *,
    mode: int | None = None,
    acls: bool = False,
) -> Flag:
    """Copy permissions, extended attributes and times; return flags for whatever was lost.

    `mode` is the copy's current mode, if known; `acls` copies access lists too.

    Raises:
        OSError: The metadata cannot be set.
    """
    flags = Flag.SETID_STRIPPED if status.st_mode & SETID_BITS else _NO_FLAGS
    wanted = status.st_mode & MODE_BITS
    names = xattrs_of(reading) if options.xattrs or acls or status.st_mode & stat.S_IRWXG else []
    if names:
        if options.xattrs:
            flags |= copy_xattrs(reading, writing, names)
        if not acls:
            wanted = mode_alone(reading, names, wanted)
    # After the attributes, which require write permission.
    if mode is None or stat.S_IMODE(mode) != wanted:
        os.fchmod(writing, wanted)
    if names:
        # After the mode, which would limit the permissions in the list.
        flags |= copy_acls(reading, writing, names, asked=acls)
    os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
    return flags


def xattrs_of(reading: int) -> list[str]:
    """Return the names of all extended attributes of an open file or directory.

    Raises:
        OSError: The attributes cannot be read.
    """
    try:
        return os.listxattr(reading)
    except OSError as error:
        if error.errno in _CANNOT:
            return []
        raise


def copy_xattrs(reading: int, writing: int, names: Sequence[str]) -> Flag:
    """Copy the attributes of class `user.`; return flags for copied and lost ones.

    Raises:
        OSError: The attributes cannot be copied.
    """
    return _copy_attributes(reading, writing, [name for name in names if name.startswith(XATTR_CLASS)], _XATTR_FLAGS)


def copy_acls(reading: int, writing: int, names: Sequence[str], *, asked: bool) -> Flag:
    """Copy the access control lists if `asked`; return a flag if any is lost.

    Raises:
        OSError: The attributes cannot be copied.
    """
    acls = [name for name in names if name in _ACLS]
    if acls and not asked:
        return Flag.ACLS_LOST
    return _copy_attributes(reading, writing, acls, _ACL_FLAGS)


def mode_alone(reading: int, names: Sequence[str], mode: int) -> int:
    """Return a mode without its access list. With a list, the group bits are an upper limit, and the group may have
    less.

    Raises:
        OSError: The list cannot be read.
    """
    if _ACCESS_ACL not in names:
        return mode
    data = os.getxattr(reading, _ACCESS_ACL)
    granted = 0
    for at in range(_ACL_HEAD_BYTES, len(data) - _ACL_ENTRY.size + 1, _ACL_ENTRY.size):
        tag, permissions, _ = _ACL_ENTRY.unpack_from(data, at)
        if tag == _ACL_GROUP_OBJ:
            granted = permissions & 0o7
    return mode & ~stat.S_IRWXG | mode & granted << 3


def _copy_attributes(reading: int, writing: int, names: Sequence[str], flags: tuple[Flag, Flag]) -> Flag:
    found = _NO_FLAGS
    done, lost = flags
    for name in names:
        try:
            os.setxattr(writing, name, os.getxattr(reading, name))
            found |= done
        except OSError as error:
            # A filesystem without attributes, or with less space for them, still takes the content.
            if error.errno not in _NO_XATTR:
                raise
            found |= lost
    return found


def publish(staging: int, part: bytes, directory: int, name: bytes, shown: object, *, replace: bool) -> None:
    """Rename a durable temporary file to its final name atomically.

    Raises:
        TransferFailed: The name is taken and may not be replaced, or is on another filesystem.
        OSError: The file cannot be renamed.
    """
    try:
        if replace:
            os.rename(part, name, src_dir_fd=staging, dst_dir_fd=directory)
        else:
            _rename_without_replacing(staging, part, directory, name)
    except FileExistsError:
        # No cause: the problem does not resolve itself.
        raise target_exists_error(shown) from None
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise TransferFailed(
            f"{shown} is not on the filesystem of the transfer's destination directory; "
            "name a destination on that filesystem in a separate transfer"
        ) from None


def _rename_without_replacing(staging: int, part: bytes, directory: int, name: bytes) -> None:
    if _libc.renameat2(staging, part, directory, name, _RENAME_NOREPLACE) == 0:
        return
    number = ctypes.get_errno()
    if number not in _CANNOT:
        raise OSError(number, os.strerror(number), os.fsdecode(name))
    # The filesystem does not support the flag; a hard link does not replace an existing name either.
    os.link(part, name, src_dir_fd=staging, dst_dir_fd=directory, follow_symlinks=False)
    os.unlink(part, dir_fd=staging)
