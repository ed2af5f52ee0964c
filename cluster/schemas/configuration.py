"""Schemas of the replicated configuration and of online pool changes."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from forebay.cluster.schemas.base import Answer, Command, Request, View
from forebay.cluster.schemas.jobs import PoolView
from forebay.replica.values import (
    NAME_CHARACTERS_MAX,
    PATH_BYTES_MAX,
    SETTING_CHARACTERS_MAX,
    SETTINGS_MAX,
    SIZE_BYTES_MAX,
)

KEY_CHARACTERS_MAX = 64
"""Length of a configuration key, characters; all keys are much shorter."""

LINES_MAX = 1_000_000
"""Largest line or column number of a position in a file."""

SIZE_CHARACTERS_MAX = 64
"""Length of a size written as text, characters: all its digits and a suffix."""

UnitWord: TypeAlias = Literal["bytes", "nodes", "count"]

_NameText = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
_SizeText = Annotated[str, msgspec.Meta(max_length=SIZE_CHARACTERS_MAX)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=LINES_MAX)]


# Requests


class SettingBody(Request, frozen=True, kw_only=True):
    """Configuration key as written in a file. Errors name its position, or else the key."""

    key: Annotated[str, msgspec.Meta(max_length=KEY_CHARACTERS_MAX)]
    value: Annotated[str, msgspec.Meta(max_length=SETTING_CHARACTERS_MAX)]
    file: Annotated[str, msgspec.Meta(max_length=PATH_BYTES_MAX)] = ""
    line: _Place = 0
    column: _Place = 0


Settings: TypeAlias = Annotated[tuple[SettingBody, ...], msgspec.Meta(max_length=SETTINGS_MAX)]
_Revision = Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)]


class ConfigureRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/configuration, applied completely in one entry or not at all.

    Without `partial`, omitted keys of burst_buffer.conf get Slurm's default. With `expect_revision`, the request is
    rejected if the configuration has changed since that revision.
    """

    settings: Settings
    partial: bool = False
    expect_revision: _Revision | None = None


class CompareRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/configuration/diff: show the effect of a change, or its rejection, without applying it."""

    settings: Settings
    partial: bool = False
    expect_revision: _Revision | None = None


class PoolAddRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/pools/{name}/add. Sizes are text; a size without a suffix counts units of the pool."""

    quantity: _SizeText
    granularity: _SizeText | None = None
    """Default: the configuration's Granularity."""
    unit: UnitWord = "bytes"
    default: bool | None = None
    filesystem: _NameText | None = None
    """Shared filesystem for its buffers."""


class PoolChangeRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/pools/{name}/change. Omitted fields stay unchanged.

    `out_of_service`: `all` takes the whole pool out.
    """

    quantity: _SizeText | None = None
    granularity: _SizeText | None = None
    out_of_service: _SizeText | None = None
    unit: UnitWord | None = None
    default: bool | None = None
    filesystem: _NameText | None = None
    """New shared filesystem for its buffers; empty: none. Allowed only while the pool is unused."""


class FilesystemLayoutBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placement of new files on a shared filesystem; 0 and an empty pool are the filesystem's defaults."""

    adapter: _NameText
    """none, lustre, cephfs, beegfs or command."""
    stripe_count: int = 0
    """Targets of one file; -1: all."""
    stripe_bytes: int = 0
    pool: _NameText = ""


class FilesystemAddRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/filesystems/{name}/add. Omitted adapters are kept, or have their defaults if it is new."""

    path: Annotated[str, msgspec.Meta(max_length=PATH_BYTES_MAX)]
    quota: _NameText | None = None
    """Adapter that limits buffers to their capacity: auto, none, project, btrfs, lustre, cephfs, beegfs, gpfs or
    command.
    """
    layout: FilesystemLayoutBody | None = None


# Responses


class SettingView(View, frozen=True, kw_only=True):
    """Configuration key; `value` is its text in a file, empty if not set."""

    key: str
    value: str
    default: str
    slurm: bool
    """True if the key belongs to burst_buffer.conf; the others are Forebay's own."""
    about: str


class ConfigurationAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET and POST /v1/configuration."""

    changed_revision: int
    """Revision of the last change, 0 for none. `expect_revision` is compared with it."""
    settings: tuple[SettingView, ...]
    text: str
    """Configuration file that changes nothing when applied."""
    burst_buffer_conf: str
    """Configuration as Slurm's burst_buffer.conf, without Forebay's own keys."""


class DifferenceView(View, frozen=True, kw_only=True):
    """Key that differs; the value is empty if the key is not set."""

    key: str
    before: str
    after: str


class CompareAnswer(View, frozen=True, kw_only=True):
    """Response of POST /v1/configuration/diff."""

    revision: int
    """Revision compared with; pass it as --expect-revision of a dependent change."""
    changed_revision: int
    feature_level: int
    """From level 3 on, the configuration has a revision that changes can refer to."""
    differences: tuple[DifferenceView, ...]


class PoolRemovedAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/pools/{name}/remove: the remaining pools."""

    removed: str
    pools: tuple[PoolView, ...]
