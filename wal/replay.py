"""Content of one sync in the sync log, and the replay of sync records on top of LMDB's rows.

The replica and auditors use the same function. The replica stores the result in LMDB before it makes any promise;
auditors write nothing. A record that contradicts its predecessors is always rejected.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from forebay.wal import codec, records
from forebay.wal.failures import BrokenInvariant
from forebay.wal.records import DIGEST_BYTES, ENTRY_MAX_BYTES, ChainRow, DamagedValue, Entry, HardState, Marks
from forebay.wal.rows import AppliedRow

_FIXED = struct.Struct(f">QQQQ{DIGEST_BYTES}sHII")
_ENTRY = struct.Struct(">QIH")
_U64_BYTES: Final = 8


class Sync(NamedTuple):
    """Sync record: the journal keeps its entries up to `first - 1`, followed by `entries`.

    `last_before` is the journal's last index before the sync. `revisions` has the revision after each entry applied
    since the previous sync; `applied_digest` is the ledger's digest after the last of these entries. `hard` is None if
    term and vote did not change.
    """

    last_before: int
    first: int
    entries: Sequence[Entry]
    hard: HardState | None
    commit_index: int
    applied_index: int
    applied_digest: bytes
    revisions: Sequence[int]


class Contradiction(Exception):
    """Record that contradicts LMDB or earlier records; the message gives the reason."""


class ReplayedLog(NamedTuple):
    """Result of a replay: LMDB's entries up to `kept`, then `entries`, with the resulting hard state and marks."""

    hard: HardState
    marks: Marks
    kept: int
    entries: list[Entry]
    applied: list[AppliedRow]


def pack(sync: Sync) -> bytes:
    """Pack a sync as the body of a record."""
    hard = b"" if sync.hard is None else records.pack_hard(sync.hard)
    entries, revisions = sync.entries, sync.revisions
    fixed = _FIXED.pack(
        sync.last_before,
        sync.first,
        sync.commit_index,
        sync.applied_index,
        sync.applied_digest,
        len(hard),
        len(entries),
        len(revisions),
    )
    heads = [_ENTRY.pack(entry.term, len(entry.data), len(entry.seal)) for entry in entries]
    data = [entry.seal + entry.data for entry in entries]
    return b"".join([fixed, hard, *heads, *data, struct.pack(f">{len(revisions)}Q", *revisions)])


def unpack(body: bytes) -> Sync:
    """Unpack a sync of `pack`.

    Raises:
        DamagedValue: The layout is wrong.
    """
    if len(body) < _FIXED.size:
        raise DamagedValue(f"the record has {len(body)} bytes, which is too short")
    last_before, first, commit, applied, digest, hard_bytes, entry_count, revision_count = _FIXED.unpack_from(body)
    at = _FIXED.size + hard_bytes
    data_at = at + entry_count * _ENTRY.size
    revisions_at = len(body) - revision_count * _U64_BYTES
    if not data_at <= revisions_at <= len(body):
        raise DamagedValue(f"the record has {len(body)} bytes, but announces {entry_count} entries")
    hard = records.unpack_hard(body[_FIXED.size : at]) if hard_bytes else None
    entries = []
    for index, (term, size_bytes, seal_bytes) in enumerate(_ENTRY.iter_unpack(body[at:data_at]), start=first):
        if size_bytes > ENTRY_MAX_BYTES:
            raise DamagedValue(f"an entry of the record has {size_bytes} bytes; the maximum is {ENTRY_MAX_BYTES}")
        seal = body[data_at : data_at + seal_bytes]
        data_at += seal_bytes
        entries.append(Entry(index, term, body[data_at : data_at + size_bytes], seal))
        data_at += size_bytes
    if data_at != revisions_at:
        raise DamagedValue(f"the entries of the record end at byte {data_at} instead of {revisions_at}")
    revisions = struct.unpack(f">{revision_count}Q", body[revisions_at:])
    return Sync(last_before, first, entries, hard, commit, applied, digest, revisions)


def replay(hard: HardState, marks: Marks, bodies: Sequence[bytes], stored: Callable[[int], Entry]) -> ReplayedLog:
    """Apply sync records to LMDB's hard state and marks. `stored` reads an entry from LMDB.

    Raises:
        Contradiction: A record contradicts LMDB or the records before it.
    """
    folding = _Folding(hard, marks, stored)
    for number, body in enumerate(bodies, start=1):
        try:
            folding.add(unpack(body))
        except (Contradiction, DamagedValue) as error:
            raise Contradiction(f"record {number}: {error}") from error
    return folding.result()


def chain_up_to(start: ChainRow, entries: Sequence[Entry], wanted: ChainRow) -> list[AppliedRow]:
    """Chain the entries after `start`, which end at a snapshot with the row `wanted`.

    Raises:
        BrokenInvariant: The entries end with another digest or revision.
    """
    reached, chained = start, list[AppliedRow]()
    index = entries[-1].index
    for entry in entries:
        try:
            after = codec.revision_after(entry.data, reached.revision)
        except codec.CodecError as error:
            raise BrokenInvariant(f"entry {entry.index} lies before the snapshot at {index}, but {error}") from error
        row = ChainRow(records.chain_digest(reached.digest, entry), after)
        chained.append(AppliedRow(entry.index, row, after > reached.revision))
        reached = row
    if reached != wanted:
        raise BrokenInvariant(
            f"snapshot at entry {index}: digest {wanted.digest.hex()} at revision {wanted.revision}, but the entries "
            f"held give {reached.digest.hex()} at {reached.revision}: this replica and the snapshot's replica have "
            "diverged"
        )
    return chained


class _Folding:
    def __init__(self, hard: HardState, marks: Marks, stored: Callable[[int], Entry]) -> None:
        self._stored = stored
        self._base_index, self._base_term = marks.base_index, marks.base_term
        self._hard, self._commit, self._kept = hard, marks.commit_index, marks.last_index
        self._entries: list[Entry] = []
        self._applied: list[AppliedRow] = []
        self._applied_index, self._reached = marks.applied_index, ChainRow(marks.applied_digest, marks.applied_revision)

    def result(self) -> ReplayedLog:
        marks = Marks(
            base_index=self._base_index,
            base_term=self._base_term,
            last_index=self._last,
            commit_index=self._commit,
            applied_index=self._applied_index,
            applied_revision=self._reached.revision,
            applied_digest=self._reached.digest,
        )
        return ReplayedLog(self._hard, marks, self._kept, self._entries, self._applied)

    @property
    def _last(self) -> int:
        return self._kept + len(self._entries)

    def _entry(self, index: int) -> Entry:
        return self._entries[index - self._kept - 1] if index > self._kept else self._stored(index)

    def add(self, sync: Sync) -> None:
        if sync.last_before != self._last:
            raise Contradiction(f"the record follows entry {sync.last_before}, but the last entry is {self._last}")
        if sync.hard is not None:
            self._vote(sync.hard)
        self._append(sync.first, sync.entries)
        if not self._commit <= sync.commit_index <= self._last:
            raise Contradiction(
                f"commit index {sync.commit_index} after {self._commit}, and the last entry is {self._last}"
            )
        self._commit = sync.commit_index
        self._apply(sync)

    def _vote(self, hard: HardState) -> None:
        before = self._hard
        if hard.term < before.term or (hard.term == before.term and before.voted_for not in (None, hard.voted_for)):
            raise Contradiction(
                f"a vote for {hard.voted_for} in term {hard.term} after one for {before.voted_for} in {before.term}"
            )
        self._hard = hard

    def _append(self, first: int, entries: Sequence[Entry]) -> None:
        if not max(self._commit, self._applied_index) < first <= self._last + 1:
            raise Contradiction(
                f"it begins with entry {first}, but the last entry is {self._last}, and {self._commit} is committed"
            )
        if first <= self._kept:
            self._kept = first - 1
            self._entries.clear()
        else:
            del self._entries[first - self._kept - 1 :]
        term = self._base_term if self._last == self._base_index else self._entry(self._last).term
        for entry in entries:
            if not term <= entry.term <= self._hard.term:
                raise Contradiction(
                    f"entry {entry.index} of term {entry.term} after term {term}, in term {self._hard.term}"
                )
            term = entry.term
        self._entries.extend(entries)

    def _apply(self, sync: Sync) -> None:
        if not self._applied_index + len(sync.revisions) == sync.applied_index <= self._commit:
            raise Contradiction(
                f"{len(sync.revisions)} entries applied after {self._applied_index} do not end at {sync.applied_index}"
            )
        for revision in sync.revisions:
            if revision < self._reached.revision:
                raise Contradiction(f"revision {revision} after {self._reached.revision}")
            self._applied_index += 1
            row = ChainRow(records.chain_digest(self._reached.digest, self._entry(self._applied_index)), revision)
            self._applied.append(AppliedRow(self._applied_index, row, revision > self._reached.revision))
            self._reached = row
        if self._reached.digest != sync.applied_digest:
            raise Contradiction(f"the digest up to entry {sync.applied_index} differs from the recorded one")
