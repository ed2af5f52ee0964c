"""How every key and value of the tables is laid out: big-endian keys, and a CRC in front of every value.

LMDB has no page checksums, and most flipped bits come back as wrong data (HAZARDS.md), so each value starts with the
CRC-32 of its key and itself. The layouts here are for ever: a change needs a new FORMAT_VERSION, and reads the old one.
"""

import hashlib
import re
import struct
from typing import Any, Final, NamedTuple
from zlib import crc32

from replica.values import BATCH_BYTES_MAX

FORMAT_VERSION: Final = 1
"""Version of these layouts; stored when a replica's storage is created, compared when it is opened."""

FORMAT_MAGIC: Final = b"forebay"
"""What stands in front of the version. The construction steps 0.1 to 0.3 wrote a bare number: 1 or 2."""

FORMAT_OF_A_STEP: Final = 0
"""What stands for the formats of those steps, which no release reads."""

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
"""Which incarnation of the cluster a storage is of; where it is not there, of the first."""
PRUNED_KEY: Final = b"pruned"

DIGEST_BYTES: Final = 32
GENESIS: Final = bytes(DIGEST_BYTES)
"""The digest before the first entry of every ledger."""

NAME_MAX_BYTES: Final = 255
"""Bound of a replica's name and a cluster's id in UTF-8: what fits in a file name on every file system we know."""

ENTRY_MAX_BYTES: Final = BATCH_BYTES_MAX
"""Bound of one entry's data: larger ones would hold up heartbeats behind them (HAZARDS.md, H26)."""

SEAL_MAX_BYTES: Final = 2048
"""Bound of an entry's seal: a signature, and one for each vote that its leader got."""

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
_NO_MATCH: Final = "the checksum does not hold"


class Damaged(Exception):
    """A value fails its checksum or its layout; the message says which."""


class Entry(NamedTuple):
    """One entry of Raft's log."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    term: int
    data: bytes
    seal: bytes = b""
    """Signature of the leader that accepted it (cluster.consensus.seals). The ledger's digest does not cover it."""


class Identity(NamedTuple):
    """Whose storage this is."""

    cluster_id: str
    replica: str


class Incarnation(NamedTuple):
    """One life of a cluster, from its founding, or from the recovery of what was left when a majority was lost.

    The mark tells two recoveries apart that were made without knowing of each other: 16 hexadecimal digits, of the
    first incarnation none.
    """

    number: int
    mark: str

    def __str__(self) -> str:
        return f"{self.number}-{self.mark}" if self.mark else str(self.number)


FIRST_INCARNATION: Final = Incarnation(1, "")

_LINEAGE: Final = re.compile(r"(?P<cluster>[^/]+)(?:/(?P<number>[1-9][0-9]{0,8})-(?P<mark>[0-9a-f]{16}))?", re.ASCII)


def lineage_of(cluster_id: str, incarnation: Incarnation) -> str:
    """How one incarnation of a cluster is called in frames and origins: by the id; from the second on by `ID/2-…`."""
    return f"{cluster_id}/{incarnation}" if incarnation.mark else cluster_id


def parse_lineage(text: str) -> tuple[str, Incarnation] | None:
    """The cluster's id and the incarnation in what `lineage_of` wrote; None where it is nothing of the kind."""
    found = _LINEAGE.fullmatch(text)
    if found is None:
        return None
    number, mark = found["number"], found["mark"]
    return found["cluster"], FIRST_INCARNATION if mark is None else Incarnation(int(number), mark)


class HardState(NamedTuple):
    """What a vote depends on."""

    term: int
    voted_for: str | None


class Marks(NamedTuple):
    """How far things are. `last_index` is exact and as durable as the entries; commit and applied may lag behind."""

    base_index: int
    base_term: int
    last_index: int
    commit_index: int
    applied_index: int
    applied_revision: int
    applied_digest: bytes


class LogMark(NamedTuple):
    """Which generation of the sync log adds to what LMDB has, and how large the file of the log is."""

    generation: int
    size_bytes: int


class ChainRow(NamedTuple):
    """What is known of an applied entry: the digest up to it, and the revision after it."""

    digest: bytes
    revision: int


class Gap(NamedTuple):
    """History that this replica does not hold, because a snapshot replaced it: entries first..last, both included.

    The gap begins after `revision_before` and ends with `revision_after`.
    """

    first_index: int
    last_index: int
    revision_before: int
    revision_after: int


class PrunedSegment(NamedTuple):
    """A segment of the archive, as it was called when what it has was pruned; the revision after its last entry, and
    the clock of its last batch, 0 where it has none.
    """

    first_index: int
    last_index: int
    revision_after: int
    last_at: int


class Pruned(NamedTuple):
    """What this replica is not to hold any more: what lies before the entry `below`, but for the first KEPT_ENTRIES.

    `segments`: where it is, oldest first.
    """

    below: int
    segments: tuple[PrunedSegment, ...]


KEPT_ENTRIES: Final = 64
"""The first entries, which are never pruned, count: what the cluster was founded with; proofs need the key in it."""

PRUNED_SEGMENTS_MAX: Final = 100_000
"""Segments that are remembered, count: those of the largest archive that is read."""


def index_key(number: int) -> bytes:
    """The key of an index or revision: unsigned, 8 bytes, big-endian: LMDB's byte order is the numbers' order."""
    return _U64.pack(number)


def key_index(key: bytes) -> int:
    """The number that `index_key` packed. Damaged if it has another length."""
    if len(key) != _U64.size:
        raise Damaged(f"key {key.hex()} has {len(key)} bytes instead of {_U64.size}")
    return int.from_bytes(key, "big")


def chained(previous: bytes, entry: Entry) -> bytes:
    """The digest of the ledger up to and with `entry`: SHA-256(previous digest, index, term, data)."""
    hasher = hashlib.sha256(previous)
    hasher.update(_PREFIX.pack(entry.index, entry.term))
    hasher.update(entry.data)
    return hasher.digest()


def pack_checked(key: bytes, body: bytes) -> bytes:
    """The value to store: the CRC-32 of key and body, then the body."""
    return _U32.pack(crc32(body, crc32(key))) + body


def unpack_checked(key: bytes, value: bytes) -> bytes:
    """The body of a stored value. Damaged if the checksum does not hold."""
    if len(value) < _U32.size:
        raise Damaged(f"value has {len(value)} bytes, which is too short for a checksum")
    body = value[_U32.size :]
    if crc32(body, crc32(key)) != _U32.unpack_from(value)[0]:
        raise Damaged(_NO_MATCH)
    return body


def pack_entry(key: bytes, entry: Entry) -> bytes:
    """The stored value of an entry, whose key is its index."""
    return pack_checked(key, _SEALED.pack(entry.term, len(entry.seal)) + entry.seal + entry.data)


def unpack_entry(key: bytes, value: bytes) -> Entry:
    """The entry that `pack_entry` packed. Damaged if the checksum does not hold."""
    index = key_index(key)
    if len(value) < _ENTRY_HEAD.size:
        raise Damaged(f"value has {len(value)} bytes, which is too short for an entry")
    checksum, term, seal_bytes = _ENTRY_HEAD.unpack_from(value)
    if crc32(memoryview(value)[_U32.size :], crc32(key)) != checksum:
        raise Damaged(_NO_MATCH)
    data_at = _ENTRY_HEAD.size + seal_bytes
    if data_at > len(value):
        raise Damaged(f"value has {len(value)} bytes, which is too short for a seal of {seal_bytes}")
    return Entry(index, term, value[data_at:], value[_ENTRY_HEAD.size : data_at])


def pack_chain(key: bytes, row: ChainRow) -> bytes:
    """The stored value of a chain row, whose key is the entry's index."""
    return pack_checked(key, _CHAIN.pack(row.digest, row.revision))


def unpack_chain(key: bytes, value: bytes) -> ChainRow:
    """The row that `pack_chain` packed. Damaged if checksum or length do not hold."""
    # Read for each entry of a ledger: in one step what `unpack_checked` and `_unpack` do.
    if len(value) != _CHAIN_STORED.size:
        raise Damaged(f"value has {len(value)} bytes instead of {_CHAIN_STORED.size}")
    checksum, digest, revision = _CHAIN_STORED.unpack(value)
    if crc32(value[_U32.size :], crc32(key)) != checksum:
        raise Damaged(_NO_MATCH)
    return ChainRow(digest, revision)


def pack_gap(key: bytes, gap: Gap) -> bytes:
    """The stored value of a gap, whose key is its first index."""
    return pack_checked(key, _GAP.pack(gap.last_index, gap.revision_before, gap.revision_after))


def unpack_gap(key: bytes, value: bytes) -> Gap:
    """The gap that `pack_gap` packed. Damaged if checksum or length do not hold."""
    last_index, before, after = _unpack(_GAP, unpack_checked(key, value))
    return Gap(key_index(key), last_index, before, after)


def pack_pruned(pruned: Pruned) -> bytes:
    """The stored value of what was pruned."""
    return pack_checked(
        PRUNED_KEY, _U64.pack(pruned.below) + b"".join(_PRUNED_SEGMENT.pack(*segment) for segment in pruned.segments)
    )


def unpack_pruned(value: bytes) -> Pruned:
    """What `pack_pruned` packed. Damaged if checksum or length do not hold."""
    body = unpack_checked(PRUNED_KEY, value)
    if len(body) < _U64.size or (len(body) - _U64.size) % _PRUNED_SEGMENT.size:
        raise Damaged(f"the value has {len(body)} bytes, which are no number of segments")
    (below,) = _U64.unpack_from(body)
    rows = _PRUNED_SEGMENT.iter_unpack(body[_U64.size :])
    return Pruned(below, tuple(PrunedSegment._make(row) for row in rows))


def pack_format(version: int) -> bytes:
    """The stored value of the format version."""
    return pack_checked(FORMAT_KEY, FORMAT_MAGIC + _U64.pack(version))


def unpack_format(value: bytes) -> int:
    """The version that `pack_format` packed, or FORMAT_OF_A_STEP. Damaged if checksum or layout do not hold."""
    body = unpack_checked(FORMAT_KEY, value)
    if len(body) == _U64.size:
        return FORMAT_OF_A_STEP
    if not body.startswith(FORMAT_MAGIC):
        raise Damaged("it does not begin as a format does")
    (version,) = _unpack(_U64, body[len(FORMAT_MAGIC) :])
    return int(version)


def pack_number(key: bytes, number: int) -> bytes:
    """The stored value of a plain number: the index of a revision."""
    return pack_checked(key, _U64.pack(number))


def unpack_number(key: bytes, value: bytes) -> int:
    """The number that `pack_number` packed. Damaged if checksum or length do not hold."""
    (number,) = _unpack(_U64, unpack_checked(key, value))
    return int(number)


def pack_marks(marks: Marks) -> bytes:
    """The stored value of the marks."""
    return pack_checked(MARKS_KEY, _MARKS.pack(*marks))


def unpack_marks(value: bytes) -> Marks:
    """The marks that `pack_marks` packed. Damaged if checksum or length do not hold."""
    return Marks._make(_unpack(_MARKS, unpack_checked(MARKS_KEY, value)))


def pack_log(mark: LogMark) -> bytes:
    """The stored value of what is known of the sync log."""
    return pack_checked(LOG_KEY, _LOG.pack(*mark))


def unpack_log(value: bytes) -> LogMark:
    """The mark that `pack_log` packed. Damaged if checksum or length do not hold."""
    return LogMark._make(_unpack(_LOG, unpack_checked(LOG_KEY, value)))


def pack_hard(hard: HardState) -> bytes:
    """The stored value of term and vote."""
    voted_for = b"" if hard.voted_for is None else name_bytes("replica name", hard.voted_for)
    return pack_checked(HARD_KEY, _U64.pack(hard.term) + voted_for)


def unpack_hard(value: bytes) -> HardState:
    """The hard state that `pack_hard` packed. Damaged if checksum or layout do not hold."""
    body = unpack_checked(HARD_KEY, value)
    if len(body) < _U64.size:
        raise Damaged("term and vote are too short")
    return HardState(int.from_bytes(body[: _U64.size], "big"), _text(body[_U64.size :]) or None)


def pack_identity(identity: Identity) -> bytes:
    """The stored value of the identity."""
    cluster = name_bytes("cluster id", identity.cluster_id)
    replica = name_bytes("replica name", identity.replica)
    return pack_checked(IDENTITY_KEY, _LENGTH.pack(len(cluster)) + cluster + replica)


def unpack_identity(value: bytes) -> Identity:
    """The identity that `pack_identity` packed. Damaged if checksum or layout do not hold."""
    body = unpack_checked(IDENTITY_KEY, value)
    if not body or len(body) < 1 + body[0]:
        raise Damaged("the identity is too short")
    return Identity(_text(body[1 : 1 + body[0]]), _text(body[1 + body[0] :]))


def pack_incarnation(incarnation: Incarnation) -> bytes:
    """The stored value of an incarnation."""
    return pack_checked(INCARNATION_KEY, _U64.pack(incarnation.number) + incarnation.mark.encode())


def unpack_incarnation(value: bytes) -> Incarnation:
    """The incarnation that `pack_incarnation` packed. Damaged if checksum or layout do not hold."""
    body = unpack_checked(INCARNATION_KEY, value)
    found = Incarnation(int.from_bytes(body[: _U64.size], "big"), _text(body[_U64.size :]))
    if len(body) < _U64.size or (found != FIRST_INCARNATION and parse_lineage(f"x/{found}") is None):
        raise Damaged("it is no incarnation")
    return found


def name_bytes(what: str, name: str) -> bytes:
    """The UTF-8 bytes of a name. ValueError if it is empty or longer than NAME_MAX_BYTES."""
    encoded = name.encode()
    if not 0 < len(encoded) <= NAME_MAX_BYTES:
        raise ValueError(f"the {what} has {len(encoded)} bytes; it must have 1 to {NAME_MAX_BYTES}")
    return encoded


def _text(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise Damaged("a name is not UTF-8") from error


def _unpack(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != layout.size:
        raise Damaged(f"the value has {len(body)} bytes instead of {layout.size}")
    return layout.unpack(body)
