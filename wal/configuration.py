"""Who agrees: a configuration of the cluster, and the bytes of the entry that brings it into force.

The entry is its kind (0x02), one byte for the format, then canonical MessagePack; it is chained like any other. A
member is known by its id, which nobody else ever has: founders have their bare name, whoever was added by version 6 of
the configuration has `name#6`. So a replica that lost its disk and was added again is somebody else to those who count
votes by an older configuration, and nothing that its earlier self promised is expected of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from wal.codec import CodecError, Kind, kind_of

VOTERS_MAX: Final = 9
"""Members that vote, count: more than seven cost more in every commit than they add in safety; two for a change."""

LEARNERS_MAX: Final = 4
"""Members that do not vote yet, count: each costs the leader a copy of everything it sends."""

ADDRESS_CHARACTERS_MAX: Final = 300
"""`host:port`: a host name has at most 253 characters."""

KEY_BYTES: Final = 32
"""An Ed25519 public key."""

CONFIGURATION_FORMAT: Final = 1
"""Version of the encoding after the two leading bytes."""

_HEAD: Final = bytes([Kind.CONFIGURATION, CONFIGURATION_FORMAT])
_ID: Final = re.compile(r"([^#]{1,64})(?:#([1-9][0-9]{0,17}))?", re.ASCII)

MemberId = Annotated[str, Meta(min_length=1, max_length=96)]
_Address = Annotated[str, Meta(max_length=ADDRESS_CHARACTERS_MAX)]
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]


class Action(IntEnum):
    """What a change does; wire numbers, append-only, never reused (law 12)."""

    FOUND = 0
    ADD = 1
    """A new member, which learns and does not vote."""
    PROMOTE = 2
    """A member that has caught up votes from now on."""
    REMOVE = 3
    REPLACE = 4
    """A member that lost its disk leaves, and comes back under a new id as one that learns."""
    RECOVER = 5
    """A majority is lost: one member is left, and is a majority of itself, in a new incarnation of the cluster."""
    UPDATE = 6
    """A member is reached at another address; who votes stays."""

    @property
    def word(self) -> str:
        """As in sentences and JSON, for example `add`."""
        return self.name.lower()


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One replica: who it is, and where its peers and its clients reach it."""

    id: MemberId
    peer: _Address = ""
    api: _Address = ""
    key: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    """The public key that it signs with; empty until the cluster has learned it."""

    @property
    def name(self) -> str:
        """The replica's name, as in its certificate."""
        return name_of(self.id)

    @property
    def incarnation(self) -> int:
        """The version of the configuration that added it; 0 for a founder."""
        return incarnation_of(self.id)


class Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a configuration changed in the one before it, and who asked, for audits."""

    action: Action
    member: MemberId | None
    """Whom it is about; None for founding."""
    actor: Annotated[str, Meta(max_length=128)]
    at: _Number
    """By the leader's clock, microseconds since the epoch."""
    id: Annotated[bytes, Meta(max_length=64)] = b""
    """The id of the operator's command, or of the last one before what a leader does by itself; empty if none was."""


class Configuration(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The members, each sorted by id. Version 1 is the founding one; 0 stands for none that was agreed on."""

    version: _Number
    voters: Annotated[tuple[Member, ...], Meta(max_length=VOTERS_MAX)]
    learners: Annotated[tuple[Member, ...], Meta(max_length=LEARNERS_MAX)]
    change: Change

    @property
    def voter_ids(self) -> tuple[str, ...]:
        """Who votes, sorted."""
        return tuple(member.id for member in self.voters)

    @property
    def majority(self) -> int:
        """Voters that make a majority, count."""
        return len(self.voters) // 2 + 1

    def members(self) -> Iterator[Member]:
        """Everybody: voters, then learners."""
        yield from self.voters
        yield from self.learners

    def member(self, name: str) -> Member | None:
        """The member with this name or id."""
        return next((member for member in self.members() if name in (member.id, member.name)), None)

    def by_id(self, identity: str) -> Member | None:
        """The member with this id."""
        return next((member for member in self.members() if member.id == identity), None)

    def votes(self, identity: str) -> bool:
        """Whether the member with this id votes."""
        return any(member.id == identity for member in self.voters)

    def holds(self, identity: str) -> bool:
        """Whether somebody with this id is a member."""
        return any(member.id == identity for member in self.members())


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A configuration and the index of the entry that brought it into force; 0 for what no entry did."""

    index: _Number
    configuration: Configuration


def name_of(identity: str) -> str:
    """The name in a member's id: `r2` of `r2#6`."""
    return identity.partition("#")[0]


def incarnation_of(identity: str) -> int:
    """The version of the configuration that added the member with this id; 0 for a founder, or what is no id."""
    found = _ID.fullmatch(identity)
    return int(found[2]) if found is not None and found[2] is not None else 0


def identity_of(name: str, version: int) -> str:
    """The id of a member called `name` that is added by version `version` of the configuration."""
    return f"{name}#{version}"


def initial(members: tuple[Member, ...], *, version: int = 0) -> Configuration:
    """What a configuration file says: everybody votes. Version 1 to propose it, 0 to begin from it."""
    voters = tuple(sorted(members, key=lambda member: member.id))
    return Configuration(version, voters, (), Change(Action.FOUND, None, "", 0))


def unknown() -> Configuration:
    """What a replica begins with that joins a cluster: it will be told who is in it, and counts nobody until then."""
    return initial(())


def check(configuration: Configuration) -> str | None:
    """Say what is wrong with the members; None if nothing is."""
    for members in (configuration.voters, configuration.learners):
        ids = [member.id for member in members]
        if ids != sorted(set(ids)):
            return "the members are not sorted by id, each once"
    names = [member.name for member in configuration.members()]
    if len(set(names)) != len(names):
        return "a name is there twice"
    for member in configuration.members():
        if _ID.fullmatch(member.id) is None:
            return f"{member.id!r} is no member's id"
        if len(member.key) not in (0, KEY_BYTES):
            return f"the key of {member.id!r} has {len(member.key)} bytes instead of {KEY_BYTES}"
        if member.incarnation > configuration.version:
            return f"{member.id!r} was added by a later version than {configuration.version}"
    if not configuration.voters:
        return "nobody votes"
    return None


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Configuration, strict=True)


def encode_configuration(configuration: Configuration) -> bytes:
    """The entry data of a configuration. CodecError for one that nobody could be led by."""
    wrong = check(configuration)
    if wrong is not None or configuration.version == 0:
        raise CodecError(f"the configuration cannot be encoded: {wrong or 'it has no version'}")
    try:
        data = _HEAD + _encoder.encode(configuration)
        _decoder.decode(memoryview(data)[len(_HEAD) :])
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise CodecError(f"the configuration cannot be encoded: {error}") from error
    return data


def decode_configuration(data: bytes) -> Configuration:
    """The configuration in an entry. CodecError for another kind or format, or what is not the one encoding of it."""
    if kind_of(data) is not Kind.CONFIGURATION:
        raise CodecError(f"the entry is no configuration: its first byte is {data[0]}")
    if data[1:2] != _HEAD[1:]:
        raise CodecError(
            f"the configuration has format {data[1:2].hex() or 'none'}; this release reads {CONFIGURATION_FORMAT:02x}"
        )
    body = memoryview(data)[len(_HEAD) :]
    try:
        configuration = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError) as error:
        raise CodecError(f"the configuration cannot be decoded: {error}") from error
    wrong = check(configuration)
    if wrong is not None or configuration.version == 0:
        raise CodecError(f"the configuration is not sound: {wrong or 'it has no version'}")
    if _encoder.encode(configuration) != body:
        raise CodecError("the configuration is not canonical: encoded again it gives other bytes")
    return configuration


def is_configuration(data: bytes) -> bool:
    """Whether an entry is a configuration, by its first byte."""
    return data[:1] == _HEAD[:1]
