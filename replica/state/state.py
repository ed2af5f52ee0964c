"""The state machine's state: a frozen record of persistent maps.

Any older State stays valid while a newer one exists, so a snapshot, a linearizable read and a time-travel query are
all just "hold a State" (DESIGN.md).
"""

from __future__ import annotations

import immutables
import msgspec

from replica.model import (
    DEFAULT_RULES,
    DEFAULT_SITE,
    DEFAULT_TRANSFER_RULES,
    Account,
    Buffer,
    Consumed,
    Job,
    JobTransfers,
    License,
    Mail,
    NameGroup,
    Node,
    Partition,
    PersistentBuffer,
    Pool,
    Qos,
    Rates,
    Reservation,
    SchedulingRules,
    Site,
    TransferRules,
    UsageKey,
)
from replica.state.receipts import Receipts
from replica.values import NEVER, Instant, Revision


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the replicas agree on at one revision. Each map that is not derived has a row in
    `replica.state.tables`.

    The maps from `using` on are derived from the others: kept up to date by `fold`, left out of snapshots and digests,
    computed again on loading, and compared by `replica.state.invariants`.
    """

    cluster_id: str = ""
    name: str = ""
    feature_level: int = 0
    revision: Revision = Revision(0)
    at: Instant = NEVER
    site: Site = DEFAULT_SITE
    """What the site configured (`replica.model.configuration`)."""
    scheduling_rules: SchedulingRules = DEFAULT_RULES
    """The site's rules of scheduling."""
    transfer_rules: TransferRules = DEFAULT_TRANSFER_RULES
    """How data is moved."""
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

    persistent: immutables.Map[str, PersistentBuffer] = immutables.Map()
    """Persistent buffers by name, from allocating to deleted."""
    accounts: immutables.Map[str, Account] = immutables.Map()
    qos: immutables.Map[str, Qos] = immutables.Map()
    licenses: immutables.Map[str, License] = immutables.Map()
    reservations: immutables.Map[str, Reservation] = immutables.Map()
    """Reservations that have not ended."""
    rates: immutables.Map[str, Rates] = immutables.Map()
    """Pool -> what was measured of its transfers."""
    mails: immutables.Map[str, Mail] = immutables.Map()
    """Mails that are owed (`replica.model.mail`), by their key."""
    partitions: immutables.Map[str, Partition] = immutables.Map()
    consumed: Consumed = immutables.Map()
    """What accounts, their users and QOS have used of burst buffers (`replica.model.usage`)."""
    transfers: immutables.Map[int, JobTransfers] = immutables.Map()
    """Receipts and the newest checkpoint of the jobs that have any."""

    using: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: name of a persistent buffer -> the jobs that work with it now, from stage-in to the end of teardown."""
    held_bytes: immutables.Map[str, int] = immutables.Map()
    """Derived: pool -> bytes held by buffers."""
    unfinished: immutables.Map[int, bool] = immutables.Map()
    """Derived: jobs that are not over or whose buffer is not complete."""
    finished: immutables.Map[int, bool] = immutables.Map()
    """Derived: the other jobs."""
    on_node: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: node -> the jobs of `unfinished` that have something there."""
    holders: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: pool -> the jobs whose buffer holds a part of it."""
    operations: immutables.Map[int, int] = immutables.Map()
    """Derived: stage -> how many slots of it are taken (`replica.operations.slots`); RUN: pre-runs."""
    arrays: immutables.Map[int, immutables.Map[int, int]] = immutables.Map()
    """Derived: array -> task -> job, of the tasks that are in `jobs`."""
    named: immutables.Map[str, immutables.Map[str, NameGroup]] = immutables.Map()
    """Derived: user -> job name -> the jobs of `unfinished` that are not over (`singleton`)."""
    use: immutables.Map[UsageKey, int] = immutables.Map()
    """Derived: what counts against limits, licences and reservations (`replica.model.usage`)."""
    moving: immutables.Map[tuple[str, str], int] = immutables.Map()
    """Derived: (user, node) -> transfers under way (`replica.operations.transfer_limits`); an empty part stands for
    all."""


EMPTY = State()
