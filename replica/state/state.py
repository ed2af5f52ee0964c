"""The state machine's state: a frozen record of persistent maps.

Any older State stays valid while a newer one exists, so a snapshot, a linearizable read and a time-travel query are
all just "hold a State" (DESIGN.md).
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

import immutables
import msgspec

from replica.messages import Receipt
from replica.model import (
    DEFAULT_SITE,
    SITE_KEY,
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
    Policy,
    Pool,
    PoolUnit,
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
    def persistent(self) -> immutables.Map[str, PersistentBuffer]: ...
    @property
    def using(self) -> Lookup[str, immutables.Map[int, bool]]: ...
    @property
    def sites(self) -> immutables.Map[str, Site]: ...
    @property
    def site(self) -> Site: ...
    @property
    def pool_units(self) -> immutables.Map[str, PoolUnit]: ...
    @property
    def accounts(self) -> immutables.Map[str, Account]: ...
    @property
    def qos(self) -> immutables.Map[str, Qos]: ...
    @property
    def licenses(self) -> immutables.Map[str, License]: ...
    @property
    def reservations(self) -> immutables.Map[str, Reservation]: ...
    @property
    def scheduling_rules(self) -> immutables.Map[str, SchedulingRules]: ...
    @property
    def rates(self) -> immutables.Map[str, Rates]: ...
    @property
    def mails(self) -> immutables.Map[str, Mail]: ...
    @property
    def partitions(self) -> immutables.Map[str, Partition]: ...
    @property
    def consumed(self) -> Consumed: ...
    @property
    def transfer_rules(self) -> immutables.Map[str, TransferRules]: ...
    @property
    def transfers(self) -> Lookup[int, JobTransfers]: ...
    @property
    def moving(self) -> Lookup[tuple[str, str], int]: ...
    @property
    def use(self) -> Lookup[UsageKey, int]: ...
    @property
    def unfinished(self) -> Lookup[int, bool]: ...
    @property
    def on_node(self) -> Lookup[str, immutables.Map[int, bool]]: ...
    @property
    def operations(self) -> Lookup[int, int]: ...
    @property
    def arrays(self) -> Lookup[int, immutables.Map[int, int]]: ...
    @property
    def named(self) -> Lookup[str, immutables.Map[str, NameGroup]]: ...


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the replicas agree on at one revision.

    The maps from `using` on are derived from the others: kept up to date by `fold`, left out of snapshots and digests,
    computed again on loading, and compared by `replica.state.invariants`.
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

    persistent: immutables.Map[str, PersistentBuffer] = immutables.Map()
    """Persistent buffers by name, from allocating to deleted. From here to the derived maps, each has a row in
    `replica.state.tables`."""
    sites: immutables.Map[str, Site] = immutables.Map()
    """The site's configuration under SITE_KEY; nothing as long as nobody configured anything. Read it as `site`."""
    pool_units: immutables.Map[str, PoolUnit] = immutables.Map()
    """What the numbers of a pool count; a pool that is not here counts bytes."""
    accounts: immutables.Map[str, Account] = immutables.Map()
    qos: immutables.Map[str, Qos] = immutables.Map()
    licenses: immutables.Map[str, License] = immutables.Map()
    reservations: immutables.Map[str, Reservation] = immutables.Map()
    """Reservations that have not ended."""
    scheduling_rules: immutables.Map[str, SchedulingRules] = immutables.Map()
    """The site's rules of scheduling under RULES_KEY; nothing while nobody has set any. Read as `priority.rules_of`."""
    rates: immutables.Map[str, Rates] = immutables.Map()
    """Pool -> what was measured of its transfers."""
    mails: immutables.Map[str, Mail] = immutables.Map()
    """Mails that are owed (`replica.model.mail`), by their key."""
    partitions: immutables.Map[str, Partition] = immutables.Map()
    consumed: Consumed = immutables.Map()
    """What accounts, their users and QOS have used of burst buffers (`replica.model.usage`)."""
    transfer_rules: immutables.Map[str, TransferRules] = immutables.Map()
    """How data is moved, under TRANSFER_RULES_KEY; nothing while nobody has said. Read as `governing.rules_of`."""
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

    @property
    def site(self) -> Site:
        """The site's configuration, the defaults where nobody configured anything."""
        return self.sites.get(SITE_KEY, DEFAULT_SITE)


EMPTY = State()
