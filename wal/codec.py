"""The bytes of an entry: one byte for its kind, one for the format, then a batch as canonical MessagePack.

A batch has exactly one encoding, since the ledger's digest is of bytes. Records are arrays with integer tags (law 12).
A later release may append a field with a default: entries that were written without it stay valid.
"""

from enum import IntEnum
from typing import Final

import msgspec

from replica.commit import Batch
from wal.records import ENTRY_MAX_BYTES

__all__ = ["NO_OP", "CodecError", "Kind", "decode_batch", "encode_batch", "kind_of", "revision_after"]


class Kind(IntEnum):
    """What an entry is, by its first byte; wire numbers, append-only, never reused."""

    NO_OP = 0
    BATCH = 1
    CONFIGURATION = 2
    """Who is a member: see wal.configuration."""


NO_OP: Final = bytes([Kind.NO_OP])
"""The whole entry with which a new leader begins its term."""

BATCH_FORMAT: Final = 1
"""Version of the encoding after the two leading bytes."""

_HEAD: Final = bytes([Kind.BATCH, BATCH_FORMAT])
_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Batch, strict=True)
_plain_decoder: Final = msgspec.msgpack.Decoder()


class CodecError(ValueError):
    """The bytes are not the one encoding of anything that this release knows; in the ledger that stops the replica."""


def encode_batch(batch: Batch) -> bytes:
    """The entry data of a batch. CodecError beyond ENTRY_MAX_BYTES, or if a value has no encoding."""
    try:
        data = _HEAD + _encoder.encode(batch)
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise CodecError(f"the batch cannot be encoded: {error}") from error
    if len(data) > ENTRY_MAX_BYTES:
        raise CodecError(
            f"the batch has {len(data)} bytes; an entry has at most {ENTRY_MAX_BYTES}: propose smaller batches"
        )
    return data


def decode_batch(data: bytes) -> Batch:
    """The batch that `encode_batch` encoded, in this release or an earlier one.

    CodecError for another kind or format, an unknown tag, a wrong type, trailing bytes or fields, or any second way to
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
        raise CodecError(f"the batch cannot be decoded: {error}") from error
    if again != body and not _is_earlier_form(bytes(body), again):
        raise CodecError("the batch is not canonical: encoded again it gives other bytes")
    return batch


def kind_of(data: bytes) -> Kind:
    """The kind of an entry, by its first byte. CodecError if there is none or it is unknown."""
    try:
        kind = Kind(data[0])
    except (IndexError, ValueError) as error:
        raise CodecError(f"the entry begins with {data[:1].hex() or 'nothing'}, which is no known kind") from error
    if kind is Kind.NO_OP and len(data) != len(NO_OP):
        raise CodecError(f"the entry is a no-op with {len(data) - len(NO_OP)} trailing bytes")
    return kind


def revision_after(data: bytes, before: int) -> int:
    """The revision after this entry when `before` was the one before it: a batch with another base changes nothing."""
    if kind_of(data) is not Kind.BATCH:
        return before
    batch = decode_batch(data)
    return before + len(batch.entries) if batch.base == before else before


def _is_earlier_form(body: bytes, again: bytes) -> bool:
    """Whether `body` is canonical and differs from `again` only by fields that records did not have yet."""
    plain: object = _plain_decoder.decode(body)
    return _encoder.encode(plain) == body and _begins(plain, _plain_decoder.decode(again))


def _begins(earlier: object, later: object) -> bool:
    if isinstance(earlier, list) and isinstance(later, list):
        return len(earlier) <= len(later) and all(map(_begins, earlier, later))
    if isinstance(earlier, dict) and isinstance(later, dict):
        return list(earlier) == list(later) and all(map(_begins, earlier.values(), later.values()))
    return type(earlier) is type(later) and earlier == later
