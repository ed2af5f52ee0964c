"""What is sent and answered about partitions, what was used of burst buffers, and changes of waiting jobs."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from cluster.client.requests import MAIL_TYPES_MAX, Command, Number
from cluster.client.views import View
from replica.limits import ACCOUNT_USERS_MAX, DEPENDENCIES_MAX, LICENSES_PER_JOB_MAX, PARTITION_NODES_CHARACTERS_MAX

TEXT_CHARACTERS_MAX = 4_096
"""One text of a change, characters: longer than any name, comment or address may be."""

_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]
_Names: TypeAlias = Annotated[tuple[_Text, ...], msgspec.Meta(max_length=ACCOUNT_USERS_MAX)]
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
    users: _Names = ()
    accounts: _Names = ()
    """Who may use it; empty: everybody. Both must hold."""


class PartitionDeleteRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/partitions/{name}/delete."""


class UsageResetRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/usage/reset: what an account, or a QOS, has used counts as nothing from here on."""

    account: _Text | None = None
    qos: _Text | None = None


class UpdateRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/update: what is null, or left out, stays as it is."""

    name: _Text | None = None
    time_limit_s: Number | None = None
    priority: Number | None = None
    nice: Number | None = None
    begin_at: _Text | None = None
    """ISO 8601 with a zone; empty: at once."""
    deadline: _Text | None = None
    """ISO 8601 with a zone; empty: none any more."""
    dependencies: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=DEPENDENCIES_MAX + 1)] | None = None
    """Such as `afterok:12` or `singleton`, all of them; empty: none any more."""
    dependency_any: bool = False
    """Whether one of these dependencies is enough."""
    account: _Text | None = None
    qos: _Text | None = None
    reservation: _Text | None = None
    partition: _Text | None = None
    """Empty, as for the three before it: none any more, or the default one."""
    licenses: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=LICENSES_PER_JOB_MAX)] | None = None
    comment: _Text | None = None
    requeue: bool | None = None
    mail_types: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAIL_TYPES_MAX)] | None = None
    mail_user: _Text | None = None
    bb: str | None = None
    bbf: str | None = None
    """What it asks of burst buffers instead of all that it asked for: the text of --bb, what a --bbf file holds."""


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


class PartitionsAnswer(View, frozen=True, kw_only=True):
    """Answer about partitions."""

    revision: int
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


class UsageAnswer(View, frozen=True, kw_only=True):
    """Answer about what was used of burst buffers."""

    revision: int
    usage: tuple[UsageView, ...]
