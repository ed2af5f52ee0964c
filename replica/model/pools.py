"""Pools, shared filesystems, and statistics of operation times.

A pool is named capacity with a granularity; free capacity is derived, never stored (law 8). A shared filesystem is
mounted on all nodes and may hold the buffers of pools; movers stage for it. Statistics are integer sums over recorded
operations, equal on all replicas. They are halved at MEASURED_MAX operations, so that old ones lose weight.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.replica.values import (
    MICROSECONDS_PER_SECOND,
    SIZE_BYTES_MAX,
    Pattern,
    SizeError,
    format_size,
    format_slurm_size,
    parse_size,
)

if TYPE_CHECKING:
    import immutables


class PoolUnit(IntEnum):
    """Units of a pool's quantity, granularity and requests. The numbers are wire numbers (law 12)."""

    BYTES = 1
    NODES = 2
    COUNT = 3

    @property
    def word(self) -> str:
        """Return the unit as in commands and replies: bytes, nodes or count."""
        return self.name.lower()


class Pool(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pool. `quantity_bytes` is its total, `out_of_service_bytes` the part that an operator took out of service."""

    name: str
    quantity_bytes: int
    granularity_bytes: int
    is_default: bool = False
    out_of_service_bytes: int = 0
    unit: PoolUnit = PoolUnit.BYTES
    """Unit of the numbers, in spite of the suffix `_bytes`."""
    is_reported: bool = False
    """True if the site's provider has reported the pool. Once it stops doing so, the pool's quantity is 0."""
    filesystem: str = ""
    """Shared filesystem of its buffers; empty: each lies in the agent's directory on one node."""

    @property
    def usable_bytes(self) -> int:
        """Return the largest possible allocation: the capacity in service in whole grains."""
        in_service = max(0, self.quantity_bytes - self.out_of_service_bytes)
        return in_service // self.granularity_bytes * self.granularity_bytes


def free_bytes(pool: Pool, held_bytes: int) -> int:
    """Return total - held - out of service, at least 0 (a shrunken pool may hold more than it has)."""
    return max(0, pool.usable_bytes - held_bytes)


# ---- units of pools: bytes, nodes, or plain counts (SEMANTICS.md, Pools)


def pool_unit(pools: immutables.Map[str, Pool], name: str) -> PoolUnit:
    """Return the unit of a pool; bytes if the pool does not exist."""
    pool = pools.get(name)
    return PoolUnit.BYTES if pool is None else pool.unit


UNIT_WORDS = tuple(unit.word for unit in PoolUnit)

_NODES = Pattern(r"([0-9]+)(N|node|nodes)?", re.IGNORECASE)
_NODE_SUFFIX = Pattern(r"[0-9.]+(N|node|nodes)", re.IGNORECASE)


def parse_unit(word: str) -> PoolUnit | None:
    """Return the unit named by `word`, case-insensitive, or None."""
    return next((unit for unit in PoolUnit if unit.word == word.lower()), None)


def parse_amount(text: str, unit: PoolUnit) -> int:
    """Return the amount in `text`, in units of the pool; bytes are rounded up.

    Without a suffix the number counts units of the pool. `N` is for pools of nodes only.

    Raises:
        SizeError: the text is not a valid amount, as in `parse_size`.
    """
    if unit is PoolUnit.NODES:
        return _parse_nodes(text)
    if _NODE_SUFFIX.fullmatch(text):
        raise SizeError(
            f"the size {text!r} is in nodes, and the pool counts {'bytes' if unit is PoolUnit.BYTES else 'units'}",
            len(text) - len(text.lstrip("0123456789.")),
            "write the size without N, or use a pool of nodes",
        )
    if unit is PoolUnit.COUNT and "." in text:
        raise SizeError(
            f"the size {text!r} is not a whole number", text.index("."), "write a whole number: the pool counts units"
        )
    return parse_size(text)


def _parse_nodes(text: str) -> int:
    found = _NODES.fullmatch(text)
    if found is None:
        raise SizeError(
            f"the size {text!r} is not a number of nodes", 0, "write a whole number of nodes, for example 4N"
        )
    digits = found.group(1)
    number = int(digits) if len(digits) <= 40 else SIZE_BYTES_MAX + 1
    if not number:
        raise SizeError(f"the size {text!r} is zero", 0, "request at least one node")
    if number > SIZE_BYTES_MAX:
        raise SizeError(f"the size {text[:48]!r} overflows", 0, f"the largest is {SIZE_BYTES_MAX}")
    return number


def format_amount(amount: int, unit: PoolUnit = PoolUnit.BYTES) -> str:
    """Format an amount of a pool without loss, for example `96GiB`, `4N` or `1000`."""
    if unit is PoolUnit.BYTES:
        return format_size(amount)
    return f"{amount}N" if unit is PoolUnit.NODES else str(amount)


def format_slurm_amount(amount: int, unit: PoolUnit = PoolUnit.BYTES) -> str:
    """Format an amount of a pool as `scontrol show burst` does, where plain counts have size suffixes, too."""
    return f"{amount}N" if unit is PoolUnit.NODES else format_slurm_size(amount)


# ---- shared filesystems

QUOTA_AUTO: Final = "auto"
QUOTA_NONE: Final = "none"
QUOTAS: Final = (QUOTA_AUTO, QUOTA_NONE, "project", "btrfs", "lustre", "cephfs", "beegfs", "gpfs", "command")
"""Quota adapters of a shared filesystem, each a module of cluster.agent.adapters. `auto` uses `project` or `btrfs` if
the filesystem enforces one of them, and otherwise no limit.
"""

LAYOUT_NONE: Final = "none"
LAYOUTS: Final = (LAYOUT_NONE, "lustre", "cephfs", "beegfs", "command")
"""Layout adapters of a shared filesystem."""

STRIPES_ALL: Final = -1
STRIPES_MAX: Final = 2_000
"""Targets of one file, count: Lustre's limit (LOV_MAX_STRIPE_COUNT)."""

STRIPE_UNIT_BYTES: Final = 65_536
STRIPE_BYTES_MAX: Final = (1 << 32) - STRIPE_UNIT_BYTES
"""Unit and limit of a stripe's size, bytes: those of Lustre. BeeGFS and CephFS accept multiples of it, too."""


class FilesystemLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Placement of new files on a shared filesystem."""

    adapter: str = LAYOUT_NONE
    """One of LAYOUTS."""
    stripe_count: int = 0
    """Targets of one file; 0: the filesystem's default, STRIPES_ALL: all."""
    stripe_bytes: int = 0
    """Bytes on one target before the next is used; 0: the filesystem's default."""
    pool: str = ""
    """Storage pool of the filesystem; empty: the filesystem's default."""


NO_LAYOUT = FilesystemLayout()
"""The filesystem's own layout."""


class SharedFilesystem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shared filesystem. It is mounted at `path` on every node that runs jobs and on every mover."""

    name: str
    path: str
    """Absolute and normalised; never below, above or equal to that of another shared filesystem."""
    identity: str = ""
    """Content of the identity file that the first mover found or created; empty: no mover has registered.

    A machine where the file is missing or different has not mounted the filesystem.
    """
    movers: tuple[str, ...] = ()
    """Nodes whose agents stage for it, ascending, whether up or not."""
    quota: str = QUOTA_AUTO
    """Adapter that limits buffers to their capacity, one of QUOTAS."""
    layout: FilesystemLayout = NO_LAYOUT


class ObservedFilesystem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shared filesystem as a mover's agent found it on its machine."""

    name: str
    identity: str


def are_nested(one: str, other: str) -> bool:
    """Return whether two paths are equal or one lies below the other."""
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


def pool_filesystem(
    pools: immutables.Map[str, Pool], filesystems: immutables.Map[str, SharedFilesystem], pool: str
) -> SharedFilesystem | None:
    """Return the shared filesystem of a pool's buffers; None: each lies in the agent's directory on one node."""
    found = pools.get(pool) if filesystems and pool else None
    return None if found is None or not found.filesystem else filesystems.get(found.filesystem)


# ---- operation times

MEASURED_MAX = 256
"""Operations summed before all sums are halved, count: the last few hundred dominate."""

DRAIN_TIME_S = 60
"""Assumed time of stage-out and teardown before any were measured, seconds."""


class OperationStatistics(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over operations of one kind."""

    count: int = 0
    duration_us: int = 0
    moved_bytes: int = 0
    granted_bytes: int = 0
    """Capacity of the buffers, used to estimate operations whose data has not been counted."""

    def with_operation(self, duration_us: int, moved_bytes: int, granted_bytes: int) -> OperationStatistics:
        """Return the sums with one more operation."""
        half = 2 if self.count >= MEASURED_MAX else 1
        return OperationStatistics(
            self.count // half + 1,
            self.duration_us // half + max(0, duration_us),
            self.moved_bytes // half + max(0, moved_bytes),
            self.granted_bytes // half + max(0, granted_bytes),
        )

    @property
    def mean_us(self) -> int:
        """Return the mean duration, µs; 0 without operations."""
        return self.duration_us // self.count if self.count else 0

    @property
    def bytes_per_s(self) -> int:
        """Return the mean rate; 0 without operations."""
        return self.moved_bytes * MICROSECONDS_PER_SECOND // self.duration_us if self.duration_us else 0

    def expected_us(self, granted_bytes: int) -> int:
        """Return the expected duration for a buffer of this capacity, µs, in proportion to past operations."""
        if self.granted_bytes and granted_bytes:
            return granted_bytes * self.duration_us // self.granted_bytes
        return self.mean_us


class Rates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Statistics of one pool's operations (of buffers without a pool, under the empty name)."""

    pool: str
    stage_in: OperationStatistics = OperationStatistics()
    stage_out: OperationStatistics = OperationStatistics()
    teardown: OperationStatistics = OperationStatistics()

    @property
    def drain_us(self) -> int:
        """Return the mean time of stage-out and teardown together, µs."""
        if not self.stage_out.count and not self.teardown.count:
            return DRAIN_TIME_S * MICROSECONDS_PER_SECOND
        return self.stage_out.mean_us + self.teardown.mean_us


def rates_of(rates: Rates | None, pool: str) -> Rates:
    """Return the statistics, or empty ones for the pool."""
    return Rates(pool) if rates is None else rates
