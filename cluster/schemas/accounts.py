"""Schemas of accounts, QOS, licences, reservations, scheduling rules, and start estimates."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from forebay.cluster.schemas.base import Answer, Command, Number, View
from forebay.cluster.schemas.job_fields import Text
from forebay.replica.values import ACCOUNT_USERS_MAX, ETAG_BYTES, LIMITS_PER_RECORD_MAX, PARTITION_NODES_CHARACTERS_MAX

TEXT_CHARACTERS_MAX = 128
"""Length of a name or of a limit written as text, characters; a name has at most 64."""

SPACE_CHARACTERS_MAX = 16_384
"""Length of a reservation's space written as text, characters: one amount for each possible pool."""

_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]
_Names: TypeAlias = Annotated[tuple[_Text, ...], msgspec.Meta(max_length=ACCOUNT_USERS_MAX)]
Limits: TypeAlias = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=LIMITS_PER_RECORD_MAX)]
"""Limits by name, for example {"MaxJobsPerUser": "4", "GrpBB:bb/fast": "10TiB"}."""

UserLimits: TypeAlias = Annotated[dict[_Text, Limits], msgspec.Meta(max_length=ACCOUNT_USERS_MAX)]


# Requests


class RecordRequest(Command, frozen=True, kw_only=True):
    """Body that creates or replaces a record.

    With `if_match`, the request is rejected if the record has another `etag`; an empty text means: if the record
    exists.
    """

    if_match: Annotated[str, msgspec.Meta(max_length=2 * ETAG_BYTES)] | None = None


class AccountRequest(RecordRequest, frozen=True, kw_only=True):
    """Body of PUT /v1/accounts/{name}: the complete account."""

    parent: _Text = ""
    users: _Names = ()
    limits: Limits = {}
    user_limits: UserLimits = {}
    """Limits by user within this account; each user must be listed in `users`."""


class QosRequest(RecordRequest, frozen=True, kw_only=True):
    """Body of PUT /v1/qos/{name}: the complete QOS."""

    priority: Number = 0
    limits: Limits = {}
    users: _Names = ()
    accounts: _Names = ()
    deny_on_limit: bool = False


class LicenseRequest(RecordRequest, frozen=True, kw_only=True):
    """Body of PUT /v1/licenses/{name}."""

    total: Number


class ReservationRequest(RecordRequest, frozen=True, kw_only=True):
    """Body of PUT /v1/reservations/{name}. Times are ISO 8601 with a zone; the default start is now."""

    end: _Text
    start: _Text | None = None
    users: _Names = ()
    accounts: _Names = ()
    burst_buffer: Annotated[str, msgspec.Meta(max_length=SPACE_CHARACTERS_MAX)]
    """`[plugin:][pool:]#[units]`, comma-separated."""


# Responses


class AccountView(View, frozen=True, kw_only=True):
    """Account."""

    name: str
    parent: str | None
    users: tuple[str, ...]
    limits: dict[str, str]
    user_limits: dict[str, dict[str, str]]
    etag: str = ""
    """Version of the record, for `if_match` of a change."""


class AccountsAnswer(Answer, frozen=True, kw_only=True):
    """Response with accounts."""

    accounts: tuple[AccountView, ...]


class QosView(View, frozen=True, kw_only=True):
    """QOS. Empty `users` and `accounts` allow all users."""

    name: str
    priority: int
    limits: dict[str, str]
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    deny_on_limit: bool
    etag: str = ""


class QosAnswer(Answer, frozen=True, kw_only=True):
    """Response with QOS records."""

    qos: tuple[QosView, ...]


class LicenseView(View, frozen=True, kw_only=True):
    """Licence, and the number that running jobs use."""

    name: str
    total: int
    in_use: int
    etag: str = ""


class LicensesAnswer(Answer, frozen=True, kw_only=True):
    """Response with licences."""

    licenses: tuple[LicenseView, ...]


class ReservationView(View, frozen=True, kw_only=True):
    """Reservation; `held_bytes` is the space its jobs hold in its pools."""

    name: str
    state: str
    """ACTIVE or INACTIVE, as in scontrol."""
    start: str
    end: str
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    burst_buffer: str
    held_bytes: int
    etag: str = ""


class ReservationsAnswer(Answer, frozen=True, kw_only=True):
    """Response with reservations."""

    reservations: tuple[ReservationView, ...]


class RateView(View, frozen=True, kw_only=True):
    """Transfer rates measured for one pool; 0 without measurements."""

    pool: str
    stage_ins: int
    stage_in_bytes_per_s: int
    stage_in_mean_s: float
    stage_outs: int
    stage_out_bytes_per_s: int
    stage_out_mean_s: float
    drain_s: float
    """Expected duration of stage-out and teardown together."""


class SchedulingAnswer(Answer, frozen=True, kw_only=True):
    """Response with the scheduling rules."""

    size_points_per_gib: int
    default_account: str | None
    default_qos: str | None
    accounts_required: bool
    revocations_max: int
    revoke_after_s: int
    rates: tuple[RateView, ...]


class EstimateStep(View, frozen=True, kw_only=True):
    """Condition the job waits for; `until` is null if it cannot be predicted."""

    what: str
    until: str | None
    sentence: str


class EstimateView(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/jobs/{id}/estimate.

    If the start cannot be predicted, `start` is null and the last step explains it.
    """

    job_id: int
    state: str
    priority: int
    """Effective priority, including nice, QOS and size."""
    start: str | None
    steps: tuple[EstimateStep, ...]


# ---- schemas of partitions and of burst-buffer usage


_PartitionNames: TypeAlias = Annotated[tuple[Text, ...], msgspec.Meta(max_length=ACCOUNT_USERS_MAX)]
PartitionWord: TypeAlias = Literal["UP", "DOWN", "DRAIN", "INACTIVE"]


# Requests


class PartitionRequest(RecordRequest, frozen=True, kw_only=True):
    """Body of PUT /v1/partitions/{name}: the complete partition."""

    nodes: Annotated[str, msgspec.Meta(max_length=PARTITION_NODES_CHARACTERS_MAX)] = "ALL"
    """Node list such as `n[1-4],n7`; `ALL` selects every node, an empty string none."""
    state: PartitionWord = "UP"
    default: bool = False
    max_time_s: Number | None = None
    """Longest time limit of its jobs, seconds; null: no limit."""
    min_nodes: Number = 0
    max_nodes: Number | None = None
    users: _PartitionNames = ()
    accounts: _PartitionNames = ()
    """Accounts that may use the partition; empty: all. `accounts` and `qos` must both allow a job."""


class UsageResetRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/usage/reset: set the recorded usage of an account or a QOS to zero."""

    account: Text | None = None
    qos: Text | None = None


# Responses


class PartitionView(View, frozen=True, kw_only=True):
    """Partition; `nodes_up` and `cpus` count only nodes that are up."""

    name: str
    state: str
    default: bool
    nodes: str
    nodes_up: int
    cpus: int
    max_time_s: int | None
    min_nodes: int
    max_nodes: int | None
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    etag: str = ""


class PartitionsAnswer(Answer, frozen=True, kw_only=True):
    """Response with partitions."""

    partitions: tuple[PartitionView, ...]


class UsageView(View, frozen=True, kw_only=True):
    """Usage of one pool by an account, by one of its users, or by a QOS; `pool` null: all pools together."""

    account: str | None
    qos: str | None
    user: str | None
    """Null: all users together."""
    pool: str | None
    byte_minutes: int
    """Bytes (or the pool's units) multiplied by the minutes they were held."""


class UsageAnswer(Answer, frozen=True, kw_only=True):
    """Response with burst-buffer usage."""

    usage: tuple[UsageView, ...]
