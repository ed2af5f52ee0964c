"""Facts about the cluster itself, its pools and its nodes. `replica.events` has all facts, and the rules for them."""

from __future__ import annotations

import msgspec

from replica.model.configuration import Policy, Site
from replica.model.pools import Pool, PoolUnit


class ClusterFounded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """The first event of every ledger."""

    cluster_id: str
    name: str
    policy: Policy
    pools: tuple[Pool, ...]
    feature_level: int = 1


class PoolSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """A pool was made or changed; `pool` is all of it as it is now."""

    pool: Pool


class PoolRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=76):
    """A pool that nobody held or waited for is no more."""

    pool: str


class PoolUnitSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=77):
    """What the numbers of a pool count from here on."""

    pool: str
    unit: PoolUnit


class PolicySet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The site policy was changed."""

    policy: Policy


class SiteConfigured(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=75):
    """The site's configuration was changed; `site` is all of it as it is now, but for its revision."""

    site: Site


class FeatureLevelRaised(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=30):
    """All members know `level`, and what came with it may be written from here on. `release` is the first that knows
    it: so a replica of an earlier one, which stops here, can say what it needs. These two fields never change.
    """

    level: int
    release: str


class NodeRegistered(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """An agent started, or came back with another instance."""

    node: str
    cpus: int
    instance: str
    storage_id: str


class NodeDrained(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """An operator keeps new work from the node."""

    node: str
    reason: str


class NodeResumed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """The node may have new work again."""

    node: str


class NodeWentDown(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """The leader has not heard of the node's agent for its liveness time."""

    node: str
    reason: str


class NodeCameBack(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """The agent of a node that was down was heard of again. The operations of `jobs` have their time from now
    on: their clocks stood still meanwhile.
    """

    node: str
    jobs: tuple[int, ...] = ()
