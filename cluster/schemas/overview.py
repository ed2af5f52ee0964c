"""The cluster at a glance: what it does, what needs somebody, and how full its pools were."""

from typing import Final, Literal

from cluster.schemas.base import Answer, View
from cluster.schemas.jobs import MemberView
from cluster.system import parse_instant
from replica.values import MICROSECONDS_PER_SECOND, Instant

NeedKind = Literal[
    "not_exported", "parked", "teardown_failed", "operation_failed", "node_down", "replica", "certificate", "storage",
    "clock", "ledger", "witness", "pool", "consensus",
]  # fmt: skip


class NeedView(View, frozen=True, kw_only=True):
    """One thing that does not go on without somebody."""

    kind: NeedKind
    subject: str
    """What it is about: `job 12`, `node n3`, `replica r2`."""
    job_id: int | None = None
    user: str = ""
    """Whose it is; empty where it is the site's."""
    since: str | None = None
    """Since when, null where nobody knows."""
    sentence: str
    remedy: str = ""
    """What to look at or to type."""


class TransfersSummary(View, frozen=True, kw_only=True):
    """All transfers that are under way, wait for their turn, or for somebody."""

    moving: int = 0
    queued: int = 0
    retrying: int = 0
    failed: int = 0
    rate_bytes_s: float = 0.0
    """Of all together, as agents told the leader; 0 where another replica answers."""


class OverviewAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/overview: counts of everything, and of what needs somebody the first."""

    cluster: str
    replica: str
    """Who answers."""
    leader: str | None
    leader_api: str | None = None
    term: int
    at: str | None = None
    """The cluster's time of the last batch that was applied."""
    ready: bool
    not_ready: str = ""
    members: tuple[MemberView, ...]
    """The replicas, each with what it said of itself some seconds ago."""
    jobs: dict[str, int]
    """State -> jobs that are not over."""
    waiting: dict[str, int]
    """Reason -> pending jobs."""
    nodes: dict[str, int]
    """State -> nodes; DRAINING for one that finishes what it has."""
    transfers: TransfersSummary
    needs: tuple[NeedView, ...]
    needs_count: int
    """How many there are, of which `needs` has the first."""


class PoolStepView(View, frozen=True, kw_only=True):
    """How full a pool was from a moment on, until the next step."""

    at: str
    held_bytes: int
    served_bytes: int
    """What is in service of it."""
    quantity_bytes: int


class PoolUseView(View, frozen=True, kw_only=True):
    """One pool over time."""

    name: str
    unit: str = "bytes"
    steps: tuple[PoolStepView, ...]


class PoolUseAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/history/pools: the first pools by name, as they were in the last day, or since `from_time`."""

    from_time: str | None
    """From when on this replica can say it; null: nothing was settled yet."""
    to_time: str | None
    """The moment up to which the last steps last."""
    step_s: float
    """The least time between two steps, seconds: what changed more often is shown as it was at the end of it."""
    pools: tuple[PoolUseView, ...]
    truncated: bool = False


EXPIRY_NOTICE_DAYS: Final = 30
"""How long before its end a certificate needs somebody, days."""

_DAY_US = 86_400 * MICROSECONDS_PER_SECOND


def days_left(until: str | None, now: Instant) -> int | None:
    """Return the whole days up to a moment, None where it is not known; 0 for one that has passed."""
    return None if until is None else max(0, (parse_instant(until) - now) // _DAY_US)
