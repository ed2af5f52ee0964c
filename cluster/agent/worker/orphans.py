"""Record of directories in which a killed transfer may leave temporary files, so that they are removed later.

The file `leftovers/JOB` exists while a transfer may have left files at a destination. Its JSON line names the user and
the directories with a staging directory (transfer/fence), and is durable before the worker starts. Files are removed as
the job's user and only beneath the order's roots: the file is trusted no further than the order.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from typing import Final

import msgspec

from forebay.cluster.agent.files import (
    FileIdentity,
    FileRefused,
    PathRefused,
    ReserveFiles,
    Target,
    inside_target,
    open_target,
    outside_target,
    read_bounded,
    variable_of,
)
from forebay.cluster.agent.transfer import Claimant, fence
from forebay.cluster.system import names_in
from forebay.replica.model import NO_SPECIAL_TRANSFERS, PERSISTENT_PREFIX, Order, OrderFilesystem, TransferKind

SWEEP: Final = "sweep"
"""Stage of a worker that removes temporary files; the controller never orders it."""

ANY_ATTEMPT: Final = 2**63 - 1
"""Attempt number newer than any other: when a job is swept, all of its attempts have ended."""


class Orphans(msgspec.Struct, frozen=True, kw_only=True):
    """User, roots and directories of a transfer's temporary files."""

    user: str
    roots: tuple[str, ...]
    directories: tuple[str, ...] = ()
    """Absolute paths, or paths such as `$DW_PERSISTENT_STRIPED_lake/a`."""
    uses: tuple[str, ...] = ()
    """Persistent buffers that the paths may refer to."""
    placed: tuple[tuple[str, OrderFilesystem], ...] = ()
    """Locations of the persistent buffers on a shared filesystem."""

    def covers(self, other: Orphans) -> bool:
        """Return whether this record includes all of `other`."""
        same = (self.user, self.roots, self.uses) == (other.user, other.roots, other.uses)
        return same and self.placed == other.placed and set(self.directories) >= set(other.directories)


_ORPHANS: Final = msgspec.json.Decoder(Orphans)


def orphan_tag(job: int, storage_id: str) -> str:
    """Return the prefix of a job's temporary names; `storage_id` distinguishes nodes and clusters."""
    return f".forebay-{job}-{storage_id[:8]}"


def expected_orphans(order: Order) -> Orphans:
    """Return the directories outside the job's own buffer in which the order's transfer may leave files.

    Teardown removes the job's own buffer anyway.
    """
    special = order.special or NO_SPECIAL_TRANSFERS
    outgoing = order.stage == "stage_out"
    found: dict[str, None] = {}
    for transfer in order.transfers:
        path = transfer.outside if outgoing else transfer.inside
        if transfer.pattern or transfer.kind is not TransferKind.FILE:
            found[path] = None
        if not transfer.pattern and transfer.kind is not TransferKind.DIRECTORY:
            found[posixpath.dirname(path.rstrip("/"))] = None
    for listed in special.lists:
        found[listed.destination] = None
    if not outgoing:
        found = {path: None for path in found if variable_of(path).startswith(PERSISTENT_PREFIX)}
    return Orphans(
        user=order.user, roots=order.roots, directories=tuple(found), uses=order.uses, placed=order.persistent
    )


def record_orphans(orphans: int, reserve_files: ReserveFiles, job: int, left: Orphans) -> None:
    """Create the job's record in an open directory.

    Raises:
        OSError: The disk is full or fails.
    """
    reserve_files.write(orphans, str(job), msgspec.json.encode(left) + b"\n")


def forget_orphans(orphans: int, reserve_files: ReserveFiles, job: int) -> None:
    """Delete the job's record after its temporary files have been removed."""
    reserve_files.drop(orphans, str(job))


def jobs_with_orphans(orphans: int) -> list[int]:
    """Return the jobs with a record."""
    return sorted(int(name) for name in names_in(orphans) if name.isdecimal())


def read_orphans(orphans: int, job: int) -> Orphans | None:
    """Return the job's record, or None if there is none.

    Raises:
        FileRefused: The file is damaged.
    """
    data = read_bounded(orphans, str(job))
    if data is None:
        return None
    try:
        return _ORPHANS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileRefused(
            f"leftovers/{job} is damaged ({error}): remove .forebay-{job}-*, .forebay-*-{job} and "
            f".forebay-*-{job}-* in the destinations of the job, and then this file"
        ) from error


def sweep_orphans(claimant: Claimant, left: Orphans, persistent: Mapping[str, str], home: FileIdentity) -> int:
    """Remove a job's temporary files and return their number.

    Missing directories are skipped. An error in one directory does not keep the others from being swept.

    Raises:
        PathRefused: A path is not permitted.
        FenceFailed: A staging directory cannot be entered.
        OSError: A directory cannot be read.
    """
    wrong: Exception | None = None
    removed = 0
    for path in left.directories:
        try:
            target = _target(left, path, persistent)
            if target is not None:
                with open_target(target, forbidden=home) as descriptor:
                    removed += fence.sweep(descriptor, path, claimant)
                    os.fsync(descriptor)
        except (PathRefused, fence.FenceFailed, OSError) as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong
    return removed


def _target(left: Orphans, path: str, persistent: Mapping[str, str]) -> Target | None:
    """Resolve a directory; None if it no longer exists, or is a file."""
    if path.startswith("$"):
        head, _, rest = path.partition("/")
        root = persistent.get(head.strip("${}"), "")
        if not root or not os.path.isdir(os.path.join(root, rest)):
            return None
        return inside_target(-1, path, persistent)
    if not os.path.isdir(path):
        return None
    return outside_target(left.roots, path, "stage_out")
