"""Detectors of an altered replica: commands, start, peers, scrub, signatures, and an auditor.

All of it is what the product does, on the directories of all three; what goes over TLS between replicas is called
directly, and nobody waits for a period to pass. `live` has the same with replicas that run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, NoReturn

from forebay.cluster.api.ledger import handed_view
from forebay.cluster.consensus import HistoryElsewhere, KeyReplaced, Seals, Timing
from forebay.cluster.consensus.engine import Engine
from forebay.cluster.consensus.frames import Heartbeat
from forebay.cluster.consensus.leader_election import is_heeded_by_new
from forebay.cluster.consensus.log_replication import append_what_is_missing
from forebay.cluster.schemas.ledger import HandedView
from forebay.cluster.security.proofs import (
    ProofError,
    Tile,
    VerifierKey,
    consistency_proof,
    nodes_in_tiles,
    parse_checkpoint,
    root_of,
    verify_consistency,
    verify_note,
)
from forebay.cluster.serve import founding_of
from forebay.cluster.server.divergence import Checkpoints, Digests
from forebay.cluster.server.history_fetch import SCRUB_AGAIN_S, Backfill, Scrub, ScrubResults
from forebay.cluster.server.storage import Storage, StorageRefused, open_storage
from forebay.cluster.server.tlog import (
    LOG_DIRECTORY,
    NOBODY,
    SIGNING_DIRECTORY,
    Cosigning,
    LedgerTree,
    LogPeers,
    Publisher,
    SignedCheckpoint,
    Signer,
    origin_of,
    private_key,
)
from forebay.cluster.system.clock import SystemClock
from forebay.replica.state.digest import state_digest
from forebay.snapshots import SnapshotFailed
from forebay.wal import (
    BrokenInvariant,
    LedgerBroken,
    RecoveryRefused,
    StorageFailed,
    fill,
    replace_damaged,
    revision_after,
)
from forebay.wal.codec import NO_OP
from forebay.wal.configuration import decode_configuration, is_configuration
from forebay.wal.journal import Entry
from forebay.wal.ledger import export_history
from tests.auditing import audit
from tests.faults.manipulations.site import NAMES, Case

BACKFILL_STEPS: Final = 4
"""Steps after which a gap of this ledger is filled, count."""


class Finder(StrEnum):
    """Who finds a manipulation."""

    VERIFY = "verify"
    DEEP = "deep"
    START = "start"
    STATES = "states"
    LEDGERS = "ledgers"
    BACKFILL = "backfill"
    SCRUB = "scrub"
    TILES = "tiles"
    SIGNING = "signing"
    HISTORY = "history"
    COMMITTED = "committed"
    KEYS = "keys"
    LEADER = "leader"
    NOTE = "note"


class Then(StrEnum):
    """Effect on the altered replica."""

    REFUSED = "does not start"
    STOPS = "stops itself"
    MENDED = "is repaired while it runs"
    NAMED = "continues; the damage is reported and counted"
    LOGGED = "continues, and logs it"
    HARMLESS = "continues; harmless"
    GOES_ON = "continues"
    ALL_STOP = "they stop; an honest one stops first"
    OTHERS_STOP = "continues; an honest one stops"


class Outcome(NamedTuple):
    """Who found it, each with the sentence that was said, and what became of it."""

    found: dict[Finder, str]
    then: Then


class _Stopped(Exception):
    """A replica has stopped itself."""


class Member:
    """One replica of the three, opened."""

    def __init__(self, case: Case, name: str, storage: Storage, engine: Engine) -> None:
        self.case, self.name, self.storage, self.engine = case, name, storage, engine
        self.home = case.directory / name
        self.clock = SystemClock()
        self.error: BaseException | None = None
        self.scrubbed = ScrubResults()
        self.others: dict[str, Member] = {}
        self.signer = Signer(self.home / SIGNING_DIRECTORY, origin_of(case.config.cluster.id))
        self.signer.check_held(storage.journal.last_index)
        self._tree: LedgerTree | None = None

    def fail(self, error: BaseException) -> NoReturn:
        self.error = self.error or error
        raise _Stopped from error

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(self.others)

    # Comparison of states and ledgers

    def digests(self, index: int) -> Digests:
        at = min(index, self.storage.journal.applied_index)
        digest = self.storage.journal.digest_at(at)
        states = {self.storage.index: state_digest(self.storage.state).hex()}
        return Digests(states, {} if digest is None else {at: digest.hex()})

    async def compare(self, *, states: bool) -> None:
        """Compare states with the others, or ledgers: a replica does both, and stops with the first that differs."""

        async def ask(peer: str, index: int) -> Digests:
            return self.others[peer].digests(index)

        index = self.storage.journal.applied_index
        checkpoints = Checkpoints(self.name, lambda: self.peers, ask, self.fail, chain=self.storage.journal)
        checkpoints._digests.update(self.digests(index).states)
        answers = await checkpoints._answers(self.peers, index)
        if states:
            checkpoints._compare_states(self.peers, {peer: one.states for peer, one in answers.items()})
        else:
            theirs = {peer: one.ledgers for peer, one in answers.items()}
            await checkpoints._compare_ledgers(self.peers, index, theirs)

    # History that is missing or damaged

    def meet_peers(self) -> None:
        """Receive a heartbeat from each peer, as the first message after a start."""
        for other in self.others.values():
            journal = other.storage.journal
            try:
                if self.engine.raft.is_new:
                    heartbeat = Heartbeat(journal.term, 1, journal.commit_index, ready=True)
                    is_heeded_by_new(self.engine.raft, other.storage.identity, heartbeat)
            except HistoryElsewhere as error:
                self.error = self.error or error

    async def handed(self, peer: str, last: int) -> Iterable[HandedView]:
        found = export_history(self.others[peer].storage.ledger, last)
        return [handed_view(one) for one in found]

    async def backfill(self) -> bool:
        filling = Backfill(
            self.storage.ledger,
            fill=lambda gap, handed: fill(self.storage.environment, gap, handed),
            journal_fill=lambda: 0.0,
            peers=lambda: self.peers,
            ask=self.handed,
            fail=self.fail,
        )
        filled = False
        for _ in range(BACKFILL_STEPS):
            filled |= await filling.step()
        return filled

    async def scrub(self) -> None:
        scrub = Scrub(
            self.storage.ledger,
            found=self.scrubbed,
            mend=lambda stretch, handed: replace_damaged(self.storage.environment, stretch, handed),
            peers=lambda: self.peers,
            ask=self.handed,
            clock=self.clock,
            fail=self.fail,
        )
        try:
            while await scrub.step() < SCRUB_AGAIN_S:
                pass
        finally:
            await scrub.stop()

    def catch_up(self, ahead: list[Entry]) -> None:
        """Take what the leader has and this one does not, and apply it."""
        journal = self.storage.journal
        following = [entry for entry in ahead if entry.index > journal.last_index]
        journal.set_term(max(journal.term, ahead[-1].term), journal.voted_for)
        journal.append(following)
        journal.sync()
        journal.set_commit(ahead[-1].index)
        while journal.applied_index < ahead[-1].index:
            entry = journal.entry(journal.applied_index + 1)
            journal.record_applied(entry, revision_after(entry.data, journal.applied_revision))
        journal.flush_hints()
        founded = next((one for one in following if is_configuration(one.data)), None)
        if founded is not None:
            try:
                assert self.engine.raft.seals is not None
                self.engine.raft.seals.check_own_key(decode_configuration(founded.data))
            except KeyReplaced as error:
                self.error = error

    # Signatures

    @property
    def tree(self) -> LedgerTree:
        if self._tree is None:
            self._tree = LedgerTree(self.storage.ledger.as_of_now, self.home / LOG_DIRECTORY)
        while self._tree.step():
            pass
        return self._tree

    def check_tiles(self) -> list[int]:
        """Have the tiles held against the ledger; return the first entries of those that are another's."""
        while self.tree.check():
            pass
        return self.tree.altered

    async def root(self, size: int) -> bytes:
        return self.tree.root(size)

    def publisher(self) -> Publisher:
        async def ask(peer: str, size: int, root: bytes) -> SignedCheckpoint:
            return await self.others[peer].publishing.sign(size, root.hex())

        async def hand(peer: str, note: str) -> None:
            await self.others[peer].publishing.take(note)

        async def key_of(peer: str) -> VerifierKey:
            return self.others[peer].publishing.key

        async def note_of(peer: str) -> str:
            return self.others[peer].publishing.note

        return Publisher(
            self.signer,
            self.home / LOG_DIRECTORY,
            name=self.name,
            leads=lambda: True,
            applied_index=lambda: self.storage.journal.applied_index,
            tree_size=lambda: self.tree.size,
            root=self.root,
            peers=lambda: self.peers,
            asked=LogPeers(ask, hand, key_of, note_of=note_of),
            cosigning=Cosigning(
                (),
                0,
                submit=NOBODY.submit,
                consistency=NOBODY.submit,
                applied_index=lambda: self.storage.journal.applied_index,
                clock=self.clock,
            ),
            clock=self.clock,
            fail=self.fail,
        )

    @property
    def publishing(self) -> Publisher:
        if "_publisher" not in self.__dict__:
            self._publisher = self.publisher()
        return self._publisher


def look(case: Case) -> Outcome:
    """Have everybody look at the replicas of a case, of which some were altered."""
    found: dict[Finder, str] = {}
    for home in case.homes:
        for finder, words in ((Finder.VERIFY, ()), (Finder.DEEP, ("--deep",))):
            if said := _verified(case, home, *words):
                found.setdefault(finder, said)
                found.setdefault(Finder.DEEP, said)  # it begins with the same
                break
    return asyncio.run(_live(case, found))


def _stopping(altered: set[str], honest: set[str]) -> Then:
    """Return what became of replicas of which some have stopped: altered ones, honest ones, or both."""
    if not honest:
        return Then.STOPS
    return Then.ALL_STOP if altered else Then.OTHERS_STOP


def _verified(case: Case, home: Path, *words: str) -> str:
    """Return what `forebay audit verify` says that is wrong; nothing where all is right."""
    told = ("audit", "verify", "--data", str(home), "--cluster", case.config.cluster.id, "--complete", *words)
    result = audit(*told)
    return (" ".join(result.stderr.split()) or repr(result.exception)) if result.exit_code else ""


async def _live(case: Case, found: dict[Finder, str]) -> Outcome:
    with ExitStack() as open_now:
        members: dict[str, Member] = {}
        # Who is altered first: where one does not start, nothing more is to be seen.
        for name in sorted(NAMES, key=lambda name: name not in case.altered):
            try:
                members[name] = open_now.enter_context(_opened(case, name))
            except (RecoveryRefused, StorageRefused, StorageFailed, SnapshotFailed, BrokenInvariant) as error:
                return Outcome(found | {Finder.START: str(error)}, Then.REFUSED)
        members = {name: members[name] for name in NAMES}
        for name, member in members.items():
            member.others = {other: one for other, one in members.items() if other != name}
        stopped: set[str] = set()
        _meet(members, found, stopped)
        _lead(case, members, found)
        await _compare(members, found, stopped)
        await _mend(case, members, found, stopped)
        with suppress(LedgerBroken):
            await _sign(case, members, found, stopped)
    if stopped:
        return Outcome(found, _stopping(stopped & set(case.altered), stopped - set(case.altered)))
    if any(member.publishing.doubt for member in members.values()):
        return Outcome(found, Then.LOGGED)
    if any(member.scrubbed.damaged for member in members.values()):
        return Outcome(found, Then.NAMED)
    is_mended = Finder.SCRUB in found or Finder.BACKFILL in found
    return Outcome(found, Then.MENDED if is_mended else Then.GOES_ON)


def start_engine(case: Case, name: str, storage: Storage) -> Engine:
    """Start the consensus engine of a replica that starts. StorageRefused, BrokenInvariant."""
    placed = storage.configuration
    member = None if placed is None else placed.configuration.by_id(storage.identity)
    private = private_key(case.directory / name / SIGNING_DIRECTORY, member)
    seals = Seals(case.config.cluster.id, storage.identity, private)
    nobody: Any = SimpleNamespace(send=lambda peer, message: None, flush=lambda: None)
    return Engine(
        me=storage.identity,
        journal=storage.journal,
        machine=nobody,
        timing=Timing(),
        clock=SystemClock(),
        uniform=lambda low, high: low,
        links=nobody,
        bootstrap=founding_of(case.config, storage.identity),
        configuration=placed,
        seals=seals,
    )


@contextmanager
def _opened(case: Case, name: str):  # type: ignore[no-untyped-def]
    storage = open_storage(case.config, name)
    try:
        yield Member(case, name, storage, start_engine(case, name, storage))
    finally:
        storage.close()


def _meet(members: dict[str, Member], found: dict[Finder, str], stopped: set[str]) -> None:
    for member in members.values():
        member.meet_peers()
        if member.error is not None:
            stopped.add(member.name)
            found[Finder.HISTORY] = str(member.error)
            member.error = None


def _lead(case: Case, members: dict[str, Member], found: dict[Finder, str]) -> None:
    """Have the altered replicas, if they are a majority, elect one of them, and the others receive its first entry."""
    altered, others = (
        [one for one in members.values() if (one.name in case.altered) is which] for which in (True, False)
    )
    if len(altered) <= len(others):
        return
    leader = max(altered, key=lambda member: member.storage.journal.last_index)
    journal = leader.storage.journal
    first = Entry(journal.last_index + 1, journal.term + 1, NO_OP)
    for member in others:
        # A later entry would be appended here; only one in the place of a committed one is of interest.
        if first.index <= member.engine.raft.commit_index:
            try:
                append_what_is_missing(member.engine.raft, leader.storage.identity, [first])
            except BrokenInvariant as error:
                found[Finder.COMMITTED] = str(error)


async def _compare(members: dict[str, Member], found: dict[Finder, str], stopped: set[str]) -> None:
    for finder in (Finder.STATES, Finder.LEDGERS):
        for member in members.values():
            with suppress(_Stopped):
                await member.compare(states=finder is Finder.STATES)
            if member.error is not None:
                stopped.add(member.name)
                found[finder] = str(member.error)
                member.error = None


async def _mend(case: Case, members: dict[str, Member], found: dict[Finder, str], stopped: set[str]) -> None:
    for name in case.altered:
        member = members[name]
        try:
            if await member.backfill():
                found[Finder.BACKFILL] = "entries that are missing are fetched"
        except (BrokenInvariant, LedgerBroken, StorageFailed) as error:
            found[Finder.BACKFILL] = str(error)
            stopped.add(name)
        try:
            await member.scrub()
        except (BrokenInvariant, StorageFailed) as error:
            found[Finder.SCRUB] = str(error)
            stopped.add(name)
        if member.scrubbed.damaged:
            found[Finder.SCRUB] = f"entries {member.scrubbed.damaged} are damaged, and no peer has them"
        elif member.scrubbed.mended:
            found[Finder.SCRUB] = f"{member.scrubbed.mended} entries were repaired"


async def _sign(case: Case, members: dict[str, Member], found: dict[Finder, str], stopped: set[str]) -> None:
    """Have one more entry committed and signed; then let an auditor look at what each replica shows."""
    longest = max(members.values(), key=lambda member: member.storage.journal.last_index)
    ledger = longest.storage.ledger
    first = min(member.storage.journal.last_index for member in members.values()) + 1
    ahead = [Entry(one.index, one.term, one.data, one.seal) for one in ledger.read(first, limit=1000)]
    held = longest.storage.journal
    if held.last_index > held.applied_index:
        ahead += held.entries(held.applied_index + 1, max_bytes=1 << 20, max_entries=1000)
    term = max(member.storage.journal.term for member in members.values()) + 1
    ahead.append(Entry(longest.storage.journal.last_index + 1, term, NO_OP))
    for member in members.values():
        member.catch_up(ahead)
        if member.error is not None:
            found[Finder.KEYS] = str(member.error)
            stopped.add(member.name)
    if Finder.KEYS in found:
        return
    for name in case.altered:
        if altered := members[name].check_tiles():
            found[Finder.TILES] = f"tiles from entry {altered[0]} on are not what the ledger comes to"
    published = False
    for member in members.values():
        with suppress(_Stopped):
            await member.publishing.check_signed()
    for member in members.values():
        if not published and member.error is None:
            with suppress(_Stopped, LookupError):
                published = await member.publishing.publish(whole=True)
    for member in members.values():
        if member.error is not None:
            found[Finder.SIGNING] = str(member.error)
            stopped.add(member.name)
        elif member.publishing.doubt:
            found[Finder.SIGNING] = member.publishing.doubt
    for member in members.values():
        for kept in case.site.notes[: case.notes] if published and member.error is None else ():
            if (rejection := audited(case, member, kept)) is not None:
                found[Finder.NOTE] = rejection


def audited(case: Case, member: Member, kept: str) -> str | None:
    """Return what an auditor says who kept a note and reads this replica's checkpoint and tiles; None: it agrees."""
    before = parse_checkpoint(verify_note(kept.encode(), case.site.keys)[0])
    text, verified = verify_note(member.publishing.note.encode(), case.site.keys)
    after = parse_checkpoint(text)
    read = nodes_in_tiles(after.size, lambda tile: _served(member, tile))
    try:
        if after.size < before.size:
            raise ProofError(f"{before.size} entries were signed once, and the cluster has signed {after.size}")
        if len(verified) < len(NAMES) // 2 + 1:
            raise ProofError(f"{len(verified)} of the keys that were kept have signed it")
        if root_of(after.size, read) != after.root:
            raise ProofError("the tiles of the cluster are not those of its checkpoint")
        proof = consistency_proof(before.size, after.size, read)
        verify_consistency(before.size, after.size, before.root, after.root, proof)
    except ProofError as error:
        return str(error)
    return None


def _served(member: Member, tile: Tile) -> bytes:
    return member.tree.tile(tile)
