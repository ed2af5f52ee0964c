"""Where a transfer may leave temporary files if it is killed, so that they are removed whoever dies.

`leftovers/JOB` is there while a transfer of the job may have left something in a destination: a line of JSON that says
whose it is and which directories have a staging directory in them (transfer/fence), durable before the
worker starts. Whoever removes does so as the job's user and beneath the roots of the order: the line is not trusted
further than the order was."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from typing import Final

import msgspec

from cluster.agent.files import (
    FileRefused,
    Identity,
    PathRefused,
    ReserveFiles,
    Target,
    inside_target,
    opened,
    outside_target,
    read_bounded,
    variable_of,
)
from cluster.agent.transfer import Claimant, fence
from cluster.system import names_in
from replica.model import NOTHING_SPECIAL, PERSISTENT_PREFIX, Order, OrderPlace, TransferKind

SWEEP: Final = "sweep"
"""What a worker is told to do about it; no order of the controller says that."""

ANY_ATTEMPT: Final = 2**63 - 1
"""An attempt that none is newer than: of one's own, all are over when one sweeps."""


class Orphans(msgspec.Struct, frozen=True, kw_only=True):
    """Of whom it is, what it lies beneath, and in which directories."""

    user: str
    roots: tuple[str, ...]
    directories: tuple[str, ...] = ()
    """Absolute paths, and such as `$DW_PERSISTENT_STRIPED_lake/a`."""
    uses: tuple[str, ...] = ()
    """Persistent buffers that such paths may be in."""
    placed: tuple[tuple[str, OrderPlace], ...] = ()
    """Where those of them lie that are in a place."""

    def covers(self, other: Orphans) -> bool:
        """Whether everything of another one is in this one."""
        same = (self.user, self.roots, self.uses) == (other.user, other.roots, other.uses)
        return same and self.placed == other.placed and set(self.directories) >= set(other.directories)


_ORPHANS: Final = msgspec.json.Decoder(Orphans)


def tag(job: int, storage_id: str) -> str:
    """Return what the temporary names of a job begin with; `storage_id` tells nodes and clusters apart."""
    return f".forebay-{job}-{storage_id[:8]}"


def expected(order: Order) -> Orphans:
    """Return what a transfer may leave outside of the job's own buffer, which its teardown removes anyway."""
    special = order.special or NOTHING_SPECIAL
    outgoing = order.stage == "stage_out"
    found: dict[str, None] = {}
    for transfer in order.transfers:
        path = transfer.outside if outgoing else transfer.inside
        found[path if transfer.kind is TransferKind.DIRECTORY else posixpath.dirname(path.rstrip("/"))] = None
    for listed in special.lists:
        found[listed.destination] = None
    if not outgoing:
        found = {path: None for path in found if variable_of(path).startswith(PERSISTENT_PREFIX)}
    return Orphans(
        user=order.user, roots=order.roots, directories=tuple(found), uses=order.uses, placed=order.persistent
    )


def begin(orphans: int, reserve_files: ReserveFiles, job: int, left: Orphans) -> None:
    """Make the file for a transfer in the open directory. OSError if the disk does not take it."""
    reserve_files.write(orphans, str(job), msgspec.json.encode(left) + b"\n")


def forget(orphans: int, reserve_files: ReserveFiles, job: int) -> None:
    """Nothing can be left of the job's transfers any more."""
    reserve_files.drop(orphans, str(job))


def jobs_with_orphans(orphans: int) -> list[int]:
    """Return the jobs of which something may be left."""
    return sorted(int(name) for name in names_in(orphans) if name.isdecimal())


def read(orphans: int, job: int) -> Orphans | None:
    """Return what is known of a job, None if nothing can be left of it; FileRefused if the file is damaged."""
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


def sweep(claimant: Claimant, left: Orphans, persistent: Mapping[str, str], home: Identity) -> int:
    """Remove the temporary files of a job, and return how many there were.

    A directory that is gone has nothing in it. One that cannot be looked at keeps no other one from being swept; then
    PathRefused, FenceFailed or OSError says why.
    """
    wrong: Exception | None = None
    removed = 0
    for path in left.directories:
        try:
            target = _target(left, path, persistent)
            if target is not None:
                with opened(target, forbidden=home) as descriptor:
                    removed += fence.sweep(descriptor, path, claimant)
                    os.fsync(descriptor)
        except (PathRefused, fence.FenceFailed, OSError) as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong
    return removed


def _target(left: Orphans, path: str, persistent: Mapping[str, str]) -> Target | None:
    """Return where a directory is, None if it is gone."""
    if path.startswith("$"):
        head, _, rest = path.partition("/")
        root = persistent.get(head.strip("${}"), "")
        if not root or not os.path.lexists(os.path.join(root, rest)):
            return None
        return inside_target(-1, path, persistent)
    if not os.path.lexists(path):
        return None
    return outside_target(left.roots, path, "stage_out")
