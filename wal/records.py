"""Layout of keys and values in the tables: big-endian keys, and values that begin with a CRC.

LMDB has no page checksums, and usually returns a flipped bit as wrong data (HAZARDS.md). Each value therefore starts
with the CRC-32 of its key and body. These layouts are permanent: a change needs a new FORMAT_VERSION and a reader of
the old version.
"""

import hashlib
import re
import struct
from typing import Any, Final, NamedTuple
from zlib import crc32

from forebay.replica.values import BATCH_BYTES_MAX

FORMAT_VERSION: Final = 1
"""Version of these layouts: stored when a storage is created, and compared when the storage is opened."""

FORMAT_MAGIC: Final = b"forebay"
"""Prefix of the version. The preliminary versions 0.1 to 0.3 wrote a bare number: 1 or 2."""

FORMAT_OF_A_STEP: Final = 0
"""Result of `unpack_format` for the formats of 0.1 to 0.3, which no release reads."""

ENTRIES: Final = b"entries"
CHAIN: Final = b"chain"
REVISIONS: Final = b"revisions"
GAPS: Final = b"gaps"
STATE: Final = b"state"
TABLES: Final = (ENTRIES, CHAIN, REVISIONS, GAPS, STATE)

FORMAT_KEY: Final = b"format"
IDENTITY_KEY: Final = b"identity"
HARD_KEY: Final = b"hard"
MARKS_KEY: Final = b"marks"
LOG_KEY: Final = b"log"
INCARNATION_KEY: Final = b"incarnation"
"""Key of the storage's incarnation; absent in the first incarnation."""
PRUNED_KEY: Final = b"pruned"

DIGEST_BYTES: Final = 32
GENESIS: Final = bytes(DIGEST_BYTES)
"""Digest before the first entry of every ledger."""

NAME_MAX_BYTES: Final = 255
"""Limit of a replica's name and a cluster's ID in UTF-8: fits a file name on every common file system."""

ENTRY_MAX_BYTES: Final = BATCH_BYTES_MAX
"""Limit of an entry's data: larger entries would delay the heartbeats sent after them (HAZARDS.md, H26)."""

SEAL_MAX_BYTES: Final = 2048
"""Limit of an entry's seal: the leader's signature, and a signature for each vote that the leader received."""

_U64 = struct.Struct(">Q")
_U32 = struct.Struct(">I")
_PREFIX = struct.Struct(">QQ")
_CHAIN = struct.Struct(f">{DIGEST_BYTES}sQ")
_CHAIN_STORED = struct.Struct(f">I{DIGEST_BYTES}sQ")
_MARKS = struct.Struct(f">QQQQQQ{DIGEST_BYTES}s")
_GAP = struct.Struct(">QQQ")
_LOG = struct.Struct(">QQ")
_PRUNED_SEGMENT = struct.Struct(">QQQQ")
_LENGTH = struct.Struct(">B")
_ENTRY_HEAD = struct.Struct(">IQH")
_SEALED = struct.Struct(">QH")
_NO_MATCH: Final = "the checksum does not match"


class DamagedValue(Exception):
    """Value with a wrong checksum or layout; the message gives the reason."""


class Entry(NamedTuple):
    """Entry of the Raft log."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    term: int
    data: bytes
    seal: bytes = b""
    """Signature of the accepting leader (cluster.consensus.seals). The ledger's digest does not cover it."""


class StorageIdentity(NamedTuple):
    """Owner of a storage."""

    cluster_id: str
    replica: str


class Incarnation(NamedTuple):
    """Lifetime of a cluster, from its founding or from a recovery after the loss of a majority.

    The mark distinguishes independent recoveries: 16 hexadecimal digits; empty for the first incarnation.
    """

    number: int
    mark: str

    def __str__(self) -> str:
        return f"{self.number}-{self.mark}" if self.mark else str(self.number)


FIRST_INCARNATION: Final = Incarnation(1, "")

_LINEAGE: Final = re.compile(r"(?P<cluster>[^/]+)(?:/(?P<number>[1-9][0-9]{0,8})-(?P<mark>[0-9a-f]{16}))?", re.ASCII)


def lineage_of(cluster_id: str, incarnation: Incarnation) -> str:
    """Return the name of an incarnation in frames and origins: the cluster's ID; `ID/2-…` from the second on."""
    return f"{cluster_id}/{incarnation}" if incarnation.mark else cluster_id


def parse_lineage(text: str) -> tuple[str, Incarnation] | None:
    """Parse the cluster's ID and incarnation from `lineage_of` text; None if malformed."""
    found = _LINEAGE.fullmatch(text)
    if found is None:
        return None
    number, mark = found["number"], found["mark"]
    return found["cluster"], FIRST_INCARNATION if mark is None else Incarnation(int(number), mark)


class HardState(NamedTuple):
    """Term and vote of a replica."""

    term: int
    voted_for: str | None


class Marks(NamedTuple):
    """Positions in the log. `last_index` is exact and as durable as the entries; the other marks may be too low."""

    base_index: int
    base_term: int
    last_index: int
    commit_index: int
    applied_index: int
    applied_revision: int
    applied_digest: bytes


class LogMark(NamedTuple):
    """Generation of the sync log whose records LMDB lacks, and the size of the log's file."""

    generation: int
    size_bytes: int


class ChainRow(NamedTuple):
    """Ledger's digest and revision after an applied entry."""

    digest: bytes
    revision: int


class Gap(NamedTuple):
    """Range of history that this replica lacks, because a snapshot replaced it or it was pruned; both ends included.

    `revision_before` is the revision before the range, `revision_after` the revision at its end.
    """

    first_index: int
    last_index: int
    revision_before: int
    revision_after: int


class PrunedSegment(NamedTuple):
    """Archive segment recorded at pruning, with the revision after its last entry and the clock of its last batch (0 if
    the segment has no batch).
    """

    first_index: int
    last_index: int
    revision_after: int
    last_at: int


class PrunedRange(NamedTuple):
    """Pruned range of this replica: all entries before `below`, except the first KEPT_ENTRIES.

    `segments` names the archive segments of the range, oldest first.
    """

    below: int
    segments: tuple[PrunedSegment, ...]


KEPT_ENTRIES: Final = 64
"""Number of first entries that are never pruned: they found the cluster, and proofs need the key in them."""

PRUNED_SEGMENTS_MAX: Final = 100_000
"""Maximum number of recorded segments, also the maximum of an archive."""


def index_key(number: int) -> bytes:
    """Pack an index or revision as a key: unsigned, 8 bytes, big-endian, so that LMDB's order is numeric."""
    return _U64.pack(number)


def key_index(key: bytes) -> int:
    """Unpack a key of `index_key`.

    Raises:
        DamagedValue: The key has another length.
    """
    if len(key) != _U64.size:
        raise DamagedValue(f"key {key.hex()} has {len(key)} bytes instead of {_U64.size}")
    return int.from_bytes(key, "big")


def chain_digest(previous: bytes, entry: Entry) -> bytes:
    """Return the ledger's digest after `entry`: SHA-256(previous digest, index, term, data)."""
    hasher = hashlib.sha256(previous)
    hasher.update(_PREFIX.pack(entry.index, entry.term))
    hasher.update(entry.data)
    return hasher.digest()


def pack_checked(key: bytes, body: bytes) -> bytes:
    """Pack a value: the CRC-32 of key and body, then the body."""
    return _U32.pack(crc32(body, crc32(key))) + body


def unpack_checked(key: bytes, value: bytes) -> bytes:
    """Return the body of a stored value.

    Raises:
        DamagedValue: The checksum is wrong.
    """
    if len(value) < _U32.size:
        raise DamagedValue(f"value has {len(value)} bytes, which is too short for a checksum")
    body = value[_U32.size :]
    if crc32(body, crc32(key)) != _U32.unpack_from(value)[0]:
        raise DamagedValue(_NO_MATCH)
    return body


def pack_entry(key: bytes, entry: Entry) -> bytes:
    """Pack an entry, whose key is its index."""
    return pack_checked(key, _SEALED.pack(entry.term, len(entry.seal)) + entry.seal + entry.data)


def unpack_entry(key: bytes, value: bytes) -> Entry:
    """Unpack an entry of `pack_entry`.

    Raises:
        DamagedValue: The checksum is wrong.
    """
    index = key_index(key)
    if len(value) < _ENTRY_HEAD.size:
        raise DamagedValue(f"value has {len(value)} bytes, which is too short for an entry")
    checksum, term, seal_bytes = _ENTRY_HEAD.unpack_from(value)
    if crc32(memoryview(value)[_U32.size :], crc32(key)) != checksum:
        raise DamagedValue(_NO_MATCH)
    data_at = _ENTRY_HEAD.size + seal_bytes
    if data_at > len(value):
        raise DamagedValue(f"value has {len(value)} bytes, which is too short for a seal of {seal_bytes}")
    return Entry(index, term, value[data_at:], value[_ENTRY_HEAD.size : data_at])


def pack_chain(key: bytes, row: ChainRow) -> bytes:
    """Pack a chain row, whose key is the entry's index."""
    return pack_checked(key, _CHAIN.pack(row.digest, row.revision))


def unpack_chain(key: bytes, value: bytes) -> ChainRow:
    """Unpack a row of `pack_chain`.

    Raises:
        DamagedValue: The checksum or the length is wrong.
    """
    # Called for each entry of a ledger: `unpack_checked` and `_unpack` in one step.
    if len(value) != _CHAIN_STORED.size:
        raise DamagedValue(f"value has {len(value)} bytes instead of {_CHAIN_STORED.size}")
    checksum, digest, revision = _CHAIN_STORED.unpack(value)
    if crc32(value[_U32.size :], crc32(key)) != checksum:
        raise DamagedValue(_NO_MATCH)
    return ChainRow(digest, revision)


def pack_gap(key: bytes, gap: Gap) -> bytes:
    """Pack a gap, whose key is its first index."""
    return pack_checked(key, _GAP.pack(gap.last_index, gap.revision_before, gap.revision_after))


def unpack_gap(key: bytes, value: bytes) -> Gap:
    """Unpack a gap of `pack_gap`.

    Raises:
        DamagedValue: The checksum or the length is wrong.
    """
    last_index, before, after = _unpack(_GAP, unpack_checked(key, value))
    return Gap(key_index(key), last_index, before, after)


def pack_pruned(pruned: PrunedRange) -> bytes:
    """Pack the pruned range."""
    return pack_checked(
        PRUNED_KEY, _U64.pack(pruned.below) + b"".join(_PRUNED_SEGMENT.pack(*segment) for segment in pruned.segments)
    )


def unpack_pruned(value: bytes) -> PrunedRange:
    """Unpack the range of `pack_pruned`.

    Raises:
        DamagedValue: The checksum or the length is wrong.
    """
    body = unpack_checked(PRUNED_KEY, value)
    if len(body) < _U64.size or (len(body) - _U64.size) % _PRUNED_SEGMENT.size:
        raise DamagedValue(f"the value has {len(body)} bytes, which is not a whole number of segments")
    (below,) = _U64.unpack_from(body)
    rows = _PRUNED_SEGMENT.iter_unpack(body[_U64.size :])
    return PrunedRange(below, tuple(PrunedSegment._make(row) for row in rows))


def pack_format(version: int) -> bytes:
    """Pack the format version."""
    return pack_checked(FORMAT_KEY, FORMAT_MAGIC + _U64.pack(version))


def unpack_format(value: bytes) -> int:
    """Unpack the version of `pack_format`, or return FORMAT_OF_A_STEP.

    Raises:
        DamagedValue: Checksum or layout is wrong.
    """
    body = unpack_checked(FORMAT_KEY, value)
    if len(body) == _U64.size:
        return FORMAT_OF_A_STEP
    if not body.startswith(FORMAT_MAGIC):
        raise DamagedValue("the value does not start with a format version")
    (version,) = _unpack(_U64, body[len(FORMAT_MAGIC) :])
    return int(version)


def pack_number(key: bytes, number: int) -> bytes:
    """Pack a number, for example the index of the entry that settled a revision."""
    return pack_checked(key, _U64.pack(number))


def unpack_number(key: bytes, value: bytes) -> int:
    """Unpack a number of `pack_number`.

    Raises:
        DamagedValue: The checksum or the length is wrong.
    """
    (number,) = _unpack(_U64, unpack_checked(key, value))
    return int(number)


def pack_marks(marks: Marks) -> bytes:
    """Pack the marks."""
    return pack_checked(MARKS_KEY, _MARKS.pack(*marks))


def unpack_marks(value: bytes) -> Marks:
    """Unpack the marks of `pack_marks`.

    Raises:
        DamagedValue: The checksum or the length is wrong.
    """
    return Marks._make(_unpack(_MARKS, unpack_checked(MARKS_KEY, value)))


def pack_log(mark: LogMark) -> bytes:
    """Pack the mark of the sync log."""
    return pack_checked(LOG_KEY, _LOG.pack(*mark))


def unpack_log(value: bytes) -> LogMark:
    """Unpack the mark of `pack_log`.

    Raises:
        DamagedValue: The checksum or the length is wrong.
    """
    return LogMark._make(_unpack(_LOG, unpack_checked(LOG_KEY, value)))


def pack_hard(hard: HardState) -> bytes:
    """Pack term and vote."""
    voted_for = b"" if hard.voted_for is None else name_bytes("replica name", hard.voted_for)
    return pack_checked(HARD_KEY, _U64.pack(hard.term) + voted_for)


def unpack_hard(value: bytes) -> HardState:
    """Unpack the hard state of `pack_hard`.

    Raises:
        DamagedValue: Checksum or layout is wrong.
    """
    body = unpack_checked(HARD_KEY, value)
    if len(body) < _U64.size:
        raise DamagedValue("term and vote are too short")
    return HardState(int.from_bytes(body[: _U64.size], "big"), _text(body[_U64.size :]) or None)


def pack_identity(identity: StorageIdentity) -> bytes:
    """Pack the identity."""
    cluster = name_bytes("cluster id", identity.cluster_id)
    replica = name_bytes("replica name", identity.replica)
    return pack_checked(IDENTITY_KEY, _LENGTH.pack(len(cluster)) + cluster + replica)


def unpack_identity(value: bytes) -> StorageIdentity:
    """Unpack the identity of `pack_identity`.

    Raises:
        DamagedValue: Checksum or layout is wrong.
    """
    body = unpack_checked(IDENTITY_KEY, value)
    if not body or len(body) < 1 + body[0]:
        raise DamagedValue("the identity is too short")
    return StorageIdentity(_text(body[1 : 1 + body[0]]), _text(body[1 + body[0] :]))


def pack_incarnation(incarnation: Incarnation) -> bytes:
    """Pack an incarnation."""
    return pack_checked(INCARNATION_KEY, _U64.pack(incarnation.number) + incarnation.mark.encode())


def unpack_incarnation(value: bytes) -> Incarnation:
    """Unpack the incarnation of `pack_incarnation`.

    Raises:
        DamagedValue: Checksum or layout is wrong.
    """
    body = unpack_checked(INCARNATION_KEY, value)
    found = Incarnation(int.from_bytes(body[: _U64.size], "big"), _text(body[_U64.size :]))
    if len(body) < _U64.size or (found != FIRST_INCARNATION and parse_lineage(f"x/{found}") is None):
        raise DamagedValue("the value is not an incarnation")
    return found


def name_bytes(what: str, name: str) -> bytes:
    """Return the UTF-8 bytes of a name.

    Raises:
        ValueError: The name is empty or longer than NAME_MAX_BYTES.
    """
    encoded = name.encode()
    if not 0 < len(encoded) <= NAME_MAX_BYTES:
        raise ValueError(f"the {what} has {len(encoded)} bytes; it must have 1 to {NAME_MAX_BYTES}")
    return encoded


def _text(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise DamagedValue("a name is not UTF-8") from error


def _unpack(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != layout.size:
        raise DamagedValue(f"the value has {len(body)} bytes instead of {layout.size}")
    return layout.unpack(body)
