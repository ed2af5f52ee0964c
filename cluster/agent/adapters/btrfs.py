"""Adapter `btrfs`: subvolumes with limits (`subvolumes`)."""

from __future__ import annotations

import contextlib
import os
from typing import ClassVar, Final

from forebay.cluster.agent.adapters import subvolumes
from forebay.cluster.agent.adapters.interface import BufferLimit, QuotaAdapter, QuotaUsage
from forebay.cluster.system import closing, open_directory

NAMES_BYTES: Final = 8 * 1024**2
"""Allowance for metadata in a subvolume: btrfs counts names and attributes, about 800 bytes for each of the 10,000
files any buffer may hold.
"""

_PRIVATE: Final = 0o700


class BtrfsAdapter(QuotaAdapter):
    """Each buffer is a subvolume. btrfs has no limit on inodes."""

    word: ClassVar[str] = "btrfs"

    def _find_fault(self, parent: int) -> str:
        """Return the reason why subvolumes cannot be limited, or ""."""
        return subvolumes.why_unlimited(parent)

    def create(self, parent: int, name: str) -> None:
        """Create a subvolume.

        Raises:
            FileExistsError: The name exists.
            OSError: The subvolume cannot be created.
        """
        subvolumes.create(parent, name)
        # Other users could look into it until now, but it was empty.
        os.chmod(name, _PRIVATE, dir_fd=parent)

    def apply(self, directory: int, seed: str, limit: BufferLimit) -> None:
        """Limit a subvolume. A directory created under another mechanism is left alone.

        Raises:
            OSError: The limit cannot be set.
        """
        if limit.size_bytes is not None and subvolumes.is_subvolume(directory):
            subvolumes.limit(directory, limit.size_bytes + NAMES_BYTES)

    def usage(self, directory: int) -> QuotaUsage:
        """Return the usage of the subvolume's quota group, without inodes.

        Raises:
            OSError: The usage cannot be read.
        """
        return QuotaUsage(subvolumes.referenced_bytes(directory), 0)

    def find(self, parent: int, name: str) -> str:
        """Return the ID of the subvolume's quota group, or ""."""
        with contextlib.suppress(OSError), closing(open_directory(name, dir_fd=parent)) as directory:
            if subvolumes.is_subvolume(directory):
                return str(subvolumes.group_of(directory))
        return ""

    def release(self, parent: int, name: str, handle: str) -> None:
        """Remove the quota group of a deleted subvolume."""
        subvolumes.release(parent, int(handle))
