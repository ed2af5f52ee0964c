"""What is sent and answered about partitions, and about what was used of burst buffers."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from cluster.client.requests import Command, Number, Text
from cluster.client.views import View
from replica.values.limits import ACCOUNT_USERS_MAX, PARTITION_NODES_CHARACTERS_MAX

_Names: TypeAlias = Annotated[tuple[Text, ...], msgspec.Meta(max_length=ACCOUNT_USERS_MAX)]
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
