"""What a snapshot holds: a State and where in the ledger it stands, as sections of canonical MessagePack. No disk here.

A section is written in slices, each a MessagePack array of records in the order of their keys, so that neither side
ever holds more than one slice beside the State, and a thread that writes can let others run between two slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from heapq import merge
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar

import immutables
import msgpack  # type: ignore[import-untyped]
import msgspec

from replica.messages import Receipt, features
from replica.model import (
    ArrayTask,
    Buffer,
    BufferRequest,
    CreatePersistent,
    Dependency,
    DestroyPersistent,
    Interruptions,
    Job,
    JobOptions,
    JobRequest,
    ListTransfer,
    Node,
    Policy,
    Pool,
    Transfer,
    free_bytes,
)
from replica.state import LATER_MAPS, LATER_SHAPED, LaterMap, State
from replica.values import BATCH_BYTES_MAX, JOBS_IN_STATE_MAX, NODES_MAX, POOLS_MAX, RECEIPTS_MAX, Refusal
from wal import Change, Configuration, Member, Placed

SLICE_BYTES = 64 * 1024
"""A slice is closed when it has reached this many bytes: 0.3 ms of encoding; then another thread may run."""

SLICE_RECORDS = 256
"""A slice is closed when it has this many records, so that many small ones do not take longer than SLICE_BYTES says."""

SLICE_BYTES_MAX = 4 * BATCH_BYTES_MAX
"""The largest slice that is written or read, bytes. A record comes from the events of one entry, which fits into a
batch; four times that leaves room for what is added to it later, and bounds what a reader allocates."""

RUN_KEYS = 2048
"""Keys sorted in one uninterruptible call: about 0.3 ms. The runs are then merged lazily."""

DIGEST_BYTES = 32
"""A digest of the ledger's chain, bytes (SHA-256)."""

NUMBER_MAX = 2**63 - 1
"""Indexes, terms, revisions and instants: what a signed 64-bit field holds."""

_Key = TypeVar("_Key", int, str)
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
_Place = Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]


class ImageRefused(Exception):
    """What was given is not a sound image; `sentence` says what is wrong and names the section or record."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class Image(msgspec.Struct, frozen=True):
    """The state after the ledger's entry `index` of `term`, whose chain digest is `chain_digest`.

    `configuration` is who is a member as of that entry, and which entry said so; None if none did.
    """

    state: State
    index: int
    term: int
    chain_digest: bytes
    configuration: Placed | None = None


class Section(IntEnum):
    """The parts of a snapshot; the numbers are wire numbers (law 12). They come in the order of ORDER."""

    HEADER = 1
    POOLS = 2
    NODES = 3
    JOBS = 4
    BUFFERS = 5
    RECEIPTS = 6
    CAPACITY = 7
    END = 8
    PERSISTENT = 10
    SITES = 11
    POOL_UNITS = 12
    ACCOUNTS = 13
    QOS = 14
    LICENSES = 15
    RESERVATIONS = 16
    SCHEDULING_RULES = 17
    RATES = 18
    MAILS = 40
    TRANSFER_RULES = 50
    TRANSFERS = 51
    PARTITIONS = 60
    CONSUMED = 61

    @property
    def word(self) -> str:
        """As in sentences, for example `jobs`."""
        return self.name.lower()


LATER: Mapping[Section, LaterMap] = {Section(later.section): later for later in LATER_MAPS}
"""The sections of the maps that came after feature level 2: pairs of key and record, left out while they are empty."""

ORDER: Mapping[Section, int] = {
    section: place
    for place, section in enumerate((*(one for one in Section if one <= Section.CAPACITY), *LATER, Section.END))
}
"""In which order the sections come."""


class Slice(NamedTuple):
    """Some records of one section, encoded."""

    section: Section
    payload: bytes
    records: int


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Everything of a State that is not a map, its place in the ledger, and how much follows."""

    index: _Place
    term: _Place
    chain_digest: _Digest
    shapes: tuple[_Number, ...]
    """How many fields the writer's records have, in the order of SHAPED: more than ours means a newer release."""
    counts: tuple[_Number, _Number, _Number, _Number, _Number]
    """Pools, nodes, jobs, buffers and receipts."""
    cluster_id: str
    name: str
    feature_level: _Number
    revision: _Number
    at: _Number
    next_job: _Place
    oldest_receipt: _Number
    receipts_horizon_ms: _Number
    policy: Policy
    configuration: Placed | None = None
    """Who is a member, and the index of the entry that says so: what consensus counts by (HAZARDS.md, H13)."""


class LevelledHeader(Header, frozen=True, array_like=True):
    """The header from feature level 2 on; at level 1 an earlier release may have to read it, so it is as it was."""

    release: str = ""
    """The first release that knows the feature level: what a replica needs that does not (law 12)."""


class LaterHeader(LevelledHeader, frozen=True, array_like=True):
    """The header where one of the maps that came after feature level 2 holds something."""

    later: tuple[tuple[_Number, _Number], ...] = ()
    """The section of each such map with how many records it has, in the order of LATER."""


class ReceiptRecord(msgspec.Struct, frozen=True, array_like=True):
    """A receipt with the command id that it answers."""

    id: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
    receipt: Receipt


class PoolCapacity(msgspec.Struct, frozen=True, array_like=True):
    """What the writer derived for one pool, bytes: compared when reading, never believed (law 8)."""

    name: str
    held_bytes: int
    free_bytes: int


SHAPED: tuple[type[msgspec.Struct], ...] = (
    Pool,
    Node,
    Job,
    Interruptions,
    JobRequest,
    JobOptions,
    Dependency,
    ArrayTask,
    Buffer,
    BufferRequest,
    Transfer,
    ListTransfer,
    CreatePersistent,
    DestroyPersistent,
    Receipt,
    Refusal,
    Policy,
    Placed,
    Configuration,
    Member,
    Change,
    *LATER_SHAPED,
)
"""Every kind of record in a snapshot. Append only: positions are wire numbers (law 12)."""

SHAPES: tuple[int, ...] = tuple(len(kind.__struct_fields__) for kind in SHAPED)

FOUNDING_SHAPES = SHAPES[: -len(LATER_SHAPED)]
"""What is written while none of the later maps holds anything: an earlier release may have to read it."""

COUNTED = (Section.POOLS, Section.NODES, Section.JOBS, Section.BUFFERS, Section.RECEIPTS)
RECORDS_MAX: Mapping[Section, int] = {
    Section.POOLS: POOLS_MAX,
    Section.NODES: NODES_MAX,
    Section.JOBS: JOBS_IN_STATE_MAX,
    Section.BUFFERS: JOBS_IN_STATE_MAX,
    Section.RECEIPTS: 2 * RECEIPTS_MAX,
    **{section: later.records_max for section, later in LATER.items()},
}
_DECODERS: Mapping[Section, msgspec.msgpack.Decoder[Any]] = {
    Section.HEADER: msgspec.msgpack.Decoder(LaterHeader),
    Section.POOLS: msgspec.msgpack.Decoder(list[Pool]),
    Section.NODES: msgspec.msgpack.Decoder(list[Node]),
    Section.JOBS: msgspec.msgpack.Decoder(list[Job]),
    Section.BUFFERS: msgspec.msgpack.Decoder(list[Buffer]),
    Section.RECEIPTS: msgspec.msgpack.Decoder(list[ReceiptRecord]),
    Section.CAPACITY: msgspec.msgpack.Decoder(list[PoolCapacity]),
    Section.END: msgspec.msgpack.Decoder(int),
    **{
        section: msgspec.msgpack.Decoder(list[tuple[later.key, later.record]])  # type: ignore[name-defined]
        for section, later in LATER.items()
    },
}
KEYS: Mapping[Section, Callable[[Any], Any]] = {
    Section.POOLS: lambda record: record.name,
    Section.NODES: lambda record: record.name,
    Section.JOBS: lambda record: record.id,
    Section.BUFFERS: lambda record: record.job,
    Section.RECEIPTS: lambda record: record.receipt.revision,
    Section.CAPACITY: lambda record: record.name,
    **{section: lambda record: record[0] for section in LATER},
}
_ENCODER = msgspec.msgpack.Encoder()


def _nothing() -> None:
    return None


def to_sections(image: Image, *, breathe: Callable[[], None] = _nothing) -> Iterator[Slice]:
    """Yield the image slice by slice, the same bytes for equal images; `breathe` is called after each piece of work.

    Raises ImageRefused if the image could not be read back: a record under a key that is not its own, a record larger
    than SLICE_BYTES_MAX, or free capacity that is not what the buffers say (a broken invariant of this replica).
    """
    state = image.state
    counts = (len(state.pools), len(state.nodes), len(state.jobs), len(state.buffers), len(state.receipts))
    later = {section: len(getattr(state, kind.field)) for section, kind in LATER.items() if getattr(state, kind.field)}
    for section, count in (*zip(COUNTED, counts, strict=True), *later.items()):
        if count > RECORDS_MAX[section]:
            raise ImageRefused(f"there are {count} {section.word}; a snapshot holds at most {RECORDS_MAX[section]}")
    header = Header(
        index=image.index,
        term=image.term,
        chain_digest=image.chain_digest,
        shapes=SHAPES if later else FOUNDING_SHAPES,
        counts=counts,
        cluster_id=state.cluster_id,
        name=state.name,
        feature_level=state.feature_level,
        revision=state.revision,
        at=state.at,
        next_job=state.next_job,
        oldest_receipt=state.oldest_receipt,
        receipts_horizon_ms=state.receipts_horizon_ms,
        policy=state.policy,
        configuration=image.configuration,
    )
    if state.feature_level > features.FOUNDING_LEVEL:
        release = features.release_of(state.feature_level)
        header = LevelledHeader(**msgspec.structs.asdict(header), release=release)
        if later:
            header = LaterHeader(**msgspec.structs.asdict(header), later=tuple(later.items()))
    payload = _encode(Section.HEADER, header)
    decode(Section.HEADER, payload)
    yield Slice(Section.HEADER, payload, 1)
    held: dict[str, int] = defaultdict(int)
    for persistent in state.persistent.values():
        held[persistent.pool] += persistent.held_bytes

    def buffers() -> Iterator[Buffer]:
        for buffer in _records(Section.BUFFERS, state.buffers, breathe):
            held[buffer.pool] += buffer.held_bytes
            yield buffer

    def receipts() -> Iterator[ReceiptRecord]:
        for number, (key, receipt) in enumerate(state.receipts.items(), start=1):
            yield ReceiptRecord(key, receipt)
            if number % RUN_KEYS == 0:
                breathe()

    yield from _sliced(Section.POOLS, _records(Section.POOLS, state.pools, breathe), breathe)
    yield from _sliced(Section.NODES, _records(Section.NODES, state.nodes, breathe), breathe)
    yield from _sliced(Section.JOBS, _records(Section.JOBS, state.jobs, breathe), breathe)
    yield from _sliced(Section.BUFFERS, buffers(), breathe)
    yield from _sliced(Section.RECEIPTS, receipts(), breathe)
    capacity = derived_capacity(dict(state.pools.items()), state.held_bytes)
    compare_capacity(capacity, derived_capacity(dict(state.pools.items()), held), held, "this replica counts")
    yield from _sliced(Section.CAPACITY, iter(capacity), breathe)
    for section in later:
        records = getattr(state, LATER[section].field)
        yield from _sliced(section, ((key, records[key]) for key in _ordered(records, breathe)), breathe)
    yield Slice(Section.END, _encode(Section.END, sum(counts) + sum(later.values())), 1)


def _ordered(keys: Iterable[_Key], breathe: Callable[[], None]) -> Iterator[_Key]:
    """Yield the keys sorted, without one long call that would keep every other thread waiting."""
    source = iter(keys)
    runs: list[list[_Key]] = []
    while run := list(islice(source, RUN_KEYS)):
        run.sort()
        runs.append(run)
        breathe()
    return merge(*runs)


def _records(section: Section, records: immutables.Map[Any, Any], breathe: Callable[[], None]) -> Iterator[Any]:
    key_of = KEYS[section]
    for key in _ordered(records, breathe):
        record = records[key]
        if key_of(record) != key:
            raise ImageRefused(f"section {section.word}: the record under {key!r} says that it is {key_of(record)!r}")
        yield record


def _sliced(section: Section, records: Iterator[Any], breathe: Callable[[], None]) -> Iterator[Slice]:
    pieces: list[bytes] = []
    size_bytes = 0
    for record in records:
        piece = _encode(section, record)
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes >= SLICE_BYTES or len(pieces) >= SLICE_RECORDS:
            yield _slice(section, pieces)
            breathe()
            pieces, size_bytes = [], 0
    if pieces:
        yield _slice(section, pieces)
        breathe()


def _slice(section: Section, pieces: list[bytes]) -> Slice:
    payload = msgpack.Packer().pack_array_header(len(pieces)) + b"".join(pieces)
    if len(payload) > SLICE_BYTES_MAX:
        raise ImageRefused(f"section {section.word} has a record of more than {SLICE_BYTES_MAX - SLICE_BYTES} bytes")
    return Slice(section, payload, len(pieces))


def _encode(section: Section, record: Any) -> bytes:
    try:
        return _ENCODER.encode(record)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as why:
        raise ImageRefused(f"section {section.word} has a record that cannot be written: {why}") from why


def decode(section: Section, payload: bytes) -> Any:
    try:
        return _DECODERS[section].decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        raise ImageRefused(f"section {section.word} has a record that cannot be read: {why}") from why


def derived_capacity(pools: Mapping[str, Pool], held: Mapping[str, int]) -> list[PoolCapacity]:
    return [PoolCapacity(name, held.get(name, 0), free_bytes(pools[name], held.get(name, 0))) for name in sorted(pools)]


def compare_capacity(said: list[PoolCapacity], derived: list[PoolCapacity], held: Mapping[str, int], who: str) -> None:
    pools = {row.name for row in derived}
    for name in sorted(held):
        if held[name] and name not in pools:
            raise ImageRefused(f"buffers hold {held[name]} bytes of pool {name!r}, which does not exist")
    for row, truth in zip(said, derived, strict=False):
        if row != truth:
            raise ImageRefused(
                f"pool {row.name!r}: {who} {row.held_bytes} bytes held and {row.free_bytes} free, but its buffers give "
                f"{truth.held_bytes} held and {truth.free_bytes} free"
            )
    if len(said) != len(derived):
        raise ImageRefused(f"capacity is given for {len(said)} pools, but there are {len(derived)}")
