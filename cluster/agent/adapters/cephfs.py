"""Adapter `cephfs`: quotas and layouts of directories, set by extended attributes.

The client must be allowed to set them: its capabilities need the flag `p` (`ceph fs authorize FS client.NAME / rwp`).
Clients stop writers themselves, some seconds after a limit is reached, so a changed client is not limited.

Sources: docs.ceph.com, "CephFS Quotas" (`ceph.quota.max_bytes`, `ceph.quota.max_files`, 0 removes a quota), "File
Layouts" (`ceph.dir.layout.*`; a stripe unit must divide the object size, 4 MiB by default), and "CephFS Dynamic
Metadata", where `ceph.dir.rbytes` and `ceph.dir.rentries` are recursive sums.
"""

from __future__ import annotations

import errno
import os
from typing import ClassVar, Final

from forebay.cluster.agent.adapters.interface import (
    BAD_OUTPUT,
    NOT_APPLIED,
    UNUSABLE,
    AdapterFailed,
    BufferLimit,
    LayoutAdapter,
    QuotaAdapter,
    QuotaUsage,
    Stripes,
)

MAX_BYTES: Final = "ceph.quota.max_bytes"
MAX_FILES: Final = "ceph.quota.max_files"
USED_BYTES: Final = "ceph.dir.rbytes"
USED_ENTRIES: Final = "ceph.dir.rentries"
LAYOUT: Final = "ceph.dir.layout"

OBJECT_BYTES: Final = 4 * 1024**2
"""Default object size, bytes."""

_NOT_PERMITTED: Final = frozenset({errno.EPERM, errno.EACCES})


class CephfsAdapter(QuotaAdapter):
    """Each buffer is a directory with a quota."""

    word: ClassVar[str] = "cephfs"

    def _find_fault(self, parent: int) -> str:
        """Return the reason why directories cannot be limited, or ""."""
        try:
            _number(parent, USED_BYTES)
        except (OSError, AdapterFailed) as error:
            return f"it has no attribute {USED_BYTES} ({error}); mount CephFS there"
        return ""

    def apply(self, directory: int, seed: str, limit: BufferLimit) -> None:
        """Limit a directory, and compare the limit that the filesystem then reports.

        Raises:
            AdapterFailed: The client may not set quotas, or another limit is reported.
            OSError: The attribute cannot be set.
        """
        for name, wanted in ((MAX_BYTES, limit.size_bytes), (MAX_FILES, limit.inodes)):
            if wanted is None:
                continue
            _set(directory, name, str(wanted))
            found = _number(directory, name)
            if found != wanted:
                raise AdapterFailed(
                    f"{name} is {found} after {wanted} was set; update the Ceph client of this machine", NOT_APPLIED
                )

    def usage(self, directory: int) -> QuotaUsage:
        """Return the recursive sums of a directory, which may be some seconds old.

        Raises:
            AdapterFailed: An attribute is not a number.
            OSError: An attribute cannot be read.
        """
        return QuotaUsage(_number(directory, USED_BYTES), _number(directory, USED_ENTRIES))


class CephfsLayout(LayoutAdapter):
    """Stripes over objects."""

    word: ClassVar[str] = "cephfs"

    def _find_fault(self, parent: int) -> str:
        """Return the reason why layouts cannot be set, or ""."""
        return CephfsAdapter().check(parent)

    def apply(self, directory: int, stripes: Stripes) -> None:
        """Set the layout of new files.

        Raises:
            AdapterFailed: The layout is impossible on CephFS, or the client may not set it.
            OSError: An attribute cannot be set.
        """
        if stripes.targets < 0:
            raise AdapterFailed("CephFS cannot stripe over all objects; set a stripe count above 0", UNUSABLE)
        if stripes.pool:
            _set(directory, f"{LAYOUT}.pool", stripes.pool)
        if size := stripes.size_bytes:
            if OBJECT_BYTES % size and size % OBJECT_BYTES:
                raise AdapterFailed(
                    f"a stripe size of {size} bytes does not divide CephFS' objects of 4 MiB, nor is it a multiple; "
                    "set another stripe size",
                    UNUSABLE,
                )
            # The unit must divide the object size at every step.
            if size > OBJECT_BYTES:
                _set(directory, f"{LAYOUT}.object_size", str(size))
            _set(directory, f"{LAYOUT}.stripe_unit", str(size))
        if stripes.targets:
            _set(directory, f"{LAYOUT}.stripe_count", str(stripes.targets))


def _set(directory: int, name: str, value: str) -> None:
    try:
        os.setxattr(directory, name, value.encode())
    except OSError as error:
        if error.errno in _NOT_PERMITTED:
            raise AdapterFailed(
                f"{name} cannot be set: {error.strerror}; give this machine's client the capability `rwp` "
                "(ceph fs authorize)",
                UNUSABLE,
            ) from error
        raise


def _number(directory: int, name: str) -> int:
    """Return an attribute; a limit that is not set is 0."""
    try:
        value = os.getxattr(directory, name).decode("ascii", "replace").strip("\0")
    except OSError as error:
        if error.errno == errno.ENODATA and name in (MAX_BYTES, MAX_FILES):
            return 0
        raise
    if not value.isdecimal():
        raise AdapterFailed(f"{name} is {value[:40]!r}, not a number; update the Ceph client", BAD_OUTPUT)
    return int(value)
