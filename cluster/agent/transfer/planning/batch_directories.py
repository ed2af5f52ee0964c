"""Batch staging directory: what a group of small files is written in before they get their names.

All helpers of a transfer have one staging directory, and a directory takes one name at a time. So each group has its
own in there, which only its helper writes to. One that has all files of a directory that this transfer has made, and
that is still empty, takes that directory's place by one rename, instead of one for each file.

The next attempt does not go on with what is in a batch directory: a small file is copied again."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

from cluster.agent.files import RemovalFailed, empty_directory, remove_tree
from cluster.agent.transfer.planning.fence import BATCH_SUFFIX

BATCH_DIRECTORY_FILES_MIN: Final = 16
"""Files of one directory from which on they have a batch directory of their own, count: it costs about two files."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PRIVATE: Final = 0o700

_NOT_AT_ONCE: Final = frozenset(
    {
        errno.ENOTEMPTY,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EXDEV,
        errno.EBUSY,
        errno.EPERM,
        errno.EACCES,
        errno.EINVAL,
        errno.EMLINK,
    }
)
"""What says that a directory does not take the place of another, while its files may still get their names."""


class BatchDirectory:
    """Batch directory, while it is used. `staging` stays the caller's. Every method may raise OSError."""

    def __init__(self, staging: int, tag: str, item: int, first: int, *, whole: bool) -> None:
        """Make it, empty: `first` is the index of the first record of the group.

        `whole`: it gets all files of a directory, under their own names.
        """
        self._staging = staging
        self._name = os.fsencode(f"{tag}.{item}.{first}{BATCH_SUFFIX}")
        self._descriptor = -1
        self.whole = whole
        self.files = 0
        try:
            os.mkdir(self._name, _PRIVATE, dir_fd=staging)
        except FileExistsError:
            # This same attempt was begun before.
            empty_directory(self.opened(), shown=os.fsdecode(self._name))

    def opened(self) -> int:
        """Return a descriptor of it, which is closed by `close`."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._name, _DIRECTORY, dir_fd=self._staging)
        return self._descriptor

    def close(self) -> None:
        """Close it, until it is asked for again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def takes_place(self, above: int, name: bytes, replaced: int) -> bool:
        """Give it the place of an empty directory, which `replaced` is open of: at once or not at all.

        False if that is not possible, or would change more than what is in there: then files get their names one by
        one.
        """
        if _likeness(self.opened()) != _likeness(replaced):
            return False
        try:
            os.rename(self._name, name, src_dir_fd=self._staging, dst_dir_fd=above)
        except OSError as error:
            if error.errno not in _NOT_AT_ONCE:
                raise
            return False
        self.close()
        return True

    def remove(self) -> None:
        """Remove it; nothing is on it any more."""
        self.close()
        os.rmdir(self._name, dir_fd=self._staging)

    def discard(self) -> None:
        """Remove it, and what is on it, as far as that goes: the rest is swept."""
        self.close()
        _discard(self._staging, os.fsdecode(self._name))


def _likeness(directory: int) -> tuple[object, ...]:
    """Return what a directory has besides what is in it: owner, permissions, and access lists that it passes on."""
    status = os.fstat(directory)
    try:
        attributes = {name: os.getxattr(directory, name) for name in os.listxattr(directory)}
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS):
            raise
        attributes = {}
    return status.st_dev, status.st_uid, status.st_gid, status.st_mode, attributes


def discard_all(staging: int) -> None:
    """Remove the batch directories in a staging directory that nobody writes to any more, as far as that goes."""
    with contextlib.suppress(OSError):
        for name in os.listdir(staging):
            if name.endswith(BATCH_SUFFIX):
                _discard(staging, name)


def _discard(staging: int, name: str) -> None:
    with contextlib.suppress(OSError, RemovalFailed):
        remove_tree(staging, name, shown=name)
