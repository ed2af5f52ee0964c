"""Content of a snapshot: a State and its position in the ledger, as sections of canonical MessagePack. No disk access.

A section is written in slices, each a MessagePack array of records in key order. Writer and reader therefore hold at
most one slice beside the State, and a writing thread can let others run between two slices.

`Assembly` is the reader: it rebuilds an image from its slices, in order, checking each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar

import immutables
import msgpack  # type: ignore[import-untyped]
import msgspec

from forebay.replica.messages import CachedReply, features
from forebay.replica.model import Pool, SchedulingRules, Site, TransferRules, free_bytes
from forebay.replica.state import (
    TABLES,
    SessionReplies,
    SingleReplies,
    State,
    Table,
    derive,
    find_violations,
    intern_buffer,
    intern_job,
    intern_receipt,
)
from forebay.replica.values import BATCH_BYTES_MAX, Instant, LedgerViolation, Revision
from forebay.wal import ConfigurationAt, is_earlier_form
from forebay.wal import check as check_members

SLICE_BYTES = 64 * 1024
"""Size at which a slice ends: 0.3 ms of encoding, after which another thread may run."""

SLICE_RECORDS = 256
"""Number of records at which a slice ends, so that many small ones do not take longer than SLICE_BYTES allows."""

SLICE_BYTES_MAX = 4 * BATCH_BYTES_MAX
"""Maximum size of a slice, which bounds a reader's memory. A record comes from the events of one entry, so it fits a
batch; four times a batch leaves space for fields that later releases add.
"""

RUN_KEYS = 2048
"""Number of keys sorted in one call, which blocks other threads for about 0.3 ms. Sorted runs are merged lazily."""

DIGEST_BYTES = 32
"""Size of a digest of the ledger's chain (SHA-256)."""

NUMBER_MAX = 2**63 - 1
"""Maximum index, term, revision and instant: a signed 64-bit number."""

_Key = TypeVar("_Key", int, str, bytes)
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
_Place = Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]


class ImageRejected(Exception):
    """Invalid image; `sentence` names the problem and the section or record."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class Image(msgspec.Struct, frozen=True):
    """State after the ledger's entry `index` of `term`, whose chain digest is `chain_digest`.

    `configuration` is the membership at that entry, with the index of the entry that set it; None if no entry did.
    """

    state: State
    index: int
    term: int
    chain_digest: bytes
    configuration: ConfigurationAt | None = None


HEADER, CAPACITY, END = 1, 100, 101
"""Sections that are not tables of the state. Table sections are in `replica.state.TABLES`."""

TABLE_OF: Mapping[int, Table] = {table.section: table for table in TABLES}

ORDER: Mapping[int, int] = {section: place for place, section in enumerate((HEADER, *TABLE_OF, CAPACITY, END))}
"""Position of each section."""

WORDS: Mapping[int, str] = {
    HEADER: "header",
    **{section: table.field for section, table in TABLE_OF.items()},
    CAPACITY: "capacity",
    END: "end",
}
"""Name of each section in messages."""


class Slice(NamedTuple):
    """Encoded records of one section."""

    section: int
    payload: bytes
    records: int


class SnapshotHeader(msgspec.Struct, frozen=True, array_like=True):
    """Scalar fields of a State, its position in the ledger, and the number of records that follow."""

    index: _Place
    term: _Place
    chain_digest: _Digest
    counts: tuple[tuple[_Number, _Number], ...]
    """Section and record count of each non-empty table, in order."""
    cluster_id: str
    name: str
    feature_level: _Number
    release: str
    """First release that supports the feature level: an older replica must be upgraded to it (law 12)."""
    revision: _Number
    at: _Number
    next_job: _Place
    receipt_seconds: tuple[tuple[_Number, _Number], ...]
    oldest_receipt: _Number
    receipts_horizon_ms: _Number
    clock_set_back: _Number
    site: Site
    scheduling_rules: SchedulingRules
    transfer_rules: TransferRules
    configuration: ConfigurationAt | None = None
    """Membership for consensus, with the index of the entry that set it (HAZARDS.md, H13)."""

    def count(self, field: str) -> int:
        """Return the number of records of a table."""
        return next((count for section, count in self.counts if WORDS.get(section) == field), 0)


class PoolCapacity(msgspec.Struct, frozen=True, array_like=True):
    """Capacity that the writer derived for one pool, bytes. Readers compare it with their own derivation (law 8)."""

    name: str
    held_bytes: int
    free_bytes: int


_DECODERS: Mapping[int, msgspec.msgpack.Decoder[Any]] = {
    HEADER: msgspec.msgpack.Decoder(SnapshotHeader),
    CAPACITY: msgspec.msgpack.Decoder(list[PoolCapacity]),
    END: msgspec.msgpack.Decoder(int),
    **{
        section: msgspec.msgpack.Decoder(
            list[table.record] if table.own_key else list[tuple[table.key, table.record]]  # type: ignore[name-defined]
        )
        for section, table in TABLE_OF.items()
    },
}
_ENCODER = msgspec.msgpack.Encoder()


def nothing(*_: object) -> None:
    """Do nothing; the default for callbacks."""


def to_sections(image: Image, *, breathe: Callable[[], None] = nothing) -> Iterator[Slice]:
    """Yield the image in slices; equal images give equal bytes. Call `breathe` after each piece of work.

    Raises:
        ImageRejected: The image could not be read back: a record has a wrong key or exceeds SLICE_BYTES_MAX, or free
            capacity contradicts the buffers (a broken invariant of this replica).
    """
    state = image.state
    counts = tuple((section, len(getattr(state, table.field))) for section, table in TABLE_OF.items())
    counts = tuple((section, count) for section, count in counts if count)
    for section, count in counts:
        if count > TABLE_OF[section].records_max:
            most = TABLE_OF[section].records_max
            raise ImageRejected(f"there are {count} {WORDS[section]}; a snapshot holds at most {most}")
    header = SnapshotHeader(
        index=image.index,
        term=image.term,
        chain_digest=image.chain_digest,
        counts=counts,
        cluster_id=state.cluster_id,
        name=state.name,
        feature_level=state.feature_level,
        release=features.release_of(state.feature_level),
        revision=state.revision,
        at=state.at,
        next_job=state.next_job,
        receipt_seconds=state.receipt_seconds,
        oldest_receipt=state.oldest_receipt,
        receipts_horizon_ms=state.receipts_horizon_ms,
        clock_set_back=state.clock_set_back,
        site=state.site,
        scheduling_rules=state.scheduling_rules,
        transfer_rules=state.transfer_rules,
        configuration=image.configuration,
    )
    payload = _encode(HEADER, header)
    decode(HEADER, payload)
    yield Slice(HEADER, payload, 1)
    held: dict[str, int] = defaultdict(int)
    for section, _ in counts:
        yield from _to_slices(section, _records(TABLE_OF[section], state, held, breathe), breathe)
    capacity = derived_capacity(dict(state.pools.items()), state.held_bytes)
    compare_capacity(capacity, derived_capacity(dict(state.pools.items()), held), held, "this replica counts")
    yield from _to_slices(CAPACITY, iter(capacity), breathe)
    yield Slice(END, _encode(END, sum(count for _, count in counts)), 1)


HOLDERS = frozenset({"buffers", "persistent"})
"""Tables whose records hold space of pools."""


def _records(table: Table, state: State, held: dict[str, int], breathe: Callable[[], None]) -> Iterator[Any]:
    """Yield the records of a section, and add the space they hold in pools to `held`."""
    records = getattr(state, table.field)
    if table.field == "receipts":
        for number, pair in enumerate(records.items(), start=1):
            yield pair
            if number % RUN_KEYS == 0:
                breathe()
        return
    for key in _sort_keys(records, breathe):
        record = records[key]
        if table.field in HOLDERS:
            held[record.pool] += record.held_bytes
        written = record if table.own_key else (key, record)
        if table.pair(written)[0] != key:
            own = table.pair(written)[0]
            raise ImageRejected(f"section {table.field}: the record with key {key!r} names {own!r}")
        yield written


def _sort_keys(keys: Iterable[_Key], breathe: Callable[[], None]) -> Iterator[_Key]:
    """Yield the keys sorted, without one long call that would block all other threads."""
    source = iter(keys)
    runs: list[list[_Key]] = []
    while run := list(islice(source, RUN_KEYS)):
        run.sort()
        runs.append(run)
        breathe()
    return merge(*runs)


def _to_slices(section: int, records: Iterator[Any], breathe: Callable[[], None]) -> Iterator[Slice]:
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


def _slice(section: int, pieces: list[bytes]) -> Slice:
    payload = msgpack.Packer().pack_array_header(len(pieces)) + b"".join(pieces)
    if len(payload) > SLICE_BYTES_MAX:
        raise ImageRejected(f"section {WORDS[section]} has a record of more than {SLICE_BYTES_MAX - SLICE_BYTES} bytes")
    return Slice(section, payload, len(pieces))


def _encode(section: int, record: Any) -> bytes:
    try:
        return _ENCODER.encode(record)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as why:
        raise ImageRejected(f"section {WORDS[section]} has a record that cannot be written: {why}") from why


def decode(section: int, payload: bytes) -> Any:
    try:
        return _DECODERS[section].decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        raise ImageRejected(f"section {WORDS[section]} has a record that cannot be read: {why}") from why


def derived_capacity(pools: Mapping[str, Pool], held: Mapping[str, int]) -> list[PoolCapacity]:
    return [PoolCapacity(name, held.get(name, 0), free_bytes(pools[name], held.get(name, 0))) for name in sorted(pools)]


def compare_capacity(said: list[PoolCapacity], derived: list[PoolCapacity], held: Mapping[str, int], who: str) -> None:
    pools = {row.name for row in derived}
    for name in sorted(held):
        if held[name] and name not in pools:
            raise ImageRejected(f"buffers hold {held[name]} bytes of pool {name!r}, which does not exist")
    for row, truth in zip(said, derived, strict=False):
        if row != truth:
            raise ImageRejected(
                f"pool {row.name!r}: {who} {row.held_bytes} bytes held and {row.free_bytes} free, but its buffers give "
                f"{truth.held_bytes} held and {truth.free_bytes} free"
            )
    if len(said) != len(derived):
        raise ImageRejected(f"capacity is given for {len(said)} pools, but there are {len(derived)}")


MAP_STEP_RECORDS = 4096
"""Number of records inserted into a map at once, which blocks other Python threads for one or two milliseconds."""


JOBS, BUFFERS, POOLS, RECEIPTS, ANSWERS = (
    next(table.section for table in TABLE_OF.values() if table.field == field)
    for field in ("jobs", "buffers", "pools", "receipts", "answers")
)


class Assembly:
    """Rebuilds an image from its slices, in order, checking each. Raises ReleaseNeeded for an unknown feature level.

    `keep=False` drops jobs and cached replies as they are read, for a summary.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._section = 0
        self._header: SnapshotHeader | None = None
        self._last: Any = None
        self._records: dict[int, dict[Any, Any]] = {section: {} for section in (*TABLE_OF, CAPACITY)}
        self._counts: dict[int, int] = defaultdict(int)
        self._held: dict[str, int] = defaultdict(int)

    @property
    def header(self) -> SnapshotHeader:
        """Header of the image.

        Raises:
            ImageRejected: The header has not been read yet.
        """
        if self._header is None:
            raise ImageRejected("the snapshot has no header")
        return self._header

    @property
    def capacity(self) -> list[PoolCapacity]:
        """Capacity of each pool; verified after `finish`."""
        return list(self._records[CAPACITY].values())

    @property
    def pools(self) -> list[Pool]:
        """Pools of the image."""
        return list(self._records[POOLS].values())

    def add(self, section: int, payload: bytes) -> None:
        """Add the next slice.

        Raises:
            ImageRejected: The slice is out of order or malformed.
        """
        if section not in ORDER:
            raise ImageRejected(f"section {section} is unknown: a newer release wrote it; upgrade this replica")
        before, place = self._section, ORDER[section]
        repeats = before == section and section in self._records
        if (not before) != (section == HEADER) or (before and place <= ORDER[before] and not repeats):
            after = f"after {WORDS[before]}" if before else "at the start"
            raise ImageRejected(f"section {WORDS[section]} is out of order {after}")
        self._section = section
        found = decode(section, payload)
        if section == HEADER:
            self._take_header(found)
            return
        again = msgspec.msgpack.encode(found)
        if again != payload and not is_earlier_form(payload, again):
            if is_earlier_form(again, payload):
                raise ImageRejected(
                    f"section {WORDS[section]} has records with more fields than this release knows: a newer release "
                    "wrote it; upgrade this replica"
                )
            raise ImageRejected(f"section {WORDS[section]} is not in canonical form")
        if section == END:
            self._take_end(found)
        else:
            self._take_records(section, found, first=before != section)

    def _take_header(self, header: SnapshotHeader) -> None:
        features.check_level(
            header.feature_level,
            header.release,
            place=f"a snapshot of entry {header.index}, revision {header.revision}",
        )
        placed = header.configuration
        wrong = None if placed is None else check_members(placed.configuration)
        if placed is not None and (wrong is not None or not 0 < placed.index <= header.index):
            raise ImageRejected(f"its members are not valid: {wrong or f'entry {placed.index} cannot set them'}")
        sections = [section for section, _ in header.counts]
        if sections != [section for section in TABLE_OF if section in sections] or not all(n for _, n in header.counts):
            raise ImageRejected(f"its header lists the sections {sections}, which is not possible")
        for section, count in header.counts:
            if count > TABLE_OF[section].records_max:
                most = TABLE_OF[section].records_max
                raise ImageRejected(f"its header announces {count} {WORDS[section]}; at most {most} are read")
        self._header = header

    def _take_records(self, section: int, found: list[Any], *, first: bool) -> None:
        table = TABLE_OF.get(section)
        if not found:
            raise ImageRejected(f"section {WORDS[section]} has an empty slice")
        keep = self._keep or section in (POOLS, CAPACITY)
        kept = self._records[section]
        last = None if first else self._last
        for written in found:
            key, record = (written.name, written) if table is None else table.pair(written)
            place = record.revision if section == RECEIPTS else key
            if last is not None and place <= last:
                raise ImageRejected(f"section {WORDS[section]}: {place!r} follows {last!r}, out of order")
            last = place
            if WORDS[section] in HOLDERS:
                self._held[record.pool] += record.held_bytes
            if keep:
                key, record = self._shared(section, key, record)
                kept[key] = record
        self._last = last
        self._counts[section] += len(found)
        limit = self._expected(section)
        if self._counts[section] > limit:
            raise ImageRejected(f"section {WORDS[section]} has more than the {limit} records that the header announces")

    def _shared(self, section: int, key: Any, record: Any) -> tuple[Any, Any]:
        """Return the record with equal parts replaced by shared objects, as in a folded State."""
        if section == JOBS:
            return key, intern_job(record)
        if section in (RECEIPTS, ANSWERS):
            return key, intern_receipt(record)
        if section == BUFFERS:
            job = self._records[JOBS].get(key)
            return key if job is None else job.id, intern_buffer(record, job)
        return key, record

    def _expected(self, section: int) -> int:
        return self.header.count(WORDS[POOLS if section == CAPACITY else section])

    def _take_end(self, total: int) -> None:
        for section in self._records:
            if self._counts[section] != self._expected(section):
                raise ImageRejected(
                    f"section {WORDS[section]} has {self._counts[section]} records; the header announces "
                    f"{self._expected(section)}"
                )
        said = sum(count for _, count in self.header.counts)
        if total != said:
            raise ImageRejected(f"the end announces {total} records; the header {said}")

    def finish(self) -> None:
        """Check that the image is complete, and compare the stated capacity with the derived capacity.

        Raises:
            ImageRejected: The capacity of a pool differs; the message names the pool.
        """
        if self._section != END:
            raise ImageRejected("it ends before its end section: it is truncated")
        derived = derived_capacity({pool.name: pool for pool in self.pools}, self._held)
        compare_capacity(self.capacity, derived, self._held, "the snapshot says")

    def image(self, breathe: Callable[[], None] = nothing) -> Image:
        """Return the image.

        `breathe` is called from time to time; it may block to let other threads run, and may raise.

        Raises:
            ImageRejected: The capacity differs, or an invariant of the state is violated.
        """

        def mapped(items: Mapping[Any, Any]) -> immutables.Map[Any, Any]:
            return _to_persistent_map(items, breathe)

        self.finish()
        header, records = self.header, self._records
        try:
            receipts = _receipts(records[RECEIPTS].items(), breathe)
        except LedgerViolation as error:
            raise ImageRejected(f"section receipts: {error}") from error
        try:
            answers = _answers(records[ANSWERS].items(), breathe)
        except ValueError as error:
            raise ImageRejected(f"section answers: {error}") from error
        state = derive(
            State(
                cluster_id=header.cluster_id,
                name=header.name,
                feature_level=header.feature_level,
                revision=Revision(header.revision),
                at=Instant(header.at),
                site=header.site,
                scheduling_rules=header.scheduling_rules,
                transfer_rules=header.transfer_rules,
                next_job=header.next_job,
                receipts=receipts,
                receipt_seconds=tuple((second, Revision(first)) for second, first in header.receipt_seconds),
                oldest_receipt=header.oldest_receipt,
                receipts_horizon_ms=header.receipts_horizon_ms,
                clock_set_back=header.clock_set_back,
                answers=answers,
                **{
                    table.field: mapped(records[section])
                    for section, table in TABLE_OF.items()
                    if section not in (RECEIPTS, ANSWERS)
                },
            )
        )
        broken = find_violations(state)
        if broken:
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            raise ImageRejected(f"an invariant is violated: {broken[0]}{more}")
        return Image(state, header.index, header.term, header.chain_digest, header.configuration)


def _receipts(records: Iterable[tuple[bytes, CachedReply]], breathe: Callable[[], None]) -> SingleReplies:
    receipts, left = SingleReplies(), iter(records)
    while step := list(islice(left, MAP_STEP_RECORDS)):
        builder = receipts.mutate()
        for command_id, receipt in step:
            builder.add(command_id, receipt)
        receipts = builder.finish()
        breathe()
    return receipts


def _answers(records: Iterable[tuple[bytes, CachedReply]], breathe: Callable[[], None]) -> SessionReplies:
    def in_steps() -> Iterator[tuple[bytes, CachedReply]]:
        for number, record in enumerate(records, start=1):
            yield record
            if number % MAP_STEP_RECORDS == 0:
                breathe()

    return SessionReplies(in_steps())


def _to_persistent_map(items: Mapping[Any, Any], breathe: Callable[[], None]) -> immutables.Map[Any, Any]:
    """Return a persistent map of the items, built in steps that do not block the interpreter for long."""
    made = immutables.Map[Any, Any]().mutate()
    left = iter(items.items())
    while step := list(islice(left, MAP_STEP_RECORDS)):
        made.update(step)
        breathe()
    return made.finish()
