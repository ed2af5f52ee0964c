"""File on its way to its destination: every step that is between it and its name, each alone.

The order is what makes a destination absent, old or complete: check the target, open the source, make the temporary
file beside the target, write, see that the source did not change, set the metadata, sync, verify, rename, sync the
directory."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from typing import Final

from cluster.agent.files import READ_FLAGS, XATTR_CLASS, kind_of
from cluster.agent.transfer.errors import SourceChanged, TransferFailed, oddity
from cluster.agent.transfer.options import Options
from cluster.agent.transfer.status_table import Flag

PART_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FLAGS: Final = PART_FLAGS | os.O_CREAT | os.O_EXCL
MODE_BITS: Final = 0o777
"""What is copied of a mode: set-user-id, set-group-id and sticky are not."""

SETID_BITS: Final = stat.S_ISUID | stat.S_ISGID

_RENAME_NOREPLACE: Final = 1
_CANNOT: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP})
_NO_XATTR: Final = _CANNOT | {errno.E2BIG, errno.ERANGE, errno.ENODATA, errno.ENOSPC}
"""What file systems say of an attribute that they do not take; ENOSPC is ext4's word for one that is too long."""

_ACCESS_ACL: Final = "system.posix_acl_access"
_ACLS: Final = frozenset({_ACCESS_ACL, "system.posix_acl_default"})
"""Attributes that POSIX access control lists are read and set by (acl(5); the layout is Linux's, posix_acl_xattr.h)."""

_ACL_HEAD_BYTES: Final = 4
_ACL_ENTRY: Final = struct.Struct("<HHI")
"""Tag, permissions, id."""

_ACL_GROUP_OBJ: Final = 0x04

_NO_FLAGS: Final = Flag(0)
"""Made once: it is needed for every file."""

_XATTR_FLAGS: Final = (Flag.XATTRS, Flag.XATTRS_LOST)
_ACL_FLAGS: Final = (_NO_FLAGS, Flag.ACLS_LOST)
"""What is said of attributes that were copied, and of those that were not."""

_libc = ctypes.CDLL(None, use_errno=True)


def check_target(directory: int, name: bytes, shown: object, *, replace: bool) -> None:
    """See that a file may take the name; TransferFailed if something else has it, or anything if not `replace`."""
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not replace:
        raise taken(shown)
    if not stat.S_ISREG(mode):
        raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}; a file can only replace a regular file")


def taken(shown: object) -> TransferFailed:
    """Return what is said of a destination that may not be replaced."""
    return TransferFailed(
        f"{shown} exists already and is not to be replaced; remove it, stage to another name, or allow replacing"
    )


def open_source(directory: int, name: bytes, shown: object) -> tuple[int, os.stat_result]:
    """Return a descriptor of a regular file and its status; TransferFailed if it is something else, OSError."""
    # A look first: opening a device or a pipe can do something.
    why = oddity(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode, shown)
    if why is not None:
        raise TransferFailed(why)
    reading = os.open(name, READ_FLAGS, dir_fd=directory)
    try:
        status = os.fstat(reading)
        why = oddity(status.st_mode, shown)
        if why is not None:
            raise TransferFailed(why)
    except BaseException:
        os.close(reading)
        raise
    return reading, status


def check_unchanged(reading: int, status: os.stat_result) -> None:
    """Raise SourceChanged if the open source is not as it was."""
    after = os.fstat(reading)
    if (after.st_size, after.st_mtime_ns, after.st_ctime_ns) != (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ):
        raise SourceChanged


def create_part(directory: int, part: bytes, mode: int = 0o600) -> int:
    """Return a new, empty temporary file, open for reading and writing; what had its name is removed. OSError.

    It has what the process's mask leaves of `mode`: not more than its owner's while others could open it.
    """
    for _ in range(2):
        try:
            return os.open(part, _NEW_FLAGS, mode & MODE_BITS, dir_fd=directory)
        except FileExistsError:
            os.unlink(part, dir_fd=directory)
    return os.open(part, _NEW_FLAGS, mode & MODE_BITS, dir_fd=directory)


def open_part(directory: int, part: bytes, inode: int) -> int | None:
    """Return the temporary file that an earlier attempt made, None if it is gone or another."""
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
    options: Options,
    *,
    mode: int | None = None,
    acls: bool = False,
) -> Flag:
    """Give the copy the source's permissions, extended attributes and times, and say what was not copied. OSError.

    `mode` is what the copy has, if that is known; `acls`: access lists are copied, too.
    """
    flags = Flag.SETID_STRIPPED if status.st_mode & SETID_BITS else _NO_FLAGS
    wanted = status.st_mode & MODE_BITS
    names = xattrs_of(reading) if options.xattrs or acls or status.st_mode & stat.S_IRWXG else []
    if names:
        if options.xattrs:
            flags |= copy_xattrs(reading, writing, names)
        if not acls:
            wanted = mode_alone(reading, names, wanted)
    # After the attributes, which need the right to write.
    if mode is None or stat.S_IMODE(mode) != wanted:
        os.fchmod(writing, wanted)
    if names:
        # After the mode, which would say what a list grants at most.
        flags |= copy_acls(reading, writing, names, asked=acls)
    os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
    return flags


def xattrs_of(reading: int) -> list[str]:
    """Return the names of all extended attributes of an open file or directory. OSError."""
    try:
        return os.listxattr(reading)
    except OSError as error:
        if error.errno in _CANNOT:
            return []
        raise


def copy_xattrs(reading: int, writing: int, names: Sequence[str]) -> Flag:
    """Give the copy those of the attributes that are of the class `user.`, and say what there was and what was not
    copied. OSError.
    """
    return _copied(reading, writing, [name for name in names if name.startswith(XATTR_CLASS)], _XATTR_FLAGS)


def copy_acls(reading: int, writing: int, names: Sequence[str], *, asked: bool) -> Flag:
    """Give the copy those of the attributes that are access control lists, if it is `asked` for, and say if there are
    any that it does not have. OSError.
    """
    acls = [name for name in names if name in _ACLS]
    if acls and not asked:
        return Flag.ACLS_LOST
    return _copied(reading, writing, acls, _ACL_FLAGS)


def mode_alone(reading: int, names: Sequence[str], mode: int) -> int:
    """Return what a mode means without the access list that goes with it: the bits of its group are what the list
    grants anybody at most, and its own group may have less. OSError.
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


def _copied(reading: int, writing: int, names: Sequence[str], flags: tuple[Flag, Flag]) -> Flag:
    found = _NO_FLAGS
    done, lost = flags
    for name in names:
        try:
            os.setxattr(writing, name, os.getxattr(reading, name))
            found |= done
        except OSError as error:
            # A file system without them, or with less room for them, still takes the contents.
            if error.errno not in _NO_XATTR:
                raise
            found |= lost
    return found


def publish(staging: int, part: bytes, directory: int, name: bytes, shown: object, *, replace: bool) -> None:
    """Give a temporary file that is durable its name: at once or not at all.

    TransferFailed if the name is taken and not to be replaced, or lies on another file system; OSError.
    """
    try:
        if replace:
            os.rename(part, name, src_dir_fd=staging, dst_dir_fd=directory)
        else:
            _rename_without_replacing(staging, part, directory, name)
    except FileExistsError:
        # Not `from error`: it is no trouble that goes away by itself.
        raise taken(shown) from None
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise TransferFailed(
            f"{shown} lies on another file system than the directory that the transfer goes to; "
            "name a destination on that file system in a transfer of its own"
        ) from None


def _rename_without_replacing(staging: int, part: bytes, directory: int, name: bytes) -> None:
    if _libc.renameat2(staging, part, directory, name, _RENAME_NOREPLACE) == 0:
        return
    number = ctypes.get_errno()
    if number not in _CANNOT:
        raise OSError(number, os.strerror(number), os.fsdecode(name))
    # A file system that does not know the flag: a second name is not given where there is one already either.
    os.link(part, name, src_dir_fd=staging, dst_dir_fd=directory, follow_symlinks=False)
    os.unlink(part, dir_fd=staging)
