"""The state machine's state: a frozen record of persistent maps.

Any older State stays valid while a newer one exists, so a snapshot, a linearizable read and a time-travel query are
all just "hold a State" (DESIGN.md).
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

import immutables
import msgspec

from replica.buffers import Buffer
from replica.commit import Receipt
from replica.jobs import Job
from replica.nodes import Node
from replica.policy import Policy
from replica.pools import Pool
from replica.receipts import Receipts
from replica.units import NEVER, Instant, Revision

K = TypeVar("K", contravariant=True)
V = TypeVar("V", covariant=True)
T = TypeVar("T")


class Lookup(Protocol[K, V]):
    """A map that is asked by key only: a persistent one, or one that is being changed, which cannot be walked."""

    def __getitem__(self, key: K, /) -> V: ...
    def __contains__(self, key: Any, /) -> bool: ...
    def __len__(self) -> int: ...
    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, default: V | T, /) -> V | T: ...


class Facts(Protocol):
    """What most decisions need of a State. A Draft has it too, so that a batch is decided without a State between.

    The maps that grow with the load are for looking up only: the type checker sees to it that nobody walks one here.
    """

    @property
    def name(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def feature_level(self) -> int: ...
    @property
    def next_job(self) -> int: ...
    @property
    def receipts_horizon_ms(self) -> int: ...
    @property
    def pools(self) -> immutables.Map[str, Pool]: ...
    @property
    def nodes(self) -> immutables.Map[str, Node]: ...
    @property
    def jobs(self) -> Lookup[int, Job]: ...
    @property
    def buffers(self) -> Lookup[int, Buffer]: ...
    @property
    def receipts(self) -> Lookup[bytes, Receipt]: ...
    @property
    def unfinished(self) -> Lookup[int, bool]: ...


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the replicas agree on at one revision.

    The last three maps are derived from the others: kept up to date by `fold`, left out of snapshots and digests,
    computed again on loading, and compared by `replica.invariants`.
    """

    cluster_id: str = ""
    name: str = ""
    feature_level: int = 0
    revision: Revision = Revision(0)
    at: Instant = NEVER
    policy: Policy = Policy()
    next_job: int = 1
    pools: immutables.Map[str, Pool] = immutables.Map()
    nodes: immutables.Map[str, Node] = immutables.Map()
    jobs: immutables.Map[int, Job] = immutables.Map()
    buffers: immutables.Map[int, Buffer] = immutables.Map()
    receipts: Receipts = Receipts()
    oldest_receipt: int = 1
    """No receipt has a smaller revision."""
    receipts_horizon_ms: int = 0
    """The latest client time among the dropped receipts: an unknown id that is not newer may be one of them."""

    held_bytes: immutables.Map[str, int] = immutables.Map()
    """Derived: pool -> bytes held by buffers."""
    unfinished: immutables.Map[int, bool] = immutables.Map()
    """Derived: jobs that are not over or whose buffer is not complete."""
    finished: immutables.Map[int, bool] = immutables.Map()
    """Derived: the other jobs."""


EMPTY = State()
