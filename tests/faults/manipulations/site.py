"""Stopped cluster of three replicas with a real history, and the copies that manipulations alter.

Some 800 entries of jobs that ran, with the digest of the state of each minute, a change of leader and a batch that is
void; compacted, with snapshots, an index by job, tiles, and a checkpoint that all three have signed. Two states of an
earlier moment are kept as well: the directory of one replica, and the note of a checkpoint in an auditor's hand.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, PoolSpec, create_site
from forebay.cluster.consensus import Seals
from forebay.cluster.security.proofs import Checkpoint, Signature, VerifierKey, write_note
from forebay.cluster.server.storage import first_start_mark
from forebay.cluster.server.tlog import (
    CHECKPOINT_NAME,
    LOG_DIRECTORY,
    SIGNING_DIRECTORY,
    LedgerTree,
    Signer,
    origin_of,
    private_key,
)
from forebay.cluster.system.clock import SystemClock
from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages.commands import CONTROLLER, CancelJob
from forebay.replica.messages.entries import Batch
from forebay.replica.messages.entries import Entry as Settled
from forebay.replica.messages.events import StateDigested
from forebay.replica.model.jobs import Hold
from forebay.replica.state.digest import state_digest
from forebay.replica.state.state import EMPTY, State
from forebay.snapshots.finalize import write_snapshot
from forebay.snapshots.image import Image
from forebay.wal import records
from forebay.wal.codec import NO_OP, EntryKind, decode_batch, encode_batch, kind_of
from forebay.wal.configuration import ConfigurationAt, Member, decode_configuration, encode_configuration, initial
from forebay.wal.environment import Environment
from forebay.wal.job_index import JobIndex
from forebay.wal.journal import Entry, Journal
from forebay.wal.ledger import Ledger
from tests.ports import free_ports
from tests.replica.world import World, user

VICTIM: Final = "r2"
"""The replica whose directory is altered, where it is one."""

HONEST: Final = "r1"
NAMES: Final = ("r1", "r2", "r3")

JOBS: Final = 88
JOBS_A_MINUTE: Final = 8
LAST: Final = 793
"""Entries of the ledger, count."""

BASE: Final = 650
"""The entry up to which consensus has compacted: a start looks at nothing before it."""

SNAPSHOTS: Final = (650, 760)
EARLIER: Final = 700
"""Up to this entry the ledger went when the older copy was made and the auditor kept a note."""

UNSIGNED: Final = 3
"""Entries that came after the last checkpoint of the replica that was killed, count."""

TERMS: Final = (1, 2, 5)
"""Of the entries: the first leader's, and those of the leaders that came at `ELECTED`."""

ELECTED: Final = (200, 600)
LEADERS: Final = {1: "r3", 2: "r3", 5: HONEST}
"""Who led in each term."""

MAP_SIZE_BYTES: Final = 64 << 20
HOLE_BYTES: Final = 64 * 1024
"""Zeros of this length are left out of a copy, bytes: the log of syncs is full of them."""


class Life(NamedTuple):
    """A history, and what it comes to: `states` and `digests` are those after each entry."""

    entries: tuple[Entry, ...]
    states: tuple[State, ...]
    digests: tuple[bytes, ...]

    def image(self, index: int) -> Image:
        """Return the image after entry `index`."""
        configuration = ConfigurationAt(1, decode_configuration(self.entries[0].data))
        return Image(
            self.states[index - 1], index, self.entries[index - 1].term, self.digests[index - 1], configuration
        )


@dataclass(frozen=True)
class Site:
    """The stopped cluster, and what was kept of it."""

    directory: Path
    config: Config
    life: Life
    keys: tuple[VerifierKey, ...]
    notes: tuple[str, str]
    """Two checkpoints with three signatures, as an auditor kept them: of EARLIER entries, and the last but one."""

    @property
    def earlier(self) -> Path:
        """The home of the victim as it was at EARLIER."""
        return self.directory / "earlier" / VICTIM

    @property
    def killed(self) -> Path:
        """The home of the victim if it had been killed: its last entries are in the log of syncs alone, unsigned."""
        return self.directory / "killed" / VICTIM

    def home(self, name: str) -> Path:
        """Return the directory of a replica as it was stopped."""
        return self.config.storage.directory / name


class Case:
    """Copies of the homes of all three, of which some are altered."""

    def __init__(self, site: Site, directory: Path, altered: Sequence[str] = (VICTIM,), notes: int = 2) -> None:
        self.site = site
        self.notes = notes
        self.directory = directory
        self.altered = tuple(altered)
        storage = msgspec.structs.replace(site.config.storage, directory=directory)
        self.config = msgspec.structs.replace(site.config, storage=storage)
        for name in NAMES:
            copy_tree(site.home(name), directory / name)

    @property
    def home(self) -> Path:
        """The victim's directory."""
        return self.directory / VICTIM

    @property
    def homes(self) -> tuple[Path, ...]:
        """The directories that are altered."""
        return tuple(self.directory / name for name in self.altered)

    def put_back(self, part: str, source: Path, name: str = VICTIM) -> None:
        """Put a part of a replica's directory from elsewhere into its place; an empty part is all of it."""
        target = self.directory / name / part
        if target.is_dir():
            shutil.rmtree(target)
        copy_tree(source / part, target)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a file, or a directory with all below it, with holes where there are only zeros."""
    if source.is_file():
        _copy_file(source, target)
        return
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in source.iterdir():
        copy_tree(path, target / path.name)


def _copy_file(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        while piece := read.read(HOLE_BYTES):
            if piece.strip(b"\0"):
                written.write(piece)
            else:
                written.seek(len(piece), os.SEEK_CUR)
        written.truncate(read.tell())
    target.chmod(source.stat().st_mode & 0o777)


def history(config: Config) -> Life:
    """Return the history that the cluster has: always the same, but for its id, and where its members are."""
    world = World({"fast": 96 << 20}, granularity=1 << 20, nodes=2, cluster_id=config.cluster.id)
    for number in range(JOBS):
        job = world.submit("capacity=8MiB", who=f"user{number % 5}", name=f"job{number}")
        if number % 7 == 3:
            world.try_submit("capacity=500MiB", who="greedy")
        if number % 20 == 5:
            held = world.submit("capacity=8MiB", who="user1", hold=Hold.USER)
            world.settle(CancelJob(held), user("user1"))
        world.finish(job)
        if number % JOBS_A_MINUTE == JOBS_A_MINUTE - 1:
            recorded = StateDigested(world.state.revision, state_digest(world.state))
            world.advance(66)
            world.commit(Settled(b"", CONTROLLER, "record_state_digest", (recorded,)))
    batches = list(map(encode_batch, world.ledger))
    # What a deposed leader proposed on a revision that was settled by somebody else in the meantime.
    void = encode_batch(msgspec.structs.replace(world.ledger[190], at=world.ledger[195].at))
    keys = {name: Seals(config.cluster.id, name, key_of(config.storage.directory / name)) for name in NAMES}
    founders = (Member(one.name, str(one.peer), str(one.api), keys[one.name].key) for one in config.founders)
    members = initial(tuple(founders), version=1)
    data = [encode_configuration(members), *batches]
    for at, one in ((ELECTED[0] - 1, void), (ELECTED[0], NO_OP), (ELECTED[1], NO_OP)):
        data.insert(at - 1, one)
    assert len(data) > LAST, f"the history has {len(data)} entries, and {LAST} are wanted"
    life = lived([(_term(index), one) for index, one in enumerate(data[:LAST], start=1)])
    return life._replace(entries=tuple(_sealed(life.entries, keys)))


def key_of(home: Path) -> Ed25519PrivateKey:
    """Return the key that a replica signs with; it is made where there is none."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return private_key(home / SIGNING_DIRECTORY)


def _sealed(entries: Sequence[Entry], keys: Mapping[str, Seals]) -> Iterator[Entry]:
    """Yield entries as the leaders of their terms have accepted them, each elected by the victim or by r3."""
    term_before = 0
    for entry in entries:
        leader = LEADERS[entry.term]
        voter = next(name for name in reversed(NAMES) if name != leader)
        votes = {voter: keys[voter].vote(entry.term, leader)} if entry.term != term_before else {}
        yield keys[leader].sealed(entry, term_before, votes)
        term_before = entry.term


def lived(history: Sequence[tuple[int, bytes]]) -> Life:
    """Return what entries come to, each given with its term."""
    entries = tuple(Entry(index, term, data) for index, (term, data) in enumerate(history, start=1))
    state, states = EMPTY, list[State]()
    for entry in entries:
        state = folded(state, entry)
        states.append(state)
    digest, digests = records.GENESIS, list[bytes]()
    for entry in entries:
        digest = records.chain_digest(digest, entry)
        digests.append(digest)
    return Life(entries, tuple(states), tuple(digests))


def folded(state: State, entry: Entry) -> State:
    """Return the state after an entry."""
    batch: Batch | None = decode_batch(entry.data) if kind_of(entry.data) is EntryKind.BATCH else None
    return state if batch is None else apply_batch(state, batch) or state


def found_site(directory: Path) -> Site:
    """Make the stopped cluster below a directory."""
    founding = Founding(
        replicas=len(NAMES),
        agents=1,
        base_port=free_ports(14)[0],
        pools=(PoolSpec("fast", "96MiB", "1MiB", True),),
        users=("alice",),
    )
    config = create_site(directory / "site", founding, clock=SystemClock())
    config = msgspec.structs.replace(
        config, storage=msgspec.structs.replace(config.storage, map_size_bytes=MAP_SIZE_BYTES)
    )
    life = history(config)
    _live(config, life, 0, EARLIER)
    note, _ = _signed(config, EARLIER)
    copy_tree(config.storage.directory, directory / "earlier")
    _live(config, life, EARLIER, LAST - UNSIGNED)
    later, _ = _signed(config, LAST - UNSIGNED)
    copy_tree(config.storage.directory, directory / "killed")
    _append(config, VICTIM, life, LAST, home=directory / "killed" / VICTIM, killed=True)
    _live(config, life, LAST - UNSIGNED, LAST)
    _, keys = _signed(config, LAST)
    return Site(directory, config, life, keys, (note, later))


def _live(config: Config, life: Life, first: int, last: int) -> None:
    """Have all three go on from one entry to another, and stop them."""
    for name in NAMES:
        home = config.storage.directory / name
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        first_start_mark(config, name).unlink(missing_ok=True)
        _append(config, name, life, last, home=home)
        for index in SNAPSHOTS:
            if first < index <= last:
                (home / "snapshots").mkdir(mode=0o700, exist_ok=True)
                write_snapshot(home / "snapshots", life.image(index))
        _index(home)


def _append(config: Config, name: str, life: Life, last: int, *, home: Path, killed: bool = False) -> None:
    with Environment.open(
        home / "wal", cluster_id=config.cluster.id, replica=name, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        journal = Journal(environment)
        following = life.entries[journal.last_index : last]
        journal.set_term(max(journal.term, following[-1].term), HONEST)
        journal.append(following)
        journal.sync()
        journal.set_commit(last)
        for entry in following:
            journal.record_applied(entry, life.states[entry.index - 1].revision)
        journal.sync()
        if killed:
            return
        if last >= BASE and journal.base_index < BASE:
            journal.compact_to(BASE)
        journal.flush_hints()


def _index(home: Path) -> None:
    with Environment.open_readonly(home / "wal") as environment:
        index = JobIndex(home / "index")
        following = Follower(
            Ledger(environment), snapshots=home / "snapshots", index=index, monotonic_s=SystemClock().monotonic_s
        )
        while following.step():
            pass
        following.write()
        index.close()


def _signed(config: Config, size: int) -> tuple[str, tuple[VerifierKey, ...]]:
    """Have each replica sign what its own ledger comes to; return the note, and the keys."""
    signatures, keys = list[Signature](), list[VerifierKey]()
    checkpoint: Checkpoint | None = None
    for name in NAMES:
        home = config.storage.directory / name
        with tree_of(home) as tree:
            signer = Signer(home / SIGNING_DIRECTORY, origin_of(config.cluster.id))

            async def root(size: int, tree: LedgerTree = tree) -> bytes:
                return tree.root(size)

            checkpoint, signature = asyncio.run(signer.sign(size, root))
        signatures.append(signature)
        keys.append(signer.key)
    assert checkpoint is not None
    note = write_note(checkpoint.text(), signatures)
    for name in NAMES:
        (config.storage.directory / name / LOG_DIRECTORY / CHECKPOINT_NAME).write_text(note)
    return note, tuple(keys)


@contextmanager
def tree_of(home: Path, *, readonly: bool = False) -> Iterator[LedgerTree]:
    """Open the tree of a replica that does not run, up to all that it holds without a gap."""
    with Environment.open_readonly(home / "wal") as environment:
        tree = LedgerTree(Ledger(environment).as_of_now, home / LOG_DIRECTORY, readonly=readonly)
        while tree.step():
            pass
        yield tree


def _term(index: int) -> int:
    return TERMS[sum(index >= elected for elected in ELECTED)]
