"""Putting an image together from its slices, in order, checking each: the reading side of `snapshots.image`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import immutables
import msgspec

from replica.messages import features
from replica.model import Pool
from replica.state import Receipts, State, check, derive, shared_buffer, shared_job
from replica.values import Instant, LedgerViolation, Revision
from snapshots.image import (
    COUNTED,
    FOUNDING_SHAPES,
    KEYS,
    LATER,
    ORDER,
    RECORDS_MAX,
    SHAPED,
    SHAPES,
    Image,
    ImageRefused,
    LaterHeader,
    PoolCapacity,
    ReceiptRecord,
    Section,
    compare_capacity,
    decode,
    derived_capacity,
)
from wal import check as check_members

MAP_STEP_RECORDS = 4096
"""Records put into a map at once, count: a millisecond or two in which no other thread of Python's runs."""


WHOLE_SHAPES = (SHAPES, FOUNDING_SHAPES)
"""What a writer of this release says of its records: then they must be spelled as this one would."""


def from_sections(slices: Iterable[tuple[int, bytes]]) -> Image:
    """Return the image that `to_sections` gave, with its derived maps built again; raises ImageRefused."""
    assembly = Assembly()
    for section, payload in slices:
        assembly.add(section, payload)
    return assembly.image()


class Assembly:
    """Takes the slices of an image in order, checks each, and gives the image; ReleaseNeeded for a feature level above
    what this release knows. `keep=False` drops jobs and receipts as they are read: for a summary.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._section: Section | None = None
        self._header: LaterHeader | None = None
        self._last: Any = None
        self._records: dict[Section, dict[Any, Any]] = {section: {} for section in KEYS}
        self._counts: dict[Section, int] = defaultdict(int)
        self._held: dict[str, int] = defaultdict(int)

    @property
    def header(self) -> LaterHeader:
        """The header; raises ImageRefused if there was none yet."""
        if self._header is None:
            raise ImageRefused("the snapshot has no header")
        return self._header

    @property
    def capacity(self) -> list[PoolCapacity]:
        """The capacity of each pool, once `finish` has compared it."""
        return list(self._records[Section.CAPACITY].values())

    @property
    def pools(self) -> list[Pool]:
        """The pools."""
        return list(self._records[Section.POOLS].values())

    def add(self, number: int, payload: bytes) -> None:
        """Take the next slice; raises ImageRefused if it cannot come here or does not hold what it must."""
        try:
            section = Section(number)
        except ValueError:
            raise ImageRefused(f"section {number} is unknown: a newer release wrote it; upgrade this replica") from None
        before = self._section
        repeats = before is section and section in KEYS
        place = ORDER[section]
        if (before is None) != (section is Section.HEADER) or (
            before is not None and place <= ORDER[before] and not repeats
        ):
            after = "at the start" if before is None else f"after {before.word}"
            raise ImageRefused(f"section {section.word} stands {after}, where it cannot be")
        self._section = section
        found = decode(section, payload)
        # An older writer knew fewer fields, so only a writer of our own shapes must have written what we would write.
        if (
            self._header is not None
            and self._header.shapes in WHOLE_SHAPES
            and msgspec.msgpack.encode(found) != payload
        ):
            raise ImageRefused(f"section {section.word} is not in canonical form")
        if section is Section.HEADER:
            self._take_header(found)
        elif section is Section.END:
            self._take_end(found)
        else:
            self._take_records(section, found, first=before is not section)

    def _take_header(self, header: LaterHeader) -> None:
        features.check_level(
            header.feature_level,
            header.release,
            place=f"a snapshot of entry {header.index}, revision {header.revision}",
        )
        for kind, known, written in zip(SHAPED, SHAPES, header.shapes, strict=False):
            if written > known:
                raise ImageRefused(
                    f"{kind.__name__} has {written} fields where this release knows {known}: a newer release wrote it; "
                    "upgrade this replica"
                )
        if len(header.shapes) > len(SHAPED):
            raise ImageRefused("it holds kinds of records that this release does not know; upgrade this replica")
        placed = header.configuration
        wrong = None if placed is None else check_members(placed.configuration)
        if placed is not None and (wrong is not None or not 0 < placed.index <= header.index):
            raise ImageRefused(f"its members are not sound: {wrong or f'entry {placed.index} cannot say who they are'}")
        sections = [number for number, _ in header.later]
        if sections != [section for section in LATER if section in sections] or not all(n for _, n in header.later):
            raise ImageRefused(f"it says that it has the sections {sections}, which cannot be")
        for section, count in self._said(header).items():
            if count > RECORDS_MAX[section]:
                raise ImageRefused(f"it says {count} {section.word}; at most {RECORDS_MAX[section]} are read")
        self._header = header

    def _take_records(self, section: Section, found: list[Any], *, first: bool) -> None:
        key_of = KEYS[section]
        if not found:
            raise ImageRefused(f"section {section.word} has an empty slice")
        keep = self._keep or section in (Section.POOLS, Section.CAPACITY)
        kept = self._records[section]
        last = None if first else self._last
        for record in found:
            key = key_of(record)
            if last is not None and key <= last:
                raise ImageRefused(f"section {section.word}: {key!r} stands after {last!r}, out of order")
            last = key
            if section is Section.BUFFERS:
                self._held[record.pool] += record.held_bytes
            elif section is Section.PERSISTENT:
                self._held[record[1].pool] += record[1].held_bytes
            if keep:
                key, record = self._shared(section, key, record)
                kept[key] = record
        self._last = last
        self._counts[section] += len(found)
        limit = self._expected(section)
        if self._counts[section] > limit:
            raise ImageRefused(f"section {section.word} has more than the {limit} records that the header says")

    def _shared(self, section: Section, key: Any, record: Any) -> tuple[Any, Any]:
        """Return the record with what it has in common with others shared, as it is in a State that was folded."""
        if section is Section.JOBS:
            return key, shared_job(record)
        if section is Section.BUFFERS:
            job = self._records[Section.JOBS].get(key)
            return (key if job is None else job.id), shared_buffer(record, job)
        return key, record

    def _expected(self, section: Section) -> int:
        return self._said(self.header).get(Section.POOLS if section is Section.CAPACITY else section, 0)

    @staticmethod
    def _said(header: LaterHeader) -> dict[Section, int]:
        """Return how many records of each section the header says there are."""
        later = {Section(number): count for number, count in header.later}
        return {**dict(zip(COUNTED, header.counts, strict=True)), **later}

    def _take_end(self, total: int) -> None:
        for section in KEYS:
            if self._counts[section] != self._expected(section):
                raise ImageRefused(
                    f"section {section.word} has {self._counts[section]} records; the header says "
                    f"{self._expected(section)}"
                )
        said = sum(self._said(self.header).values())
        if total != said:
            raise ImageRefused(f"the end says {total} records; the header says {said}")

    def finish(self) -> None:
        """Compare the derived capacity once everything has been added; raises ImageRefused naming the pool."""
        if self._section is not Section.END:
            raise ImageRefused("it ends before its end section: it is cut short")
        derived = derived_capacity({pool.name: pool for pool in self.pools}, self._held)
        compare_capacity(self.capacity, derived, self._held, "the snapshot says")

    def image(self, breathe: Callable[[], None] = lambda: None) -> Image:
        """Return the image; raises ImageRefused for capacity that differs, or an invariant that does not hold.

        `breathe` is called now and then, may wait there to let other threads run, and may raise.
        """

        def mapped(items: Mapping[Any, Any]) -> immutables.Map[Any, Any]:
            return _mapped(items, breathe)

        self.finish()
        header, records = self.header, self._records
        try:
            receipts = _receipts(records[Section.RECEIPTS].values(), breathe)
        except LedgerViolation as error:
            raise ImageRefused(f"section receipts: {error}") from error
        state = derive(
            State(
                cluster_id=header.cluster_id,
                name=header.name,
                feature_level=header.feature_level,
                revision=Revision(header.revision),
                at=Instant(header.at),
                policy=header.policy,
                next_job=header.next_job,
                pools=mapped(records[Section.POOLS]),
                nodes=mapped(records[Section.NODES]),
                jobs=mapped(records[Section.JOBS]),
                buffers=mapped(records[Section.BUFFERS]),
                receipts=receipts,
                oldest_receipt=header.oldest_receipt,
                receipts_horizon_ms=header.receipts_horizon_ms,
                **{later.field: mapped(dict(records[section].values())) for section, later in LATER.items()},
            )
        )
        broken = check(state)
        if broken:
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            raise ImageRefused(f"an invariant does not hold: {broken[0]}{more}")
        return Image(state, header.index, header.term, header.chain_digest, header.configuration)


def _receipts(records: Iterable[ReceiptRecord], breathe: Callable[[], None]) -> Receipts:
    receipts, left = Receipts(), iter(records)
    while step := list(islice(left, MAP_STEP_RECORDS)):
        draft = receipts.mutate()
        for record in step:
            draft.add(record.id, record.receipt)
        receipts = draft.finish()
        breathe()
    return receipts


def _mapped(items: Mapping[Any, Any], breathe: Callable[[], None]) -> immutables.Map[Any, Any]:
    """Return a persistent map of the items. All at once would hold the interpreter as long as an election takes."""
    made = immutables.Map[Any, Any]().mutate()
    left = iter(items.items())
    while step := list(islice(left, MAP_STEP_RECORDS)):
        made.update(step)
        breathe()
    return made.finish()
