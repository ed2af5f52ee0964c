"""Putting an image together from its slices, in order, checking each: the reading side of `snapshots.image`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import immutables
import msgspec

from replica.messages import Receipt, features
from replica.model import Pool
from replica.state import Receipts, State, check, derive, shared_buffer, shared_job
from replica.values import Instant, LedgerViolation, Revision
from snapshots.image import (
    CAPACITY,
    END,
    HEADER,
    HOLDERS,
    ORDER,
    TABLE_OF,
    WORDS,
    Header,
    Image,
    ImageRefused,
    PoolCapacity,
    compare_capacity,
    decode,
    derived_capacity,
)
from wal import check as check_members
from wal import is_earlier_form

MAP_STEP_RECORDS = 4096
"""Records put into a map at once, count: a millisecond or two in which no other thread of Python's runs."""


JOBS, BUFFERS, POOLS, RECEIPTS = (
    next(table.section for table in TABLE_OF.values() if table.field == field)
    for field in ("jobs", "buffers", "pools", "receipts")
)


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
        self._section = 0
        self._header: Header | None = None
        self._last: Any = None
        self._records: dict[int, dict[Any, Any]] = {section: {} for section in (*TABLE_OF, CAPACITY)}
        self._counts: dict[int, int] = defaultdict(int)
        self._held: dict[str, int] = defaultdict(int)

    @property
    def header(self) -> Header:
        """The header; raises ImageRefused if there was none yet."""
        if self._header is None:
            raise ImageRefused("the snapshot has no header")
        return self._header

    @property
    def capacity(self) -> list[PoolCapacity]:
        """The capacity of each pool, once `finish` has compared it."""
        return list(self._records[CAPACITY].values())

    @property
    def pools(self) -> list[Pool]:
        """The pools."""
        return list(self._records[POOLS].values())

    def add(self, section: int, payload: bytes) -> None:
        """Take the next slice; raises ImageRefused if it cannot come here or does not hold what it must."""
        if section not in ORDER:
            raise ImageRefused(f"section {section} is unknown: a newer release wrote it; upgrade this replica")
        before, place = self._section, ORDER[section]
        repeats = before == section and section in self._records
        if (not before) != (section == HEADER) or (before and place <= ORDER[before] and not repeats):
            after = f"after {WORDS[before]}" if before else "at the start"
            raise ImageRefused(f"section {WORDS[section]} stands {after}, where it cannot be")
        self._section = section
        found = decode(section, payload)
        if section == HEADER:
            self._take_header(found)
            return
        again = msgspec.msgpack.encode(found)
        if again != payload and not is_earlier_form(payload, again):
            if is_earlier_form(again, payload):
                raise ImageRefused(
                    f"section {WORDS[section]} has records with more fields than this release knows: a newer release "
                    "wrote it; upgrade this replica"
                )
            raise ImageRefused(f"section {WORDS[section]} is not in canonical form")
        if section == END:
            self._take_end(found)
        else:
            self._take_records(section, found, first=before != section)

    def _take_header(self, header: Header) -> None:
        features.check_level(
            header.feature_level,
            header.release,
            place=f"a snapshot of entry {header.index}, revision {header.revision}",
        )
        placed = header.configuration
        wrong = None if placed is None else check_members(placed.configuration)
        if placed is not None and (wrong is not None or not 0 < placed.index <= header.index):
            raise ImageRefused(f"its members are not sound: {wrong or f'entry {placed.index} cannot say who they are'}")
        sections = [section for section, _ in header.counts]
        if sections != [section for section in TABLE_OF if section in sections] or not all(n for _, n in header.counts):
            raise ImageRefused(f"it says that it has the sections {sections}, which cannot be")
        for section, count in header.counts:
            if count > TABLE_OF[section].records_max:
                most = TABLE_OF[section].records_max
                raise ImageRefused(f"it says {count} {WORDS[section]}; at most {most} are read")
        self._header = header

    def _take_records(self, section: int, found: list[Any], *, first: bool) -> None:
        table = TABLE_OF.get(section)
        if not found:
            raise ImageRefused(f"section {WORDS[section]} has an empty slice")
        keep = self._keep or section in (POOLS, CAPACITY)
        kept = self._records[section]
        last = None if first else self._last
        for written in found:
            key, record = (written.name, written) if table is None else table.pair(written)
            place = record.revision if section == RECEIPTS else key
            if last is not None and place <= last:
                raise ImageRefused(f"section {WORDS[section]}: {place!r} stands after {last!r}, out of order")
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
            raise ImageRefused(f"section {WORDS[section]} has more than the {limit} records that the header says")

    def _shared(self, section: int, key: Any, record: Any) -> tuple[Any, Any]:
        """Return the record with what it has in common with others shared, as it is in a State that was folded."""
        if section == JOBS:
            return key, shared_job(record)
        if section == BUFFERS:
            job = self._records[JOBS].get(key)
            return key if job is None else job.id, shared_buffer(record, job)
        return key, record

    def _expected(self, section: int) -> int:
        return self.header.count(WORDS[POOLS if section == CAPACITY else section])

    def _take_end(self, total: int) -> None:
        for section in self._records:
            if self._counts[section] != self._expected(section):
                raise ImageRefused(
                    f"section {WORDS[section]} has {self._counts[section]} records; the header says "
                    f"{self._expected(section)}"
                )
        said = sum(count for _, count in self.header.counts)
        if total != said:
            raise ImageRefused(f"the end says {total} records; the header says {said}")

    def finish(self) -> None:
        """Compare the derived capacity once everything has been added; raises ImageRefused naming the pool."""
        if self._section != END:
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
            receipts = _receipts(records[RECEIPTS].items(), breathe)
        except LedgerViolation as error:
            raise ImageRefused(f"section receipts: {error}") from error
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
                oldest_receipt=header.oldest_receipt,
                receipts_horizon_ms=header.receipts_horizon_ms,
                **{table.field: mapped(records[section]) for section, table in TABLE_OF.items() if section != RECEIPTS},
            )
        )
        broken = check(state)
        if broken:
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            raise ImageRefused(f"an invariant does not hold: {broken[0]}{more}")
        return Image(state, header.index, header.term, header.chain_digest, header.configuration)


def _receipts(records: Iterable[tuple[bytes, Receipt]], breathe: Callable[[], None]) -> Receipts:
    receipts, left = Receipts(), iter(records)
    while step := list(islice(left, MAP_STEP_RECORDS)):
        builder = receipts.mutate()
        for command_id, receipt in step:
            builder.add(command_id, receipt)
        receipts = builder.finish()
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
