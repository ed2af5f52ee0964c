"""Encoding of an entry: one byte for the kind, one byte for the format, then a batch as canonical MessagePack.

A batch has exactly one encoding, because the ledger's digest covers bytes. Records are arrays with integer tags (law
12). A later release may append a field that has a default; entries without the field stay valid.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from forebay.replica.messages import EVENTS, Batch, Entry, FeatureLevelRaised, ReleaseNeeded, features
from forebay.replica.values import Instant, Revision
from forebay.wal.records import ENTRY_MAX_BYTES


class EntryKind(IntEnum):
    """Kind of an entry, given by its first byte. Values are append-only and never reused."""

    NO_OP = 0
    BATCH = 1
    CONFIGURATION = 2
    """Membership of the cluster: see wal.configuration."""


_KINDS: Final = {bytes([kind]): kind for kind in EntryKind}

NO_OP: Final = bytes([EntryKind.NO_OP])
"""First byte of the entry that begins a leader's term; the leader's ID follows."""

LEADER_MAX_BYTES: Final = 128
"""Maximum length of a leader's ID, bytes."""

BATCH_FORMAT: Final = 1
"""Version of the encoding after the two leading bytes."""

_HEAD: Final = bytes([EntryKind.BATCH, BATCH_FORMAT])
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
    """Entry data that this release cannot decode, or that is not canonical. Such an entry stops the replica."""


class WrittenLater(ReleaseNeeded, CodecError):
    """Entry with an event that this release does not know, because a later release wrote the entry."""


_TAGS: Final = frozenset(kind.__struct_config__.tag for kind in EVENTS)
_RAISED: Final = FeatureLevelRaised.__struct_config__.tag


def encode_batch(batch: Batch) -> bytes:
    """Encode a batch as entry data.

    Raises:
        CodecError: The batch exceeds ENTRY_MAX_BYTES, or a value has no encoding.
    """
    try:
        data = _HEAD + _encoder.encode(batch)
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise CodecError(f"the batch cannot be encoded: {error}") from error
    return _checked_size(data)


def encode_entry(entry: Entry) -> bytes:
    """Encode one entry of a batch exactly as it appears inside the batch.

    Raises:
        CodecError: A value has no encoding.
    """
    try:
        return _encoder.encode(entry)
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise CodecError(f"the entry cannot be encoded: {error}") from error


def batch_of_encoded(base: Revision, at: Instant, entries: Iterable[bytes]) -> bytes:
    """Encode a batch from entries that `encode_entry` encoded; the result equals that of `encode_batch`.

    Raises:
        CodecError: The batch exceeds ENTRY_MAX_BYTES.
    """
    return _checked_size(_HEAD + _encoder.encode((base, at, tuple(map(msgspec.Raw, entries)))))


class SettledCommands(NamedTuple):
    """Partly decoded batch: base revision, time, and the commands, which are still encoded."""

    base: Revision
    at: Instant
    encoded: tuple[bytes, ...]


def commands_of(data: bytes) -> SettledCommands | None:
    """Return the encoded commands of a batch; None if the entry is of another kind.

    Raises:
        CodecError: The entry cannot be decoded.
    """
    if kind_of(data) is not EntryKind.BATCH:
        return None
    try:
        base, at, entries = _raw_decoder.decode(memoryview(data)[len(_HEAD) :])
    except msgspec.MsgspecError as error:
        raise CodecError(f"the batch cannot be decoded: {error}") from error
    return SettledCommands(Revision(base), Instant(at), tuple(map(bytes, entries)))


def one_of_batch(data: bytes, position: int) -> bytes:
    """Extract the entry at `position` from a batch, and return it as a batch with one entry.

    The rest of the batch is not decoded.

    Raises:
        CodecError: The data is not a batch, or cannot be decoded.
        IndexError: The batch has no entry at `position`.
    """
    found = commands_of(data)
    if found is None:
        raise CodecError("the entry is not a batch")
    return batch_of_encoded(Revision(found.base + position), found.at, (found.encoded[position],))


def _checked_size(data: bytes) -> bytes:
    if len(data) > ENTRY_MAX_BYTES:
        raise CodecError(
            f"the batch has {len(data)} bytes; the maximum for an entry is {ENTRY_MAX_BYTES}: propose smaller batches"
        )
    return data


def decode_batch(data: bytes) -> Batch:
    """Decode a batch encoded by `encode_batch` in this release or an earlier one.

    Raises:
        WrittenLater: The batch has an event of a later release. The message names the release if the batch names it.
        CodecError: The entry has another kind or format, an unknown tag, a wrong type, or trailing bytes or fields, or
            the encoding is not canonical.
    """
    if len(data) > ENTRY_MAX_BYTES:
        raise CodecError(f"the entry has {len(data)} bytes; the maximum is {ENTRY_MAX_BYTES}")
    if kind_of(data) is not EntryKind.BATCH:
        raise CodecError(f"the entry is not a batch: its first byte is {data[0]}, not {EntryKind.BATCH.value}")
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
        raise CodecError("the batch is not canonical: encoding it again gives different bytes")
    return batch


def instant_of(data: bytes) -> Instant | None:
    """Return the time of a batch without decoding its commands; None if the entry is of another kind.

    Raises:
        CodecError: The entry cannot be decoded.
    """
    if kind_of(data) is not EntryKind.BATCH:
        return None
    try:
        return _head_decoder.decode(memoryview(data)[len(_HEAD) :]).at
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise CodecError(f"the batch cannot be decoded: {error}") from error


def kind_of(data: bytes) -> EntryKind:
    """Return the kind of an entry from its first byte.

    Raises:
        CodecError: The byte is missing or unknown.
    """
    kind = _KINDS.get(data[:1])
    if kind is None:
        raise CodecError(f"the entry begins with {data[:1].hex() or 'nothing'}, which is not a known kind")
    if kind is EntryKind.NO_OP and len(data) > len(NO_OP) + LEADER_MAX_BYTES:
        raise CodecError(f"the entry is a no-op of a leader whose ID has {len(data) - len(NO_OP)} bytes")
    return kind


def no_op_of(leader: str) -> bytes:
    """Return the entry that begins a leader's term.

    The entry contains the leader's ID, so the ledger records every leader.
    """
    return NO_OP + leader.encode()[:LEADER_MAX_BYTES]


def leader_of(data: bytes) -> str:
    """Return the leader's ID in a no-op; empty for a no-op without ID and for other entries.

    Raises:
        CodecError: The entry cannot be decoded.
    """
    return "" if kind_of(data) is not EntryKind.NO_OP else data[len(NO_OP) :].decode("utf-8", "replace")


def revision_after(data: bytes, before: int) -> int:
    """Return the revision after an entry, given the revision before it. A batch with another base is void."""
    if kind_of(data) is not EntryKind.BATCH:
        return before
    batch = decode_batch(data)
    return before + len(batch.entries) if batch.base == before else before


def _raise_if_written_later(body: bytes) -> None:
    """Raise WrittenLater if an undecodable body has the shape of a batch with an unknown event.

    The exception names the required release if the same batch raised the feature level. If an earlier batch raised the
    level, the replica stopped at that batch.

    Raises:
        WrittenLater: The body is a batch of a later release.
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
                    what = f"the batch cannot be decoded: it has an event with the unknown tag {tag}"
                    raise WrittenLater(what, level=level, release=release, revision=revision)


def is_earlier_form(body: bytes, again: bytes) -> bool:
    """Return whether `body` is canonical, and equals `again` except for fields that earlier records lacked.

    Both arguments must be valid MessagePack.
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
    """Return `revision_after` for an entry known to be valid, at an eighth of the cost.

    Raises:
        CodecError: The entry cannot be decoded.
    """
    if kind_of(data) is not EntryKind.BATCH:
        return before
    try:
        batch = _shape_decoder.decode(memoryview(data)[len(_HEAD) :])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise CodecError(f"the batch cannot be decoded: {error}") from error
    return before + len(batch.entries) if batch.base == before else before
