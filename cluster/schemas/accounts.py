"""What is sent and answered about accounts, QOS, licences, reservations, the rules of scheduling, and estimates."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from cluster.schemas.base import Answer, Command, Number, View
from cluster.schemas.job_fields import Text
from replica.values import ACCOUNT_USERS_MAX, LIMITS_PER_RECORD_MAX, PARTITION_NODES_CHARACTERS_MAX

TEXT_CHARACTERS_MAX = 128
"""A name, or a limit as text, characters: a name has at most 64."""

SPACE_CHARACTERS_MAX = 16_384
"""The space of a reservation as text, characters: some for each pool that there may be."""

_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]
_Names: TypeAlias = Annotated[tuple[_Text, ...], msgspec.Meta(max_length=ACCOUNT_USERS_MAX)]
Limits: TypeAlias = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=LIMITS_PER_RECORD_MAX)]
"""Such as {"MaxJobsPerUser": "4", "GrpBB:bb/fast": "10TiB"}."""

UserLimits: TypeAlias = Annotated[dict[_Text, Limits], msgspec.Meta(max_length=ACCOUNT_USERS_MAX)]


# Requests


class AccountRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/accounts/{name}: all of the account."""

    parent: _Text = ""
    users: _Names = ()
    limits: Limits = {}
    user_limits: UserLimits = {}
    """User -> limits of this user in this account; the user must be among `users`."""


class QosRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/qos/{name}: all of the QOS."""

    priority: Number = 0
    limits: Limits = {}
    users: _Names = ()
    accounts: _Names = ()
    deny_on_limit: bool = False


class LicenseRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/licenses/{name}."""

    total: Number


class ReservationRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/reservations/{name}. Times are ISO 8601 with a zone; without a start it begins now."""

    end: _Text
    start: _Text | None = None
    users: _Names = ()
    accounts: _Names = ()
    burst_buffer: Annotated[str, msgspec.Meta(max_length=SPACE_CHARACTERS_MAX)]
    """`[plugin:][pool:]#[units]`, more of them after commas."""


class SchedulingRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/scheduling: all of the rules."""

    size_points_per_gib: Number = 0
    default_account: _Text = ""
    default_qos: _Text = ""
    accounts_required: bool = False
    revocations_max: Number = 1
    revoke_after_s: Number = 300


# Answers


class AccountView(View, frozen=True, kw_only=True):
    """One account."""

    name: str
    parent: str | None
    users: tuple[str, ...]
    limits: dict[str, str]
    user_limits: dict[str, dict[str, str]]


class AccountsAnswer(Answer, frozen=True, kw_only=True):
    """Answer about accounts."""

    accounts: tuple[AccountView, ...]


class QosView(View, frozen=True, kw_only=True):
    """One QOS; where users and accounts are empty, everybody may use it."""

    name: str
    priority: int
    limits: dict[str, str]
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    deny_on_limit: bool


class QosAnswer(Answer, frozen=True, kw_only=True):
    """Answer about QOS."""

    qos: tuple[QosView, ...]


class LicenseView(View, frozen=True, kw_only=True):
    """One licence, and how many of it running jobs have."""

    name: str
    total: int
    in_use: int


class LicensesAnswer(Answer, frozen=True, kw_only=True):
    """Answer about licences."""

    licenses: tuple[LicenseView, ...]


class ReservationView(View, frozen=True, kw_only=True):
    """One reservation; `held_bytes` is what its jobs hold of its pools."""

    name: str
    state: str
    """ACTIVE or INACTIVE, as in scontrol."""
    start: str
    end: str
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    burst_buffer: str
    held_bytes: int


class ReservationsAnswer(Answer, frozen=True, kw_only=True):
    """Answer about reservations."""

    reservations: tuple[ReservationView, ...]


class RateView(View, frozen=True, kw_only=True):
    """What was measured of the transfers of one pool; 0 where nothing was."""

    pool: str
    stage_ins: int
    stage_in_bytes_per_s: int
    stage_in_mean_s: float
    stage_outs: int
    stage_out_bytes_per_s: int
    stage_out_mean_s: float
    drain_s: float
    """What stage-out and teardown are expected to take together."""


class SchedulingAnswer(Answer, frozen=True, kw_only=True):
    """Answer about the rules of scheduling."""

    size_points_per_gib: int
    default_account: str | None
    default_qos: str | None
    accounts_required: bool
    revocations_max: int
    revoke_after_s: int
    rates: tuple[RateView, ...]


class EstimateStep(View, frozen=True, kw_only=True):
    """One thing that the job waits for; `until` null: nobody knows."""

    what: str
    until: str | None
    sentence: str


class EstimateView(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/jobs/{id}/estimate; `start` null: nobody knows, and the last step says why."""

    job_id: int
    state: str
    priority: int
    """The effective priority: with nice, QOS and size."""
    start: str | None
    steps: tuple[EstimateStep, ...]


# ---- what is sent and answered about partitions, and about what was used of burst buffers


_PartitionNames: TypeAlias = Annotated[tuple[Text, ...], msgspec.Meta(max_length=ACCOUNT_USERS_MAX)]
PartitionWord: TypeAlias = Literal["UP", "DOWN", "DRAIN", "INACTIVE"]


# Requests


class PartitionRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/partitions/{name}: all of the partition."""

    nodes: Annotated[str, msgspec.Meta(max_length=PARTITION_NODES_CHARACTERS_MAX)] = "ALL"
    """Such as `n[1-4],n7`, or `ALL` for every node that there is; empty: none."""
    state: PartitionWord = "UP"
    default: bool = False
    max_time_s: Number | None = None
    """The longest time limit of its jobs, seconds; null: any."""
    min_nodes: Number = 0
    max_nodes: Number | None = None
    users: _PartitionNames = ()
    accounts: _PartitionNames = ()
    """Who may use it; empty: everybody. Both must hold."""


class UsageResetRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/usage/reset: what an account, or a QOS, has used counts as nothing from here on."""

    account: Text | None = None
    qos: Text | None = None


# Answers


class PartitionView(View, frozen=True, kw_only=True):
    """One partition; `nodes_up` and `cpus` are of those of its nodes that are up."""

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


class PartitionsAnswer(Answer, frozen=True, kw_only=True):
    """Answer about partitions."""

    partitions: tuple[PartitionView, ...]


class UsageView(View, frozen=True, kw_only=True):
    """What an account, one user in it, or a QOS has used of one pool, or (`pool` null) of all pools together."""

    account: str | None
    qos: str | None
    user: str | None
    """Null: all users together."""
    pool: str | None
    byte_minutes: int
    """Bytes (units of the pool) times minutes that they were held."""


class UsageAnswer(Answer, frozen=True, kw_only=True):
    """Answer about what was used of burst buffers."""

    usage: tuple[UsageView, ...]
