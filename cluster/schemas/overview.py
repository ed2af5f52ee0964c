"""Cluster overview: activity, items that need attention, and pool use over time."""

from typing import Final, Literal

from forebay.cluster.schemas.base import Answer, View
from forebay.cluster.schemas.jobs import MemberView
from forebay.cluster.system import parse_instant
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant

NeedKind = Literal[
    "not_exported", "retained", "teardown_failed", "operation_failed", "node_down", "replica", "certificate", "storage",
    "clock", "ledger", "witness", "pool", "consensus", "sink",
]  # fmt: skip


class NeedView(View, frozen=True, kw_only=True):
    """Item that needs attention."""

    kind: NeedKind
    subject: str
    """Subject: `job 12`, `node n3`, `replica r2`."""
    job_id: int | None = None
    user: str = ""
    """Affected user; empty for the site."""
    since: str | None = None
    """Start of the condition; null if unknown."""
    sentence: str
    remedy: str = ""
    """Suggested command or page."""


class TransfersSummary(View, frozen=True, kw_only=True):
    """Transfers that are running, queued, or need attention."""

    moving: int = 0
    queued: int = 0
    retrying: int = 0
    failed: int = 0
    rate_bytes_s: float = 0.0
    """Total rate as reported to the leader; 0 on other replicas."""


class OverviewAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/overview: counts, and the first items that need attention."""

    cluster: str
    replica: str
    """Responding replica."""
    leader: str | None
    leader_api: str | None = None
    term: int
    at: str | None = None
    """Cluster time of the last applied batch."""
    ready: bool
    not_ready: str = ""
    members: tuple[MemberView, ...]
    """Replicas, each with its own status of some seconds ago."""
    jobs: dict[str, int]
    """State -> unfinished jobs."""
    waiting: dict[str, int]
    """Reason -> pending jobs."""
    nodes: dict[str, int]
    """State -> nodes; DRAINING for a drained node that still has work."""
    transfers: TransfersSummary
    needs: tuple[NeedView, ...]
    needs_count: int
    """Total number of items; `needs` has the first of them."""


class SinkView(View, frozen=True, kw_only=True):
    """Event sink. Counts begin when the responding replica began to lead."""

    name: str
    url: str
    kinds: tuple[str, ...] = ()
    """Its filter; empty for all events but routine ones."""
    state: Literal["starting", "active", "failing", "refused", "gone"]
    mark: int | None = None
    """Agreed revision up to which the receiver has accepted all events; null before the first."""
    delivered: int | None = None
    """The same as known to the leader, which may be later."""
    lag_revisions: int = 0
    """Revisions after `delivered`."""
    lag_s: float = 0.0
    """Age of the oldest event that the receiver has not accepted, seconds."""
    events: int = 0
    """Accepted events."""
    deliveries: int = 0
    """Accepted requests."""
    failures: int = 0
    """Failed attempts."""
    failing_since: str | None = None
    """Time of the first failure since the last success."""
    error: str = ""
    """Last error, also of an earlier failure."""
    error_at: str | None = None


class SinksAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/sinks: the sinks in the leader's configuration."""

    replica: str
    """Responding replica, the leader."""
    sinks: tuple[SinkView, ...]


class PoolStepView(View, frozen=True, kw_only=True):
    """Pool use from a point in time until the next step."""

    at: str
    held_bytes: int
    served_bytes: int
    """Capacity in service."""
    quantity_bytes: int


class PoolUseView(View, frozen=True, kw_only=True):
    """Pool over time."""

    name: str
    unit: str = "bytes"
    steps: tuple[PoolStepView, ...]


class PoolUseAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/history/pools: the first pools by name, over the last day or since `from_time`."""

    from_time: str | None
    """Start of the data on this replica; null: nothing was settled yet."""
    to_time: str | None
    """End of the last steps."""
    step_s: float
    """Shortest time between two steps, seconds; faster changes are shown by their last value."""
    pools: tuple[PoolUseView, ...]
    truncated: bool = False


EXPIRY_NOTICE_DAYS: Final = 30
"""Days before its expiry at which a certificate needs attention."""

_DAY_US = 86_400 * MICROSECONDS_PER_SECOND


def days_left(until: str | None, now: Instant) -> int | None:
    """Return the whole days until a time, 0 if it has passed, None if it is unknown."""
    return None if until is None else max(0, (parse_instant(until) - now) // _DAY_US)
