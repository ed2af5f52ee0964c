"""Internal invariants: the marks of every replica after each step, and the data on its disk.

A mark that is wrong does no harm before several other things have gone wrong too. `tests.cluster.consensus.marks` says
what must hold of one; here it is asked of replicas with real journals, on disks that forget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from forebay.cluster.consensus.state import RaftState
from forebay.wal.records import STATE, HardState
from tests.cluster.consensus.marks import broken_marks, votes_missing
from tests.simulation.disk import SimDisk

if TYPE_CHECKING:
    from tests.simulation.replicas import SimReplica
    from tests.simulation.world import World


class _Copy(NamedTuple):
    """A disk as it was when it was last written to: what is asked of it at every step is read once."""

    version: tuple[int, int]
    disk: SimDisk
    hard: HardState
    last_index: int

    def holds(self, index: int, term: int) -> bool:
        return self.disk.holds(index, term)


class Inside:
    """The marks of all replicas of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._copies: dict[str, _Copy] = {}
        self._looked: dict[str, tuple[object, ...]] = {}
        """The marks that were last found to be true, by id."""
        self._promised: dict[str, HardState] = {}
        """Announced term and vote, by replica ID."""

    def look(self, replica: SimReplica) -> None:
        """Check the marks of a replica that has just made a step, if any of them moved."""
        raft = _raft(replica)
        if raft.stopped:
            return
        marks = _marks(raft, replica.disk)
        if self._looked.get(replica.identity) == marks:
            return
        self._looked[replica.identity] = marks
        self._compare(replica, HardState(raft.term, raft.voted_for), "it is in")
        for sentence in broken_marks(raft, self.copy_of, self.raft_of):
            self._world.violate(f"{replica.name}: {sentence}")

    def elected(self, replica: SimReplica) -> None:
        """Check that the disks of a majority contain votes for a new leader."""
        missing = votes_missing(_raft(replica), self.copy_of)
        if missing:
            self._world.violate(f"{replica.name}: {missing}")

    def promised(self, identity: str) -> None:
        """Record a promise: this term and this vote must never be lost."""
        copy = self.copy_of(identity)
        if copy is not None:
            self._promised[identity] = copy.hard

    def crashed(self, replica: SimReplica) -> None:
        """Check after a crash that every promise is kept, and that enough copies of each acknowledged entry exist."""
        copy = self.copy_of(replica.identity)
        if copy is not None:
            self._compare(replica, copy.hard, "after a crash its disk says")
        self.told()

    def told(self) -> None:
        """Check that no majority of the voters could be without what clients have their answers by."""
        oracle = self._world.oracle
        index = oracle.told_index
        for configuration in oracle.members.possible() if index else ():
            voters = configuration.voter_ids
            disks = [self._world.disks[voter] for voter in voters if voter in self._world.disks]
            held = sum(disk.holds(index, oracle.points[index].term) for disk in disks)
            if held <= len(voters) - configuration.majority:
                self._world.violate(
                    f"entry {index}, which somebody was told of, is on {held} disks of the {len(voters)} voters of "
                    f"version {configuration.version} of the configuration: a majority could be without it"
                )

    def _compare(self, replica: SimReplica, hard: HardState, where: str) -> None:
        kept = self._promised.get(replica.identity)
        if kept is None or kept == hard or kept.term < hard.term:
            return
        if kept.term > hard.term or kept.voted_for is not None:
            self._world.violate(
                f"{replica.name} had promised term {kept.term} with its vote for {kept.voted_for}; {where} term "
                f"{hard.term} with its vote for {hard.voted_for}"
            )

    def copy_of(self, identity: str) -> _Copy | None:
        """Return what is on the disk of a member; None where nobody may count on that."""
        disk = self._world.disks.get(identity)
        if disk is None or disk.damaged or identity in self._world.destroyed or STATE not in disk.tables:
            return None
        copy, version = self._copies.get(identity), (disk.transactions, disk.syncs)
        if copy is None or copy.version != version or copy.disk is not disk:
            copy = self._copies[identity] = _Copy(version, disk, disk.hard, disk.last_index)
        return copy

    def raft_of(self, identity: str) -> RaftState | None:
        """Return the state of a member that runs; None where it does not."""
        for replica in self._world.replicas.values():
            if replica.identity == identity and replica.up and not replica.disk.dead:
                raft = _raft(replica)
                return None if raft.stopped else raft
        return None


def _raft(replica: SimReplica) -> RaftState:
    raft: RaftState = replica.engine._engine.raft
    return raft


def _marks(raft: RaftState, disk: SimDisk) -> tuple[object, ...]:
    """Return all that the invariants compare, as far as this replica can change it."""
    journal = raft.journal
    peers = [(known.match, known.next, known.phase, known.lost, known._bytes) for known in raft.progress.values()]
    return (
        *(raft.term, raft.voted_for, raft.role, raft.leader, raft.reads.under_way, len(raft.outbox._held)),
        *(raft.applied_index, raft.commit_index, raft.checked_index, raft.durable_index),
        *(journal.base_index, journal.last_index, journal.last_term, disk.syncs),
        *peers,
    )
