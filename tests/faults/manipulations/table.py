"""Table of the manipulations, one per row."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from forebay.cluster.config import FIRST_START_NAME
from forebay.cluster.consensus import Seals
from forebay.cluster.server.storage import FORGOTTEN_NAME, MEMBER_NAME
from forebay.cluster.server.tlog import LOG_DIRECTORY, SIGNING_DIRECTORY, Signer, origin_of
from forebay.replica.messages import events as e
from forebay.replica.messages.commands import Actor, ActorRole
from forebay.replica.messages.entries import Batch
from forebay.replica.messages.entries import Entry as Settled
from forebay.replica.model.accounts import License
from forebay.replica.model.job_states import JobState
from forebay.replica.state.digest import recorded_digests, state_digest
from forebay.replica.state.single_replies import SingleReplies
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.units import Instant, Revision
from forebay.wal import records
from forebay.wal.codec import NO_OP, EntryKind, decode_batch, encode_batch, kind_of, no_op_of
from forebay.wal.configuration import decode_configuration, encode_configuration
from forebay.wal.environment import Environment
from forebay.wal.failures import LOG_FILE
from forebay.wal.journal import Entry, Journal
from forebay.wal.records import Gap
from forebay.wal.sectors import BLOCK_BYTES, first_block
from tests.faults.manipulations import forge
from tests.faults.manipulations.site import (
    HONEST,
    LAST,
    MAP_SIZE_BYTES,
    NAMES,
    SNAPSHOTS,
    VICTIM,
    Case,
    folded,
    key_of,
    tree_of,
)

OLD, NEW = 300, 700
"""Entries before and behind what consensus has compacted: a start looks at the latter alone."""

FOLDED = 770
"""An entry behind the newest snapshot: a start folds it."""

TWO, ALL = ("r2", "r3"), NAMES
PAGE_BYTES = forge.PAGE_BYTES
MALLORY = Actor(ActorRole.OPERATOR, "mallory")

Do = Callable[[Case], None]


class Manipulation(NamedTuple):
    """One way to alter what stopped replicas have."""

    id: str
    what: str
    do: Do
    on: tuple[str, ...] = (VICTIM,)
    notes: int = 2
    """How many of the site's notes somebody outside has kept: two, the earlier one alone, or none."""
    leads: bool = False
    """Whether the others go on meanwhile, under the leader that the victim acknowledged to; else all are stopped."""

    @property
    def kind(self) -> str:
        """Its kind, as KINDS has it."""
        return self.id[0]


KINDS = {
    "A": "one byte flipped",
    "B": "a file cut, zeroed, deleted, foreign or renamed",
    "C": "one value altered, its checksum made right",
    "D": "entries deleted or swapped",
    "E": "rolled back",
    "F": "another replica's or cluster's directory",
    "G": "history rewritten, the chain hashed again to its end",
    "H": "a snapshot forged",
    "I": "the same on a majority, or on all",
    "J": "the notes beside the ledger",
    "K": "an entry appended without a command, not yet committed",
}


# ---- one row of the tables


def flipped(table: bytes, number: int | None = None, key: bytes = b"", **where: Any) -> Do:
    """Return what flips one bit of a stored value."""
    return lambda case: forge.flip_row(case.home, table, key or records.index_key(number or 0), **where)


def rows(change: Callable[[forge.Rows], None]) -> Do:
    """Return what alters rows of the victim."""

    def do(case: Case) -> None:
        with forge.rows_of(case.home) as opened:
            change(opened)

    return do


def chain(index: int, **changes: Any) -> Do:
    """Return what alters a chain row; `revision` is added to what it has."""

    def change(opened: forge.Rows) -> None:
        row = opened.chain(index)
        more = changes.get("revision", 0)
        opened.put_chain(index, row._replace(digest=changes.get("digest", row.digest), revision=row.revision + more))

    return rows(change)


def entry(index: int, change: Callable[[Entry], Entry]) -> Do:
    """Return what alters an entry and leaves the chain as it is."""
    return rows(lambda opened: opened.put_entry(change(opened.entry(index))))


def marks(**changes: Callable[[Any], Any]) -> Do:
    """Return what alters marks, each by a function of what it was."""

    def change(opened: forge.Rows) -> None:
        before = opened.marks
        opened.alter_marks(**{name: made(getattr(before, name)) for name, made in changes.items()})

    return rows(change)


def hard(**changes: Any) -> Do:
    """Return what alters term or vote."""
    return rows(lambda opened: opened.alter_hard(**changes))


def revisions(change: Callable[[forge.Rows, int], None]) -> Do:
    """Return what alters the row of the revision that the old entry settled."""
    return rows(lambda opened: change(opened, opened.chain(OLD).revision))


def emptied(opened: forge.Rows) -> None:
    """Remove all rows of revisions."""
    opened.transaction.drop(opened.tables[records.REVISIONS], delete=False)


def log_mark(opened: forge.Rows, more: int) -> None:
    """Alter the generation that LMDB names of the log of syncs."""
    mark = records.unpack_log(opened.raw(records.STATE, records.LOG_KEY))
    opened.put(records.STATE, records.LOG_KEY, records.pack_log(mark._replace(generation=mark.generation + more)))


# ---- entries


def deleted(*indexes: int, chained: bool = False) -> Do:
    """Return what deletes entries, and their chain rows too."""

    def change(opened: forge.Rows) -> None:
        for index in indexes:
            opened.put(records.ENTRIES, records.index_key(index), None)
            if chained:
                opened.put(records.CHAIN, records.index_key(index), None)

    return rows(change)


def swapped(opened: forge.Rows) -> None:
    """Swap two old entries."""
    first, second = opened.entry(OLD), opened.entry(OLD + 1)
    opened.put_entry(first._replace(data=second.data, term=second.term))
    opened.put_entry(second._replace(data=first.data, term=first.term))


def gap(first: int, last: int) -> Do:
    """Return what hides entries of the victim behind a gap."""
    return lambda case: gap_in(case.home, first, last)


def gap_in(home: Path, first: int, last: int) -> None:
    """Delete entries, and note a gap as one that a snapshot left behind."""
    with forge.rows_of(home) as opened:
        before, after = opened.chain(first - 1).revision, opened.chain(last).revision
        for index in range(first, last + 1):
            row = opened.chain(index)
            opened.put(records.ENTRIES, records.index_key(index), None)
            key = records.index_key(row.revision)
            if opened.transaction.get(key, db=opened.tables[records.REVISIONS]) is not None:
                opened.put(records.REVISIONS, key, None)
        for index in range(first, last):
            opened.put(records.CHAIN, records.index_key(index), None)
        opened.put_gap(Gap(first, last, before, after))
    shutil.rmtree(home / "index")


def hidden_in(home: Path) -> None:
    """Hide old entries behind a gap."""
    gap_in(home, OLD, OLD + 20)


def flipped_in(home: Path) -> None:
    """Flip one bit of an old entry."""
    forge.flip_row(home, records.ENTRIES, records.index_key(OLD))


def each(alter: Callable[[Path], None]) -> Do:
    """Return what does the same to the home of each that is altered."""

    def do(case: Case) -> None:
        for home in case.homes:
            alter(home)

    return do


def in_turn(*done: Do) -> Do:
    """Return what does one thing after the other."""

    def do(case: Case) -> None:
        for one in done:
            one(case)

    return do


# ---- files


def file(part: str, change: Callable[[Path], object]) -> Do:
    """Return what alters a file of the victim."""
    return lambda case: void(change(case.home / part))


def void(_: object) -> None:
    """Return nothing."""


def snapshot(change: Callable[[Path], object], which: int = -1) -> Do:
    """Return what alters a snapshot file, the newest one if nothing else is said."""
    return lambda case: void(change(forge.snapshots_of(case.home)[which]))


def killed(do: Do) -> Do:
    """Return the same on a replica that was killed: its last entries are in the log of syncs alone, and unsigned."""

    def killed(case: Case) -> None:
        for name in NAMES:
            for part in ("",) if name == VICTIM else (SIGNING_DIRECTORY, LOG_DIRECTORY):
                case.put_back(part, case.site.killed.with_name(name), name)
        do(case)

    return killed


def renamed(path: Path) -> None:
    """Give a snapshot the name of a newer one."""
    path.rename(path.with_name(path.name.replace(str(SNAPSHOTS[1]), str(LAST))))


# ---- from elsewhere


def earlier(*parts: str) -> Do:
    """Return what puts parts of an older copy of the victim into place."""

    def do(case: Case) -> None:
        for part in parts:
            case.put_back(part, case.site.earlier)

    return do


def set_back_and_signed(case: Case) -> None:
    """Cut the tail, and sign what is left with the replica's own key, as if nothing more had been signed."""
    forge.cut_tail(case.home, 20)
    sign_anew(case)


def larger(path: Path) -> None:
    """Write another size into a checkpoint."""
    origin, _, *rest = path.read_text().split("\n")
    path.write_text("\n".join((origin, "1000000", *rest)))


def sign_anew(case: Case) -> None:
    """Have those that were altered sign, with their own keys, what their ledgers come to now."""
    for home in case.homes:
        (home / SIGNING_DIRECTORY / "signed").unlink(missing_ok=True)
        shutil.rmtree(home / LOG_DIRECTORY, ignore_errors=True)
        with tree_of(home) as tree:

            async def root(size: int) -> bytes:
                return tree.root(size)

            signer = Signer(home / SIGNING_DIRECTORY, origin_of(case.config.cluster.id))
            asyncio.run(signer.sign(tree.size, root))


def of_another(case: Case) -> None:
    """Put the directory of another replica into the victim's place."""
    case.put_back("", case.site.home("r3"))


def relabelled(opened: forge.Rows) -> None:
    """Write the victim's name into the identity."""
    identity = records.unpack_identity(opened.raw(records.STATE, records.IDENTITY_KEY))
    opened.put(records.STATE, records.IDENTITY_KEY, records.pack_identity(identity._replace(replica=VICTIM)))


def relabelled_wholly(case: Case) -> None:
    """Put another replica's ledger into the victim's place, relabelled in both files; the victim's key stays."""
    case.put_back("wal", case.site.home("r3"))
    rows(relabelled)(case)
    path = case.home / "wal" / LOG_FILE
    identity = records.pack_identity(records.StorageIdentity(case.config.cluster.id, VICTIM))
    size_bytes = path.stat().st_size
    path.write_bytes(first_block(identity, size_bytes).ljust(size_bytes, b"\0"))


def of_another_cluster(case: Case) -> None:
    """Put the ledger of a replica of the same name of another cluster into place."""
    shutil.rmtree(case.home / "wal")
    with Environment.open(
        case.home / "wal", cluster_id="f" * 32, replica=VICTIM, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        journal = Journal(environment)
        journal.set_term(1, VICTIM)
        journal.append([Entry(1, 1, NO_OP)])
        journal.set_commit(1)
        journal.record_applied(Entry(1, 1, NO_OP), 0)
        journal.flush_hints()


# ---- history


def with_event(case: Case, kind: type[e.EventRecord], after: int) -> int:
    """Return the first entry behind one whose first event is of this kind."""
    for one in case.site.life.entries[after:]:
        if kind_of(one.data) is EntryKind.BATCH:
            events = decode_batch(one.data).entries[0].events
            if events and type(events[0]) is kind:
                return one.index
    raise AssertionError(f"there is no {kind.__name__} behind entry {after}")


def history(change: Callable[[Case], forge.Rewrite], *, folds: bool = False) -> Do:
    """Return what rewrites the history of all that are altered."""

    def do(case: Case) -> None:
        rewriting = change(case)
        for home in case.homes:
            forge.rewrite(home, rewriting, folds=folds)

    return do


def event(kind: type[e.EventRecord], change: Callable[[Any], Any], after: int = OLD) -> Callable[[Case], forge.Rewrite]:
    """Return what gives a rewriting of the first event of a kind."""
    return lambda case: forge.in_event(with_event(case, kind, after), change)


def command(
    change: Callable[[Any], Any], kind: type[e.EventRecord] = e.JobSubmitted
) -> Callable[[Case], forge.Rewrite]:
    """Return what gives a rewriting of the first command behind OLD with such an event."""
    return lambda case: forge.in_command(with_event(case, kind, OLD), change)


def asked(**changes: Any) -> Callable[[Any], Any]:
    """Return what alters what was asked of a job."""
    return lambda event: replace(event, request=replace(event.request, **changes))


def fields(**changes: Any) -> Callable[[Any], Any]:
    """Return what alters fields of a record."""
    return lambda record: replace(record, **changes)


def clock(by: int) -> Callable[[Case], forge.Rewrite]:
    """Return what gives a rewriting of the clock of one entry, by microseconds."""
    return lambda case: forge.in_batch(
        with_event(case, e.StagedIn, OLD), lambda batch: replace(batch, at=Instant(batch.at + by))
    )


def data(change: Callable[[bytes], bytes]) -> Callable[[Case], forge.Rewrite]:
    """Return what gives a rewriting of the bytes of one entry."""
    return lambda case: forge.in_data(with_event(case, e.StagedIn, OLD), change)


def members(case: Case) -> forge.Rewrite:
    """Give a rewriting of who founded the cluster."""

    def altered(data: bytes) -> bytes:
        found = decode_configuration(data)
        first, *others = found.voters
        return encode_configuration(replace(found, voters=(replace(first, api="r9:7411"), *others)))

    return forge.in_data(1, altered)


def rejection(case: Case) -> forge.Rewrite:
    """Return a rewriting of a rejection that names another user."""
    index = next(
        one.index
        for one in case.site.life.entries[OLD:]
        if kind_of(one.data) is EntryKind.BATCH and decode_batch(one.data).entries[0].rejection is not None
    )
    return forge.in_command(index, fields(actor=Actor(ActorRole.USER, "innocent")))


def term(case: Case) -> forge.Rewrite:
    """Give a rewriting of terms: the first leader led for longer."""
    return lambda one: one._replace(term=1) if one.term == 2 and one.index < OLD else one


def without_event(one: Any) -> Any:
    """Take the last event of a command away."""
    return replace(one, events=one.events[:-1])


def with_another(one: Any) -> Any:
    """Add an event to a command: the same once more."""
    return replace(one, events=(*one.events, one.events[-1]))


class Recording:
    """A rewriting that records the digests of its own states, so that the ledger agrees with itself."""

    def __init__(self, rewriting: forge.Rewrite, revisions: frozenset[int]) -> None:
        """`revisions`: those whose states are recorded."""
        self._rewriting = rewriting
        self._revisions = revisions
        self._state = EMPTY
        self._digests: dict[int, bytes] = {}

    def __call__(self, one: Entry) -> Entry:
        made = self._rewriting(one) or one
        if kind_of(made.data) is EntryKind.BATCH:
            batch = decode_batch(made.data)
            made = made._replace(data=encode_batch(self._recorded(batch)))
        self._state = folded(self._state, made)
        if self._state.revision in self._revisions:
            self._digests[self._state.revision] = state_digest(self._state)
        return made

    def _recorded(self, batch: Batch) -> Batch:
        entries = tuple(
            replace(one, events=tuple(map(self._own, one.events))) if one.command == "record_state_digest" else one
            for one in batch.entries
        )
        return replace(batch, entries=entries)

    def _own(self, event: Any) -> Any:
        return replace(event, state=self._digests[event.revision])


def recording(change: Callable[[Case], forge.Rewrite]) -> Callable[[Case], forge.Rewrite]:
    """Return the same, with the digests that are recorded made to fit."""
    return lambda case: Recording(change(case), _recorded(case))


def _recorded(case: Case) -> frozenset[int]:
    batches = (decode_batch(one.data) for one in case.site.life.entries if kind_of(one.data) is EntryKind.BATCH)
    return frozenset(found.revision for batch in batches for found in recorded_digests(batch))


def rewritten_wholly(case: Case) -> None:
    """Rewrite a job's user, and everything that would contradict: states, snapshots, recorded digests, signatures."""
    change = recording(event(e.JobSubmitted, asked(user="mallory")))
    for home in case.homes:
        forge.rewrite(home, change(case), folds=True)
    sign_anew(case)


# ---- snapshots


def forged(change: Callable[[State], State]) -> Do:
    """Return what forges the snapshots of all that are altered."""

    def do(case: Case) -> None:
        for home in case.homes:
            forge.forge_snapshots(home, change)

    return do


def a_job(change: Callable[[Any], Any]) -> Callable[[State], State]:
    """Return what alters a job of a state."""

    def altered(state: State) -> State:
        number = max(number for number, job in state.jobs.items() if job.state is JobState.COMPLETED)
        return replace(state, jobs=state.jobs.set(number, change(state.jobs[number])))

    return altered


def doubled(state: State) -> State:
    """Double a pool."""
    pool = state.pools["fast"]
    return replace(state, pools=state.pools.set("fast", replace(pool, quantity_bytes=2 * pool.quantity_bytes)))


def without_receipts(state: State) -> State:
    """Forget which commands were settled."""
    return replace(state, receipts=SingleReplies())


def mallory_submits(state: State) -> State:
    """Let the next job have another number."""
    return replace(state, next_job=state.next_job + 1)


# ---- notes


def cut_free_pages(case: Case) -> None:
    """Cut pages off the data file that a transaction gave back, at its end."""
    for value in (bytes(32 * PAGE_BYTES), None):
        with forge.rows_of(case.home) as opened:
            opened.put(records.STATE, b"filler", value)
    forge.cut(case.home / "wal" / "data.mdb", 2 * PAGE_BYTES)


def as_new(case: Case) -> None:
    """Empty the directory, and say that the replica has never run."""
    shutil.rmtree(case.home)
    case.home.mkdir(mode=0o700)
    (case.home / FIRST_START_NAME).touch()


def appended(*, signs: bool = True, leads: bool = False) -> Do:
    """Return what appends an operator's command to a log, as one that is not committed yet."""

    def do(case: Case) -> None:
        (home,), (name,) = case.homes, case.altered
        seals = Seals(case.config.cluster.id, name, key_of(home))
        with forge.rows_of(home) as opened:
            marks, last = opened.marks, opened.entry(opened.marks.last_index)
            command = Settled(b"m" * 16, MALLORY, "set_license", (e.LicenseSet(License("matlab", 99)),))
            batch = Batch(Revision(marks.applied_revision), case.site.life.states[-1].at, (command,))
            term = opened.hard.term + leads
            for data in [*([no_op_of(name)] if leads else []), encode_batch(batch)]:
                one = Entry(last.index + 1, term, data)
                one = seals.sealed(one, last.term, {}) if signs else one
                opened.put_entry(one)
                last = one
            opened.alter_marks(last_index=last.index)
            if leads:
                opened.alter_hard(term=term, voted_for=name)

    return do


def all_earlier(case: Case) -> None:
    """Set all three back to an older copy of each."""
    for name in case.altered:
        case.put_back("", case.site.directory / "earlier" / name, name)


ROWS: tuple[Manipulation, ...] = (
    Manipulation("A1", "an old entry", flipped(records.ENTRIES, OLD)),
    Manipulation("A2", "a new entry", flipped(records.ENTRIES, NEW)),
    Manipulation("A3", "the last entry", flipped(records.ENTRIES, LAST)),
    Manipulation("A4", "an old chain row", flipped(records.CHAIN, OLD)),
    Manipulation("A5", "a new chain row", flipped(records.CHAIN, NEW)),
    Manipulation("A6", "the row of a revision", flipped(records.REVISIONS, OLD - 3)),
    Manipulation("A7", "the marks", flipped(records.STATE, key=records.MARKS_KEY)),
    Manipulation("A8", "term and vote", flipped(records.STATE, key=records.HARD_KEY)),
    Manipulation("A9", "the identity", flipped(records.STATE, key=records.IDENTITY_KEY)),
    Manipulation("A10", "what LMDB says of the log of syncs", flipped(records.STATE, key=records.LOG_KEY)),
    Manipulation("A11", "the newer meta page", lambda case: forge.flip_meta(case.home)),
    Manipulation("A12", "the key of an old entry", flipped(records.ENTRIES, OLD, key_byte=6)),
    Manipulation("A13", "a record of the log of syncs", killed(lambda case: forge.flip_log(case.home, record=True))),
    Manipulation("A14", "the first block of the log of syncs", lambda case: forge.flip_log(case.home, record=False)),
    Manipulation("A15", "the head of the newest snapshot", snapshot(lambda path: forge.flip(path, 3))),
    Manipulation("A16", "the middle of the newest snapshot", snapshot(lambda path: forge.flip(path, 20_000))),
    Manipulation("A17", "the end of the newest snapshot", snapshot(lambda path: forge.flip(path, -1))),
    Manipulation("A18", "a tile", file("tlog/tile/0/000", lambda path: forge.flip(path, 100))),
    Manipulation("A19", "the index by job", lambda case: forge.flip_index(case.home)),
    Manipulation("A20", "the signing key", file("signing/key", lambda path: forge.flip(path, 5))),
    Manipulation("B1", "`data.mdb` cut by two pages that are free", cut_free_pages),
    Manipulation("B2", "`data.mdb` cut by a quarter",
                 file("wal/data.mdb", lambda path: forge.cut(path, 16 * PAGE_BYTES))),
    Manipulation("B3", "`data.mdb` emptied", file("wal/data.mdb", lambda path: os.truncate(path, 0))),
    Manipulation("B4", "`data.mdb` deleted", file("wal/data.mdb", Path.unlink)),
    Manipulation("B5", "`data.mdb` foreign", file("wal/data.mdb", lambda path: path.write_bytes(b"foreign " * 8192))),
    Manipulation("B6", "`sync.log` deleted", file("wal/sync.log", Path.unlink)),
    Manipulation("B7", "`sync.log` cut by a page", file("wal/sync.log", lambda path: forge.cut(path, PAGE_BYTES))),
    Manipulation("B8", "`sync.log` zeroed", file("wal/sync.log", lambda path: forge.zero(path, 0, 1 << 20))),
    Manipulation("B9", "all snapshots deleted", file("snapshots", shutil.rmtree)),
    Manipulation("B10", "the newest snapshot cut in half", snapshot(lambda path: forge.cut(path, 20_000))),
    Manipulation("B11", "a snapshot renamed to a newer one", snapshot(renamed)),
    Manipulation("B12", "`lock.mdb` foreign", file("wal/lock.mdb", lambda path: path.write_bytes(b"foreign " * 64))),
    Manipulation("B13", "the tiles deleted", file("tlog", shutil.rmtree)),
    Manipulation("B14", "the index by job deleted", file("index", shutil.rmtree)),
    Manipulation("B15", "the signing key deleted", file("signing/key", Path.unlink)),
    Manipulation("B16", "what was signed last deleted", file("signing/signed", Path.unlink)),
    Manipulation("B17", "what was signed last cut", file("signing/signed", lambda path: forge.cut(path, 8))),
    Manipulation("B18", "`signing` deleted", file("signing", shutil.rmtree)),
    Manipulation("C1", "an old entry", entry(OLD, lambda one: one._replace(data=one.data[:-1] + b"!"))),
    Manipulation("C2", "a new entry", entry(NEW, lambda one: one._replace(data=one.data[:-1] + b"!"))),
    Manipulation("C3", "the term of an old entry", entry(OLD, lambda one: one._replace(term=1))),
    Manipulation("C4", "the digest of an old chain row", chain(OLD, digest=bytes(32))),
    Manipulation("C5", "the digest of a new chain row", chain(NEW, digest=bytes(32))),
    Manipulation("C6", "the revision of an old chain row", chain(OLD, revision=1)),
    Manipulation("C7", "the revision of a new chain row", chain(NEW, revision=1)),
    Manipulation("C8", "a revision redirected", revisions(lambda opened, number: opened.put_revision(number, OLD - 7))),
    Manipulation("C9", "a revision deleted", revisions(lambda opened, number: opened.put_revision(number, None))),
    Manipulation("C10", "the table of revisions emptied", rows(emptied)),
    Manipulation("C11", "a revision added that no entry settled", rows(lambda opened: opened.put_revision(5_000, OLD))),
    Manipulation("C12", "the commit mark lower",
                 marks(commit_index=lambda was: was - 3, applied_index=lambda was: was - 3)),
    Manipulation("C13", "the digest that is marked as applied", marks(applied_digest=lambda was: bytes(32))),
    Manipulation("C14", "the revision that is marked as applied", marks(applied_revision=lambda was: was + 1)),
    Manipulation("C15", "the base higher", marks(base_index=lambda was: NEW)),
    Manipulation("C16", "the term of the base", marks(base_term=lambda was: was - 1)),
    Manipulation("C17", "the last index lower", marks(last_index=lambda was: was - 1)),
    Manipulation("C18", "the last index higher", marks(last_index=lambda was: was + 1)),
    Manipulation("C19", "the vote erased", hard(voted_for=None)),
    Manipulation("C20", "the vote another one's", hard(voted_for="r3")),
    Manipulation("C21", "the term raised", hard(term=9)),
    Manipulation("C22", "the term lowered", hard(term=4)),
    Manipulation("C23", "the generation of the log raised", rows(lambda opened: log_mark(opened, 1))),
    Manipulation("C24", "the generation of the log lowered, its records there",
                 killed(rows(lambda opened: log_mark(opened, -1)))),
    Manipulation("C25", "the size of the checkpoint that a majority has signed", file("tlog/checkpoint", larger)),
    Manipulation("D1", "an old entry deleted", deleted(OLD)),
    Manipulation("D2", "a new entry deleted", deleted(NEW)),
    Manipulation("D3", "the last entry deleted", deleted(LAST)),
    Manipulation("D4", "an old entry deleted with its chain row", deleted(OLD, chained=True)),
    Manipulation("D5", "two old entries swapped", rows(swapped)),
    Manipulation("D6", "entries hidden behind a forged gap", gap(OLD, OLD + 20)),
    Manipulation("D7", "the first entries hidden behind a forged gap", gap(1, OLD)),
    Manipulation("E1", "the tail cut by 1 entry", lambda case: forge.cut_tail(case.home, 1)),
    Manipulation("E2", "the tail cut by 20 entries", lambda case: forge.cut_tail(case.home, 20)),
    Manipulation("E3", "the tail cut by 300 entries, below the base",
                 lambda case: forge.cut_tail(case.home, 300, below_base=True)),
    Manipulation("E4", "the whole directory older", earlier("")),
    Manipulation("E5", "`wal` older", earlier("wal")),
    Manipulation("E6", "`data.mdb` older than its log", killed(earlier("wal/data.mdb"))),
    Manipulation("E7", "`sync.log` older than its data", killed(earlier("wal/sync.log"))),
    Manipulation("E8", "snapshots older", earlier("snapshots")),
    Manipulation("E9", "the tail cut by 20, and signed so", set_back_and_signed),
    Manipulation("E10", "what was signed last older", earlier("signing")),
    Manipulation("E11", "killed, and the records of its log zeroed: entries that no replica had signed", killed(
        file("wal/sync.log", lambda path: forge.zero(path, BLOCK_BYTES, 64 * 1024))
    )),
    Manipulation("E12", "the tail cut by 2 entries, while the leader that it acknowledged to leads on",
                 lambda case: forge.cut_tail(case.home, 2), leads=True),
    Manipulation("E13", "the whole directory older, while the leader leads on", earlier(""), leads=True),
    Manipulation("E14", "the whole directory older, and signed with a new key",
                 in_turn(earlier(""), file("signing/key", Path.unlink), sign_anew)),
    Manipulation("F1", "another replica's directory", of_another),
    Manipulation("F2", "another replica's directory, its identity relabelled", in_turn(of_another, rows(relabelled))),
    Manipulation("F3", "another cluster's ledger", of_another_cluster),
    Manipulation("F4", "another replica's ledger, relabelled in both files", relabelled_wholly),
    Manipulation("G1", "the user of a job", history(event(e.JobSubmitted, asked(user="mallory")))),
    Manipulation("G2", "the script of a job", history(event(e.JobSubmitted, asked(script="#!/bin/sh\nfalse\n")))),
    Manipulation("G3", "the exit code of a job",
                 history(event(e.RunEnded, fields(result=JobState.FAILED, exit_code=9)))),
    Manipulation("G4", "the receipt of a transfer", history(event(e.StagedOut, fields(size_bytes=7)))),
    Manipulation("G5", "who cancelled a job", history(command(fields(actor=MALLORY), e.JobCancelled))),
    Manipulation("G6", "the clock by 3 us", history(clock(3))),
    Manipulation("G7", "the clock back by an hour", history(clock(-3_600_000_000))),
    Manipulation("G8", "an event removed", history(command(without_event, e.StagedOut))),
    Manipulation("G9", "an event added", history(command(with_another, e.StageOutStarted))),
    Manipulation("G10", "the members of the cluster", history(members)),
    Manipulation("G11", "the terms: another led", history(term)),
    Manipulation("G12", "an entry that cannot be decoded", history(data(lambda held: held[:4] + b"?" * 9))),
    Manipulation("G13", "a batch made a no-op", history(data(lambda held: NO_OP))),
    Manipulation("G14", "the id of a command", history(command(fields(id=bytes(16))))),
    Manipulation("G15", "whom a rejection was given to", history(rejection)),
    Manipulation("G16", "a batch that the start folds", history(event(e.JobSubmitted, asked(user="mallory"), FOLDED))),
    Manipulation("G17", "the user of a job, the snapshots folded anew",
                 history(event(e.JobSubmitted, asked(user="mallory")), folds=True)),
    Manipulation("G18", "the user of a job, and everything on the disk made to fit, signatures too", rewritten_wholly),
    Manipulation("H1", "the user of a job", forged(a_job(asked(user="mallory")))),
    Manipulation("H2", "the exit code of a job", forged(a_job(fields(exit_code=9)))),
    Manipulation("H3", "a pool doubled", forged(doubled)),
    Manipulation("H4", "receipts dropped", forged(without_receipts)),
    Manipulation("H5", "the number of the next job", forged(mallory_submits)),
    Manipulation("I1", "history rewritten on two", history(event(e.JobSubmitted, asked(user="mallory"))), TWO),
    Manipulation("I2", "history rewritten on two, and everything made to fit", rewritten_wholly, TWO),
    Manipulation("I3", "history rewritten on two, and no auditor kept a note", rewritten_wholly, TWO, 0),
    Manipulation("I4", "history rewritten on all, and everything made to fit", rewritten_wholly, ALL),
    Manipulation("I5", "history rewritten on all, and no auditor kept a note", rewritten_wholly, ALL, 0),
    Manipulation("I6", "snapshots forged on two", forged(doubled), TWO),
    Manipulation("I7", "snapshots forged on all", forged(doubled), ALL),
    Manipulation("I8", "all rolled back", all_earlier, ALL),
    Manipulation("I9", "all rolled back, and no auditor kept a later note", all_earlier, ALL, 1),
    Manipulation("I10", "two rolled back", all_earlier, TWO),
    Manipulation("I11", "an old entry flipped on all", each(flipped_in), ALL),
    Manipulation("I12", "entries hidden behind a forged gap on two", each(hidden_in), TWO),
    Manipulation("I13", "entries hidden behind a forged gap on all", each(hidden_in), ALL),
    Manipulation("I14", "history rewritten on all, what they have signed and their tiles as they were",
                 history(event(e.JobSubmitted, asked(user="mallory"))), ALL),
    Manipulation("J1", "the directory emptied, and `first-start` in it", as_new),
    Manipulation("J2", "the directory emptied, and `first-start` in it, while the leader leads on", as_new, leads=True),
    Manipulation("J3", "`member` names another id", file(MEMBER_NAME, lambda path: path.write_text("r2#9\n"))),
    Manipulation("J4", "`forgotten` in a sound directory", file(FORGOTTEN_NAME, lambda path: path.write_text("?"))),
    Manipulation("K1", "without a signature", appended(signs=False)),
    Manipulation("K2", "signed with the replica's own key", appended()),
    Manipulation("K3", "the same in a term of its own", appended(leads=True)),
    Manipulation("K4", "to the replica that led last, signed with its key", appended(), (HONEST,)),
)  # fmt: skip
