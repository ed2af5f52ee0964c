"""Cluster membership, and the encoding of configuration entries.

A configuration entry is the kind (0x02), one byte for the format, then canonical MessagePack. It is chained like any
other entry. A member is identified by its ID, which is never reused. The ID of a founder is its bare name; a member
added by version 6 of the configuration has the ID `name#6`. A replica that lost its disk and was added again is
therefore a different member, even for replicas that still use an older configuration. Promises of its earlier
incarnation do not bind the new member.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.wal.codec import CodecError, EntryKind, kind_of

VOTERS_MAX: Final = 9
"""Maximum number of voters: seven, because more voters slow commits and add little safety; two more during a change."""

LEARNERS_MAX: Final = 4
"""Maximum number of learners: the leader sends a copy of every entry to each."""

ADDRESS_CHARACTERS_MAX: Final = 300
"""`host:port`: a host name has at most 253 characters."""

KEY_BYTES: Final = 32
"""Size of an Ed25519 public key."""

CONFIGURATION_FORMAT: Final = 1
"""Version of the encoding after the two leading bytes."""

_HEAD: Final = bytes([EntryKind.CONFIGURATION, CONFIGURATION_FORMAT])
_ID: Final = re.compile(r"([^#]{1,64})(?:#([1-9][0-9]{0,17}))?", re.ASCII)

MemberId = Annotated[str, Meta(min_length=1, max_length=96)]
_Address = Annotated[str, Meta(max_length=ADDRESS_CHARACTERS_MAX)]
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]


class ChangeKind(IntEnum):
    """Kind of membership change. Values are append-only and never reused (law 12)."""

    FOUND = 0
    ADD = 1
    """A new member joins as a learner, without a vote."""
    PROMOTE = 2
    """A learner that has caught up becomes a voter."""
    REMOVE = 3
    REPLACE = 4
    """A member that lost its disk leaves and returns under a new ID as a learner."""
    RECOVER = 5
    """After the loss of a majority, one member continues alone, in a new incarnation of the cluster."""
    UPDATE = 6
    """A member's address changes; voters stay the same."""

    @property
    def word(self) -> str:
        """Name of the action in messages and JSON, for example `add`."""
        return self.name.lower()


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Replica of the cluster: its ID, and its addresses for peers and clients."""

    id: MemberId
    peer: _Address = ""
    api: _Address = ""
    key: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    """Public key that verifies the member's signatures; empty until the cluster knows it."""

    @property
    def name(self) -> str:
        """Name of the replica, as in its certificate."""
        return name_of(self.id)

    @property
    def incarnation(self) -> int:
        """Version of the configuration that added the member; 0 for a founder."""
        return incarnation_of(self.id)


class Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Difference from the previous configuration, and its author, for audits."""

    action: ChangeKind
    member: MemberId | None
    """The member that changed; None for founding."""
    actor: Annotated[str, Meta(max_length=128)]
    at: _Number
    """Time by the leader's clock, microseconds since the epoch."""
    id: Annotated[bytes, Meta(max_length=64)] = b""
    """ID of the operator's command. For a change by the leader: ID of the last command before the change, or empty."""


class Configuration(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Members, voters and learners each sorted by ID. Version 1 is the first one agreed on."""

    version: _Number
    voters: Annotated[tuple[Member, ...], Meta(max_length=VOTERS_MAX)]
    learners: Annotated[tuple[Member, ...], Meta(max_length=LEARNERS_MAX)]
    change: Change

    @property
    def voter_ids(self) -> tuple[str, ...]:
        """IDs of the voters, sorted."""
        return tuple(member.id for member in self.voters)

    @property
    def majority(self) -> int:
        """Number of voters that form a majority."""
        return len(self.voters) // 2 + 1

    def members(self) -> Iterator[Member]:
        """Yield all members: voters, then learners."""
        yield from self.voters
        yield from self.learners

    def member(self, name: str) -> Member | None:
        """Return the member with this name or ID, or None."""
        return next((member for member in self.members() if name in (member.id, member.name)), None)

    def by_id(self, identity: str) -> Member | None:
        """Return the member with this ID, or None."""
        return next((member for member in self.members() if member.id == identity), None)

    def votes(self, identity: str) -> bool:
        """Return whether the member with this ID is a voter."""
        return any(member.id == identity for member in self.voters)

    def holds(self, identity: str) -> bool:
        """Return whether this ID belongs to a member."""
        return any(member.id == identity for member in self.members())


class ConfigurationAt(msgspec.Struct, frozen=True, array_like=True):
    """Configuration with the index of its entry; index 0 for the initial configuration, which has no entry."""

    index: _Number
    configuration: Configuration


def name_of(identity: str) -> str:
    """Return the name part of a member's ID: `r2` of `r2#6`."""
    return identity.partition("#")[0]


def incarnation_of(identity: str) -> int:
    """Return the configuration version that added this member; 0 for a founder or a malformed ID."""
    found = _ID.fullmatch(identity)
    return int(found[2]) if found is not None and found[2] is not None else 0


def identity_of(name: str, version: int) -> str:
    """Return the ID of a member called `name`, added by configuration `version`."""
    return f"{name}#{version}"


def initial(members: tuple[Member, ...], *, version: int = 0) -> Configuration:
    """Return the initial membership from a configuration file. All members vote.

    Use `version` 0 for the configuration at start, and 1 for the configuration to propose.
    """
    voters = tuple(sorted(members, key=lambda member: member.id))
    return Configuration(version, voters, (), Change(ChangeKind.FOUND, None, "", 0))


def unknown() -> Configuration:
    """Return the initial configuration of a joining replica: no members, until the leader sends them."""
    return initial(())


def check(configuration: Configuration) -> str | None:
    """Return the first problem with the members, or None."""
    for members in (configuration.voters, configuration.learners):
        ids = [member.id for member in members]
        if ids != sorted(set(ids)):
            return "the members are not sorted by ID, or one occurs twice"
    names = [member.name for member in configuration.members()]
    if len(set(names)) != len(names):
        return "a name occurs twice"
    for member in configuration.members():
        if _ID.fullmatch(member.id) is None:
            return f"{member.id!r} is not a valid member ID"
        if len(member.key) not in (0, KEY_BYTES):
            return f"the key of {member.id!r} has {len(member.key)} bytes instead of {KEY_BYTES}"
        if member.incarnation > configuration.version:
            return f"{member.id!r} was added by a later version than {configuration.version}"
    if not configuration.voters:
        return "the configuration has no voters"
    return None


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Configuration, strict=True)


def encode_configuration(configuration: Configuration) -> bytes:
    """Encode a configuration as entry data.

    Raises:
        CodecError: The configuration could not elect a leader.
    """
    wrong = check(configuration)
    if wrong is not None or configuration.version == 0:
        raise CodecError(f"the configuration cannot be encoded: {wrong or 'it has version 0'}")
    try:
        data = _HEAD + _encoder.encode(configuration)
        _decoder.decode(memoryview(data)[len(_HEAD) :])
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise CodecError(f"the configuration cannot be encoded: {error}") from error
    return data


def decode_configuration(data: bytes) -> Configuration:
    """Decode the configuration in an entry.

    Raises:
        CodecError: The entry has another kind or format, or its encoding is not canonical.
    """
    if kind_of(data) is not EntryKind.CONFIGURATION:
        raise CodecError(f"the entry is not a configuration: its first byte is {data[0]}")
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
        raise CodecError(f"the configuration is not valid: {wrong or 'it has version 0'}")
    if _encoder.encode(configuration) != body:
        raise CodecError("the configuration is not canonical: encoding it again gives different bytes")
    return configuration


def is_configuration(data: bytes) -> bool:
    """Return whether an entry is a configuration, judged by its first byte."""
    return data[:1] == _HEAD[:1]
