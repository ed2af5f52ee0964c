"""Pools: named capacity with a granularity. Free capacity is derived, never stored (law 8). Shared filesystems: file
systems that all nodes mount, and that pools may have their buffers in; movers stage for them. Rates: how long transfers
of a pool take here, measured: sums over recorded stage-ins, stage-outs and teardowns, halved now and then, so that what
was measured long ago fades. All figures are integers, the same on every replica.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from replica.values import (
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
    """What a pool's quantity, granularity and requests count; the numbers are wire numbers (law 12)."""

    BYTES = 1
    NODES = 2
    COUNT = 3

    @property
    def word(self) -> str:
        """As in commands and answers: bytes, nodes or count."""
        return self.name.lower()


class Pool(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pool. `quantity_bytes` is what it has in all, `out_of_service_bytes` what an operator has taken away for
    now.
    """

    name: str
    quantity_bytes: int
    granularity_bytes: int
    is_default: bool = False
    out_of_service_bytes: int = 0
    unit: PoolUnit = PoolUnit.BYTES
    """What the numbers count; those of a pool of nodes or of units are so many of them, whatever they are called."""
    is_reported: bool = False
    """Whether the site's provider has told of it: once it no longer does, the pool has nothing left."""
    filesystem: str = ""
    """The shared filesystem that its buffers lie in, on a file system that all nodes mount; empty: in the directory of
    the agent of the node that each is on.
    """

    @property
    def usable_bytes(self) -> int:
        """The most that one request could ever get: whole grains of what is in service."""
        in_service = max(0, self.quantity_bytes - self.out_of_service_bytes)
        return in_service // self.granularity_bytes * self.granularity_bytes


def free_bytes(pool: Pool, held_bytes: int) -> int:
    """Return total - held - out of service, and 0 where the pool shrank below what is in use."""
    return max(0, pool.usable_bytes - held_bytes)


# ---- what the numbers of a pool count: bytes, nodes, or nothing in particular (SEMANTICS.md, Pools)


def pool_unit(pools: immutables.Map[str, Pool], name: str) -> PoolUnit:
    """Return what the numbers of a pool count; bytes for one that is not there."""
    pool = pools.get(name)
    return PoolUnit.BYTES if pool is None else pool.unit


UNIT_WORDS = tuple(unit.word for unit in PoolUnit)

_NODES = Pattern(r"([0-9]+)(N|node|nodes)?", re.IGNORECASE)
_NODE_SUFFIX = Pattern(r"[0-9.]+(N|node|nodes)", re.IGNORECASE)


def parse_unit(word: str) -> PoolUnit | None:
    """Return the unit that `word` names, without regard to case; None if none does."""
    return next((unit for unit in PoolUnit if unit.word == word.lower()), None)


def parse_amount(text: str, unit: PoolUnit) -> int:
    """Return how many units of a pool `text` says: exactly for counts and nodes, rounded up to a byte for bytes.

    Without a suffix it is units of the pool. `N` is for pools of nodes only. SizeError as `parse_size`.
    """
    if unit is PoolUnit.NODES:
        return _parse_nodes(text)
    if _NODE_SUFFIX.fullmatch(text):
        raise SizeError(
            f"the size {text!r} is in nodes, and the pool counts {'bytes' if unit is PoolUnit.BYTES else 'units'}",
            len(text) - len(text.lstrip("0123456789.")),
            "write it without N, or use a pool of nodes",
        )
    if unit is PoolUnit.COUNT and "." in text:
        raise SizeError(
            f"the size {text!r} is no whole number", text.index("."), "write a whole number: the pool counts units"
        )
    return parse_size(text)


def _parse_nodes(text: str) -> int:
    found = _NODES.fullmatch(text)
    if found is None:
        raise SizeError(f"the size {text!r} is no number of nodes", 0, "write a whole number of nodes, for example 4N")
    digits = found.group(1)
    number = int(digits) if len(digits) <= 40 else SIZE_BYTES_MAX + 1
    if not number:
        raise SizeError(f"the size {text!r} is zero", 0, "ask for at least one node")
    if number > SIZE_BYTES_MAX:
        raise SizeError(f"the size {text[:48]!r} overflows", 0, f"the largest is {SIZE_BYTES_MAX}")
    return number


def format_amount(amount: int, unit: PoolUnit = PoolUnit.BYTES) -> str:
    """Return an amount of a pool for people, without loss: `96GiB`, `4N`, `1000`."""
    if unit is PoolUnit.BYTES:
        return format_size(amount)
    return f"{amount}N" if unit is PoolUnit.NODES else str(amount)


def format_slurm_amount(amount: int, unit: PoolUnit = PoolUnit.BYTES) -> str:
    """Return an amount of a pool as `scontrol show burst` prints it: plain counts have the suffixes of sizes, too."""
    return f"{amount}N" if unit is PoolUnit.NODES else format_slurm_size(amount)


# ---- shared filesystems


class SharedFilesystem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Shared filesystem. It is found below `path` on every node that runs jobs and on every mover."""

    name: str
    path: str
    """Absolute, without `.`, `..` or a slash too many; never below, above or that of another shared filesystem."""
    identity: str = ""
    """What stands in the file that the first mover found or made there; empty: no mover has come. A machine that finds
    something else there, or nothing, has not mounted it."""
    movers: tuple[str, ...] = ()
    """Nodes whose agents stage for it, in ascending order, whether they are up or not."""


class ObservedFilesystem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shared filesystem as the agent of a mover has found it on its machine."""

    name: str
    identity: str


def are_nested(one: str, other: str) -> bool:
    """Return whether two paths of shared filesystems are the same, or one is below the other."""
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


def pool_filesystem(
    pools: immutables.Map[str, Pool], filesystems: immutables.Map[str, SharedFilesystem], pool: str
) -> SharedFilesystem | None:
    """Return the shared filesystem that the buffers of a pool lie in; None: each lies in the directory of one node's
    agent.
    """
    found = pools.get(pool) if filesystems and pool else None
    return None if found is None or not found.filesystem else filesystems.get(found.filesystem)


# ---- how long transfers take

MEASURED_MAX = 256
"""Operations summed up before all sums are halved, count: the last few hundred decide."""

DRAIN_TIME_S = 60
"""What stage-out and teardown are expected to take until some were measured, seconds."""


class OperationStatistics(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over one kind of operation."""

    count: int = 0
    duration_us: int = 0
    moved_bytes: int = 0
    granted_bytes: int = 0
    """The capacity of the buffers: tells how long one will take whose data nobody has counted yet."""

    def with_operation(self, duration_us: int, moved_bytes: int, granted_bytes: int) -> OperationStatistics:
        """Return the sums with one operation more."""
        half = 2 if self.count >= MEASURED_MAX else 1
        return OperationStatistics(
            self.count // half + 1,
            self.duration_us // half + max(0, duration_us),
            self.moved_bytes // half + max(0, moved_bytes),
            self.granted_bytes // half + max(0, granted_bytes),
        )

    @property
    def mean_us(self) -> int:
        """How long one took on average, µs; 0 where none was measured."""
        return self.duration_us // self.count if self.count else 0

    @property
    def bytes_per_s(self) -> int:
        """The rate; 0 where nothing was measured."""
        return self.moved_bytes * MICROSECONDS_PER_SECOND // self.duration_us if self.duration_us else 0

    def expected_us(self, granted_bytes: int) -> int:
        """Return how long it should take for a buffer of this capacity, µs: in proportion to those measured."""
        if self.granted_bytes and granted_bytes:
            return granted_bytes * self.duration_us // self.granted_bytes
        return self.mean_us


class Rates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was measured of one pool (of buffers without a pool, under the empty name)."""

    pool: str
    stage_in: OperationStatistics = OperationStatistics()
    stage_out: OperationStatistics = OperationStatistics()
    teardown: OperationStatistics = OperationStatistics()

    @property
    def drain_us(self) -> int:
        """How long stage-out and teardown take together, on average, µs."""
        if not self.stage_out.count and not self.teardown.count:
            return DRAIN_TIME_S * MICROSECONDS_PER_SECOND
        return self.stage_out.mean_us + self.teardown.mean_us


def rates_of(rates: Rates | None, pool: str) -> Rates:
    """Return the rates, or those of a pool of which nothing was measured."""
    return Rates(pool) if rates is None else rates
