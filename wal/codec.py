"""The bytes of an entry: one byte for its kind, one for the format, then a batch as canonical MessagePack.

A batch has exactly one encoding, since the ledger's digest is of bytes. Records are arrays with integer tags (law 12).
A later release may append a field with a default: entries that were written without it stay valid.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from replica.messages import EVENTS, Batch, Entry, FeatureLevelRaised, ReleaseNeeded, features
from replica.values import Instant, Revision
from wal.records import ENTRY_MAX_BYTES


class Kind(IntEnum):
    """What an entry is, by its first byte; wire numbers, append-only, never reused."""

    NO_OP = 0
    BATCH = 1
    CONFIGURATION = 2
    """Who is a member: see wal.configuration."""


_KINDS: Final = {bytes([kind]): kind for kind in Kind}

NO_OP: Final = bytes([Kind.NO_OP])
"""What the entry begins with with which a new leader begins its term; the rest is its id."""

LEADER_MAX_BYTES: Final = 128
"""Bytes of a leader's id."""

BATCH_FORMAT: Final = 1
"""Version of the encoding after the two leading bytes."""

_HEAD: Final = bytes([Kind.BATCH, BATCH_FORMAT])
_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Batch, strict=True)
_plain_decoder: Final = msgspec.msgpack.Decoder()


class _BatchHead(msgspec.Struct, frozen=True, array_like=True):
    base: Revision
    at: Instant


_head_decoder: Final = msgspec.msgpack.Decoder(_BatchHead)
_raw_decoder: Final = msgspec.msgpack.Decoder(tuple[int, int, tuple[msgspec.Raw, ...]])


class _BatchShape(_BatchHead, frozen=True, array_like=True):
    entries: list[msgspec.Raw]


_shape_decoder: Final = msgspec.msgpack.Decoder(_BatchShape)


class CodecError(ValueError):
    """The bytes are not the one encoding of anything that this release knows; in the ledger that stops the replica."""


class WrittenLater(ReleaseNeeded, CodecError):
    """The entry holds an event that this release does not know: a later release wrote it."""


_TAGS: Final = frozenset(kind.__struct_config__.tag for kind in EVENTS)
_RAISED: Final = FeatureLevelRaised.__struct_config__.tag


def encode_batch(batch: Batch) -> bytes:
    """The entry data of a batch. CodecError beyond ENTRY_MAX_BYTES, or if a value has no encoding."""
    try:
        data = _HEAD + _encoder.encode(batch)
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise CodecError(f"the batch cannot be encoded: {error}") from error
    return _checked_size(data)


def encode_entry(entry: Entry) -> bytes:
    """One entry of a batch, as it stands in the batch's bytes. CodecError if a value has no encoding."""
    try:
        return _encoder.encode(entry)
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise CodecError(f"the entry cannot be encoded: {error}") from error


def batch_of_encoded(base: Revision, at: Instant, entries: Iterable[bytes]) -> bytes:
    """What `encode_batch` gives for a batch of these entries, which `encode_entry` encoded. CodecError if too large."""
    return _checked_size(_HEAD + _encoder.encode((base, at, tuple(map(msgspec.Raw, entries)))))


class SettledCommands(NamedTuple):
    """What a batch holds, not read any further: its base, when it was decided, and its commands as they are encoded."""

    base: Revision
    at: Instant
    encoded: tuple[bytes, ...]


def commands_of(data: bytes) -> SettledCommands | None:
    """The commands in the data of an entry, as `encode_entry` encodes each; None for another kind. CodecError."""
    if kind_of(data) is not Kind.BATCH:
        return None
    try:
        base, at, entries = _raw_decoder.decode(memoryview(data)[len(_HEAD) :])
    except msgspec.MsgspecError as error:
        raise CodecError(f"the batch cannot be decoded: {error}") from error
    return SettledCommands(Revision(base), Instant(at), tuple(map(bytes, entries)))


def one_of_batch(data: bytes, position: int) -> bytes:
    """A batch of one entry alone, that at `position` in a batch's data, as if it had been settled by itself.

    Nothing else of the batch is read. CodecError; IndexError beyond its last entry.
    """
    found = commands_of(data)
    if found is None:
        raise CodecError("the entry is not a batch")
    return batch_of_encoded(Revision(found.base + position), found.at, (found.encoded[position],))


def _checked_size(data: bytes) -> bytes:
    if len(data) > ENTRY_MAX_BYTES:
        raise CodecError(
            f"the batch has {len(data)} bytes; an entry has at most {ENTRY_MAX_BYTES}: propose smaller batches"
        )
    return data


def decode_batch(data: bytes) -> Batch:
    """The batch that `encode_batch` encoded, in this release or an earlier one.

    WrittenLater for an event of a later release, naming the one that is needed where the batch says it. CodecError for
    another kind or format, an unknown tag, a wrong type, trailing bytes or fields, or any second way to
    write the same batch.
    """
    if len(data) > ENTRY_MAX_BYTES:
        raise CodecError(f"the entry has {len(data)} bytes; an entry has at most {ENTRY_MAX_BYTES}")
    if kind_of(data) is not Kind.BATCH:
        raise CodecError(f"the entry is not a batch: its first byte is {data[0]}, a batch has {Kind.BATCH.value}")
    if data[1:2] != _HEAD[1:]:
        raise CodecError(f"the batch has format {data[1:2].hex() or 'none'}; this release reads {BATCH_FORMAT:02x}")
    body = memoryview(data)[len(_HEAD) :]
    try:
        batch = _decoder.decode(body)
        again = _encoder.encode(batch)
    except (msgspec.MsgspecError, UnicodeError, ValueError, OverflowError, RecursionError) as error:
        _raise_if_written_later(bytes(body))
        raise CodecError(f"the batch cannot be decoded: {error}") from error
    if again != body and not is_earlier_form(bytes(body), again):
        raise CodecError("the batch is not canonical: encoded again it gives other bytes")
    return batch


def instant_of(data: bytes) -> Instant | None:
    """When the batch in an entry was decided, without reading what it holds; None for another kind. CodecError."""
    if kind_of(data) is not Kind.BATCH:
        return None
    try:
        return _head_decoder.decode(memoryview(data)[len(_HEAD) :]).at
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise CodecError(f"the batch cannot be decoded: {error}") from error


def kind_of(data: bytes) -> Kind:
    """The kind of an entry, by its first byte. CodecError if there is none or it is unknown."""
    kind = _KINDS.get(data[:1])
    if kind is None:
        raise CodecError(f"the entry begins with {data[:1].hex() or 'nothing'}, which is no known kind")
    if kind is Kind.NO_OP and len(data) > len(NO_OP) + LEADER_MAX_BYTES:
        raise CodecError(f"the entry is a no-op of a leader whose id has {len(data) - len(NO_OP)} bytes")
    return kind


def no_op_of(leader: str) -> bytes:
    """Return the entry with which a leader begins its term: nothing but its id, so that the ledger says who led."""
    return NO_OP + leader.encode()[:LEADER_MAX_BYTES]


def leader_of(data: bytes) -> str:
    """Return the id in a no-op; empty where it says none, and for an entry of another kind. CodecError."""
    return "" if kind_of(data) is not Kind.NO_OP else data[len(NO_OP) :].decode("utf-8", "replace")


def revision_after(data: bytes, before: int) -> int:
    """The revision after this entry when `before` was the one before it: a batch with another base changes nothing."""
    if kind_of(data) is not Kind.BATCH:
        return before
    batch = decode_batch(data)
    return before + len(batch.entries) if batch.base == before else before


def _raise_if_written_later(body: bytes) -> None:
    """Raise WrittenLater if what could not be decoded has the shape of a batch with an event that is not known here.

    The release that is needed stands in the event that raised the feature level, if that one is in the same batch; if
    it came before, this replica has stopped there.
    """
    try:
        plain: object = _plain_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, ValueError, OverflowError, RecursionError):
        return
    match plain:
        case [int(base), int(), [*entries], *_]:
            pass
        case _:
            return
    level, release = 0, ""
    for revision, entry in enumerate(entries, start=base + 1):
        match entry:
            case [_, _, _, [*events], *_]:
                pass
            case _:
                return
        for event in events:
            match event:
                case [tag, int(to), str(name)] if tag == _RAISED and to > features.FEATURE_LEVEL_KNOWN:
                    level, release = to, name
                case [int(tag), *_] if tag not in _TAGS:
                    what = (
                        f"the batch cannot be decoded: it has an event with tag {tag}, which this release does not know"
                    )
                    raise WrittenLater(what, level=level, release=release, revision=revision)


def is_earlier_form(body: bytes, again: bytes) -> bool:
    """Whether `body` is canonical and differs from `again` only by fields that records did not have yet. Both must be
    sound MessagePack.
    """
    plain: object = _plain_decoder.decode(body)
    return _encoder.encode(plain) == body and _begins(plain, _plain_decoder.decode(again))


def _begins(earlier: object, later: object) -> bool:
    if isinstance(earlier, list) and isinstance(later, list):
        return len(earlier) <= len(later) and all(map(_begins, earlier, later))
    if isinstance(earlier, dict) and isinstance(later, dict):
        return list(earlier) == list(later) and all(map(_begins, earlier.values(), later.values()))
    return type(earlier) is type(later) and earlier == later


def counted_revision_after(data: bytes, before: int) -> int:
    """What `revision_after` says of an entry that is known to be sound, at an eighth of its cost. CodecError."""
    if kind_of(data) is not Kind.BATCH:
        return before
    try:
        batch = _shape_decoder.decode(memoryview(data)[len(_HEAD) :])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise CodecError(f"the batch cannot be decoded: {error}") from error
    return before + len(batch.entries) if batch.base == before else before
