"""Complete replica directory, written by the product's functions: ledger, snapshots, index by job, tree, checkpoint.

Its cluster ran a job a minute, recorded a state digest each minute, and purged old jobs. Three replicas have signed the
last checkpoint; two further keys have signed nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.consensus import Seals
from forebay.cluster.security.proofs import Checkpoint, sign, verifier_of, write_note
from forebay.cluster.server.recovery.new_incarnation import begin
from forebay.cluster.server.tlog import LOG_DIRECTORY, LedgerTree, origin_of
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.commands import CONTROLLER, RecoverCluster
from forebay.replica.messages.entries import Entry as Settled
from forebay.replica.messages.events import StateDigested
from forebay.replica.state.digest import state_digest
from forebay.snapshots import write_snapshot
from forebay.wal import Entry, Environment, Incarnation, JobIndex, Journal, Ledger
from forebay.wal.codec import encode_batch, no_op_of, revision_after
from forebay.wal.configuration import Member, initial
from tests.cluster.audit.ledgers import CLUSTER, MAP_SIZE_BYTES, REPLICA, Made, written
from tests.replica.world import World

MINUTES = 75
ORIGIN = origin_of(CLUSTER)
PRIVATE = tuple(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 6))


def batches(minutes: int = MINUTES) -> list[bytes]:
    """Return the entries of a cluster that ran a job every other minute, and recorded a state digest each minute."""
    world = World({"fast": 100}, nodes=2, finished_jobs_kept=5)
    for minute in range(minutes):
        job = world.submit("capacity=10", who=f"user{minute % 3}")
        world.finish(job)
        recorded = StateDigested(world.state.revision, state_digest(world.state))
        world.advance(66)
        world.commit(Settled(b"", CONTROLLER, "record_state_digest", (recorded,)))
    return [no_op_of(REPLICA), *map(encode_batch, world.ledger)]


class Site:
    """Write the directory `home` as a stopped replica leaves it."""

    def __init__(self, home: Path, made: Made) -> None:
        self.home = home
        self.made = made
        self.keys = home.parent / "keys"

    @property
    def last(self) -> int:
        return len(self.made.entries)

    def copy(self, directory: Path) -> Site:
        shutil.copytree(self.home, directory / "r1")
        other = Site(directory / "r1", self.made)
        other.write_keys(3)
        return other

    def write_keys(self, count: int, *origins: str) -> None:
        lines = (str(verifier_of(origin, private)) for origin in origins or (ORIGIN,) for private in PRIVATE[:count])
        self.keys.write_text("".join(f"# r\n{line}\n" for line in lines))

    def write_note(self, size: int, root: bytes, *signers: int, origin: str = ORIGIN) -> None:
        text = Checkpoint(origin, size, root).text()
        signatures = [sign(text, origin, PRIVATE[number]) for number in signers]
        (self.home / LOG_DIRECTORY / "checkpoint").write_text(write_note(text, signatures))

    def write_snapshot(self, index: int) -> Path:
        (self.home / "snapshots").mkdir(exist_ok=True)
        return write_snapshot(self.home / "snapshots", self.made.image(index))

    def write_index(self, last: int) -> None:
        with Environment.open_readonly(self.home / "wal") as environment:
            index = JobIndex(self.home / "index", map_size_bytes=MAP_SIZE_BYTES)
            index.begin_anew()
            follower = Follower(
                Ledger(environment),
                snapshots=self.home / "snapshots",
                index=index,
                monotonic_s=SystemClock().monotonic_s,
            )
            while follower.index < last and follower.step():
                pass
            follower.write()
            index.close()

    def tree(self, last: int | None = None) -> LedgerTree:
        """Write the files of the tree up to an entry."""
        with Environment.open_readonly(self.home / "wal") as environment:
            tree = LedgerTree(Ledger(environment).as_stored, self.home / LOG_DIRECTORY)
            while tree.size < (self.last if last is None else last) and tree.step():
                pass
            return tree

    def compact(self, base: int) -> None:
        self.journal(lambda journal: journal.compact_to(base))

    def journal(self, change: Callable[[Journal], None]) -> None:
        with self.open() as environment:
            journal = Journal(environment)
            change(journal)
            journal.flush_hints()

    def recover(self, mark: str = "ab" * 8, more: int = 0) -> tuple[str, int]:
        """Start a new incarnation after all entries, with `more` no-ops; return its origin and last entry."""
        state = self.made.state
        with self.open() as environment:
            journal = Journal(environment)
            member = Member(REPLICA, "r1:7401", "r1:7411")
            recovery = begin(
                journal,
                state,
                initial((member,), version=1),
                member,
                RecoverCluster(mark, REPLICA, (REPLICA,), journal.last_index, journal.last_index),
                by="ops",
                at=state.at,
                seals=Seals(CLUSTER, REPLICA, PRIVATE[0]),
            )
            first = journal.last_index + 1
            journal.append([Entry(first + number, journal.term, no_op_of(REPLICA)) for number in range(more)])
            journal.set_commit(journal.last_index)
            while journal.applied_index < journal.last_index:
                entry = journal.entry(journal.applied_index + 1)
                journal.record_applied(entry, revision_after(entry.data, journal.applied_revision))
            journal.flush_hints()
            return origin_of(CLUSTER, Incarnation(recovery.incarnation, recovery.mark)), journal.last_index

    def open(self) -> Environment:
        return Environment.open(
            self.home / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=False
        )


def make_site(directory: Path, minutes: int = MINUTES) -> Site:
    """Make one below a directory."""
    home = directory / "r1"
    made = written(home, [(1 if number < 300 else 2, data) for number, data in enumerate(batches(minutes))])
    site = Site(home, made)
    site.compact(site.last - 20)
    for index in (site.last - 100, site.last - 30):
        site.write_snapshot(index)
    site.write_index(site.last)
    site.write_note(site.last, site.tree().root(site.last), 0, 1, 2)
    site.write_keys(3)
    return site
