"""Interface of quota and layout adapters: what Forebay requires of a filesystem to limit and place a buffer.

An adapter works on open directories, so that no component of a path can be replaced by a user. The tools of some
filesystems accept paths only. They receive the path of the descriptor, all components of which belong to the agent.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar, Final, NamedTuple

NOT_INSTALLED: Final = "not_installed"
UNTRUSTED: Final = "untrusted"
TIMED_OUT: Final = "timed_out"
EXIT_CODE: Final = "exit_code"
BAD_OUTPUT: Final = "bad_output"
NOT_APPLIED: Final = "not_applied"
UNUSABLE: Final = "unusable"
"""Codes of AdapterFailed: the tool is missing, may be changed by others, hung, failed, or printed something else than
documented; the filesystem does not report the limit that was set; or the filesystem cannot be used with the adapter.
"""

_PRIVATE: Final = 0o700


class AdapterFailed(Exception):
    """A quota or a layout cannot be applied, read or removed; the message names the tool and the remedy."""

    def __init__(self, sentence: str, code: str) -> None:
        """Describe the failure; `code` is one of the constants of this module."""
        super().__init__(sentence)
        self.code = code


class BufferLimit(NamedTuple):
    """Limit of a buffer. None keeps what is set; 0 means unlimited."""

    size_bytes: int | None = None
    inodes: int | None = None


class QuotaUsage(NamedTuple):
    """Space and inodes used below a directory."""

    size_bytes: int
    inodes: int


class Stripes(NamedTuple):
    """Placement of new files below a directory. 0 and "" keep the filesystem's default."""

    targets: int = 0
    """Number of targets, or objects, over which a file is distributed; -1 means all."""
    size_bytes: int = 0
    """Bytes on one target before the next is used."""
    pool: str = ""
    """Name of a storage pool of the filesystem."""


class FilesystemAdapter(ABC):
    """Part that all adapters have."""

    word: ClassVar[str]
    """Value of `quota` or `layout` in the configuration."""

    def check(self, parent: int) -> str:
        """Return the reason why the adapter cannot be used for buffers in an open directory, or ""."""
        try:
            return self._find_fault(parent)
        except AdapterFailed as error:
            return str(error)

    @abstractmethod
    def _find_fault(self, parent: int) -> str:
        """Return the reason why the adapter cannot be used, or "".

        Raises:
            AdapterFailed: The adapter cannot be used; the message is the reason.
        """


class QuotaAdapter(FilesystemAdapter):
    """Quotas of one kind of filesystem."""

    removes_directory: ClassVar[bool] = False
    """True if `release` removes the buffer's directory, which rmdir(2) cannot."""

    keeps_group: ClassVar[bool] = False
    """True if the group of a buffer's directory carries the quota, so that its user's group cannot own it."""

    def create(self, parent: int, name: str) -> None:
        """Create an empty, private directory for a buffer in an open directory.

        Raises:
            AdapterFailed: The filesystem's tool failed.
            FileExistsError: The name exists.
            OSError: The directory cannot be created.
        """
        os.mkdir(name, _PRIVATE, dir_fd=parent)

    @abstractmethod
    def apply(self, directory: int, seed: str, limit: BufferLimit) -> None:
        """Limit an open directory. `seed` identifies the buffer on every machine. Idempotent.

        Raises:
            AdapterFailed: The limit cannot be set.
            OSError: The limit cannot be set.
        """

    @abstractmethod
    def usage(self, directory: int) -> QuotaUsage:
        """Return the usage that the filesystem counts below an open directory.

        Raises:
            AdapterFailed: The usage cannot be read.
            OSError: The usage cannot be read.
        """

    def find(self, parent: int, name: str) -> str:
        """Return the handle of a buffer's quota in an open directory, for `release`; "" if there is none.

        Raises:
            AdapterFailed: The quota cannot be read.
            OSError: The directory cannot be read.
        """
        return ""

    def release(self, parent: int, name: str, handle: str) -> None:
        """Remove the quota of a buffer whose content, and directory unless `removes_directory`, was removed.

        Raises:
            AdapterFailed: The quota cannot be removed.
            OSError: The quota cannot be removed.
        """
        return


class LayoutAdapter(FilesystemAdapter):
    """Placement of files on one kind of filesystem."""

    @abstractmethod
    def apply(self, directory: int, stripes: Stripes) -> None:
        """Set the layout of all files that will be created below an open directory. Idempotent.

        Raises:
            AdapterFailed: The layout cannot be set.
            OSError: The layout cannot be set.
        """


def path_of(descriptor: int) -> str:
    """Return the absolute path of an open directory, for tools that accept no descriptor.

    Raises:
        OSError: The directory has been removed.
    """
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    same, other = os.fstat(descriptor), os.stat(path, follow_symlinks=False)
    if (same.st_dev, same.st_ino) != (other.st_dev, other.st_ino):
        raise FileNotFoundError(path)
    return path


def mount_point_of(path: str) -> str:
    """Return the mount point of the filesystem that holds an absolute path."""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path
