"""The state machine's state: a frozen record of persistent maps.

Any older State stays valid while a newer one exists, so a snapshot, a linearizable read and a time-travel query are
all just "hold a State" (DESIGN.md).
"""

from __future__ import annotations

import immutables
import msgspec

from replica.buffers import Buffer
from replica.commit import Receipt
from replica.jobs import Job
from replica.nodes import Node
from replica.policy import Policy
from replica.pools import Pool
from replica.units import NEVER, Instant, Revision


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
    receipts: immutables.Map[bytes, Receipt] = immutables.Map()
    receipt_ids: immutables.Map[int, bytes] = immutables.Map()
    """Revision -> command id, for dropping the oldest receipt first."""
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
