"""What is sent and answered about the configuration and about pools that are changed while they are in use."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from cluster.schemas.base import Answer, Command, Request, View
from cluster.schemas.jobs import PoolView
from replica.values import NAME_CHARACTERS_MAX, PATH_BYTES_MAX, SETTING_CHARACTERS_MAX, SETTINGS_MAX, SIZE_BYTES_MAX

KEY_CHARACTERS_MAX = 64
"""A key of the configuration, characters: none is nearly as long."""

LINES_MAX = 1_000_000
"""A line or column in a file, count: for people to find a place."""

SIZE_CHARACTERS_MAX = 64
"""A size as text, characters: more digits than one may have, and a suffix."""

UnitWord: TypeAlias = Literal["bytes", "nodes", "count"]

_NameText = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
_SizeText = Annotated[str, msgspec.Meta(max_length=SIZE_CHARACTERS_MAX)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=LINES_MAX)]


# Requests


class SettingBody(Request, frozen=True, kw_only=True):
    """One key of the configuration as it is written, and where: refusals name the place, or else the key."""

    key: Annotated[str, msgspec.Meta(max_length=KEY_CHARACTERS_MAX)]
    value: Annotated[str, msgspec.Meta(max_length=SETTING_CHARACTERS_MAX)]
    file: Annotated[str, msgspec.Meta(max_length=PATH_BYTES_MAX)] = ""
    line: _Place = 0
    column: _Place = 0


Settings: TypeAlias = Annotated[tuple[SettingBody, ...], msgspec.Meta(max_length=SETTINGS_MAX)]
_Revision = Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)]


class ConfigureRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/configuration: all of it is applied in one entry, or nothing.

    Without `partial`, keys of burst_buffer.conf that are not named get Slurm's default. `expect_revision`: refused if
    the configuration was changed later.
    """

    settings: Settings
    partial: bool = False
    expect_revision: _Revision | None = None


class CompareRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/configuration/diff: what such a change would do, or why it would be refused. Nothing changes."""

    settings: Settings
    partial: bool = False
    expect_revision: _Revision | None = None


class PoolAddRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/pools/{name}/add. Sizes are text; without a suffix they are units of the pool."""

    quantity: _SizeText
    granularity: _SizeText | None = None
    """The configuration's Granularity if left out."""
    unit: UnitWord = "bytes"
    default: bool | None = None
    place: _NameText | None = None
    """The place that its buffers are to lie in."""


class PoolChangeRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/pools/{name}/change: what is left out stays as it is. `out_of_service`: `all` for everything."""

    quantity: _SizeText | None = None
    granularity: _SizeText | None = None
    out_of_service: _SizeText | None = None
    unit: UnitWord | None = None
    default: bool | None = None
    place: _NameText | None = None
    """The place that its buffers are to lie in from now on; empty: none. Only while nobody uses the pool."""


class PlaceAddRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/places/{name}/add."""

    path: Annotated[str, msgspec.Meta(max_length=PATH_BYTES_MAX)]


# Answers


class SettingView(View, frozen=True, kw_only=True):
    """One key of the configuration; `value` is as it is written in a file, empty where nothing is."""

    key: str
    value: str
    default: str
    slurm: bool
    """Whether it is a key of burst_buffer.conf; the others are Forebay's own."""
    about: str


class ConfigurationAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET and POST /v1/configuration."""

    changed_revision: int
    """The revision at which it was changed last, 0 for never: what expect_revision is compared with."""
    settings: tuple[SettingView, ...]
    text: str
    """As a file that changes nothing when it is applied."""
    burst_buffer_conf: str
    """As Slurm's burst_buffer.conf: without what only Forebay knows."""


class DifferenceView(View, frozen=True, kw_only=True):
    """One key that differs; empty where nothing is written for it."""

    key: str
    before: str
    after: str


class CompareAnswer(View, frozen=True, kw_only=True):
    """Answer of POST /v1/configuration/diff."""

    revision: int
    """What it was compared at: --expect-revision of a change that is to be based on it."""
    changed_revision: int
    feature_level: int
    """From level 3 on the configuration has a revision, and changes may be based on one."""
    differences: tuple[DifferenceView, ...]


class PoolRemovedAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/pools/{name}/remove: what is left."""

    removed: str
    pools: tuple[PoolView, ...]
