"""Invariants of a replica's own marks, checked against the disks and the other replicas.

A wrong mark does harm only after several other faults, so tests of effects find it late or never. These checks examine
the marks themselves.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from forebay.cluster.consensus import progress
from forebay.cluster.consensus.interface import Role
from forebay.cluster.consensus.progress import Phase
from forebay.cluster.consensus.state import RaftState


class Copy(Protocol):
    """Content of a disk after a power cut."""

    @property
    def hard(self) -> tuple[int, str | None]:
        """Term and vote."""

    @property
    def last_index(self) -> int: ...
    def holds(self, index: int, term: int) -> bool:
        """Return whether an entry is on the disk, or a snapshot in its place."""


CopyOf = Callable[[str], Copy | None]
"""Returns the disk content of a member; None if its disk was lost, so that nothing may be expected."""

RaftOf = Callable[[str], RaftState | None]
"""Returns the state of a running member; None if it is not running."""


def broken_marks(raft: RaftState, copy_of: CopyOf, raft_of: RaftOf) -> Iterator[str]:
    """Yield a sentence for each wrong mark of this replica."""
    yield from _out_of_order(raft)
    yield from _of_another_term(raft)
    yield from _not_durable(raft, copy_of)
    yield from _not_the_leaders(raft, raft_of)
    if raft.leads:
        yield from _not_matched(raft, copy_of)


def _out_of_order(raft: RaftState) -> Iterator[str]:
    journal = raft.journal
    marks = (journal.base_index, raft.applied_index, raft.commit_index, journal.last_index)
    if list(marks) != sorted(marks):
        yield f"base, applied, commit and last are {marks}"
    for name, mark in (("checked", raft.checked_index), ("durable", raft.durable_index)):
        if mark > journal.last_index:
            yield f"the {name} index is {mark}, and the last entry {journal.last_index}"
    if raft.role is Role.FOLLOWER and raft.leader is not None and raft.commit_index > raft.checked_index:
        yield f"it follows {raft.leader} and has committed {raft.commit_index}, checked {raft.checked_index}"


def _of_another_term(raft: RaftState) -> Iterator[str]:
    if (raft.term, raft.voted_for) != (raft.journal.term, raft.journal.voted_for):
        yield f"its term and vote are {raft.term}, {raft.voted_for}; its journal says {raft.journal.term}"
    for peer, message in raft.outbox._held:
        if message.term != raft.term:
            yield f"in term {raft.term} it is about to promise to {peer} what it promised in term {message.term}"
    if not raft.leads and (raft.reads.under_way or raft.reads.wants_round):
        yield "it does not lead, and somebody waits for it to confirm a read"


def _not_durable(raft: RaftState, copy_of: CopyOf) -> Iterator[str]:
    own, index = copy_of(raft.me), raft.durable_index
    if own is None or index <= raft.journal.base_index or index > raft.journal.last_index:
        return
    if not own.holds(index, raft.journal.term_of(index) or 0):
        yield f"its durable index is {index}; its disk has not got that entry, and ends at {own.last_index}"


def _not_the_leaders(raft: RaftState, raft_of: RaftOf) -> Iterator[str]:
    """Check that entries up to the checked index are in the journal of this term's leader."""
    if raft.leads or raft.leader is None:
        return
    leader, index = raft_of(raft.leader), raft.checked_index
    if leader is None or not leader.leads or leader.term != raft.term:
        return
    theirs, own = leader.journal.term_of(index), raft.journal.term_of(index)
    if index > leader.journal.last_index or (None not in (theirs, own) and theirs != own):
        yield f"its checked index is {index}, which is another entry at {raft.leader}, who leads term {raft.term}"


def _not_matched(raft: RaftState, copy_of: CopyOf) -> Iterator[str]:
    """Check that acknowledged entries are on the peer's disk while both replicas are in this term."""
    journal = raft.journal
    for peer, known in raft.progress.items():
        if known.match > journal.last_index:
            yield f"{peer} matches up to {known.match}; the last entry is {journal.last_index}"
            continue
        if known.phase is not Phase.SNAPSHOT and not known.match < known.next:
            yield f"{peer} matches up to {known.match}, and is sent {known.next} next"
        flights, size_bytes = len(known._flights), sum(flight.size_bytes for flight in known._flights)
        if flights > progress.WINDOW_REQUESTS or known._bytes != size_bytes:
            yield f"{flights} requests of {size_bytes} bytes are under way to {peer}; it counts {known._bytes} bytes"
        if known.acked_seq > raft.seq:
            yield f"{peer} has answered request {known.acked_seq}; the last one is {raft.seq}"
        copy = copy_of(peer)
        if copy is None or known.lost or not known.match or copy.hard[0] != raft.term:
            continue
        term = journal.term_of(known.match)
        if copy.last_index < known.match or (term is not None and not copy.holds(known.match, term)):
            yield f"{peer} matches up to entry {known.match} of term {term}, which its disk has not got"


def votes_missing(raft: RaftState, copy_of: CopyOf) -> str:
    """Return the reason why a new leader lacks durable votes of a majority; empty if it has them."""
    granted = 0
    for voter in raft.configuration.voter_ids:
        copy = copy_of(voter)
        # A voter that has entered a later term may have voted for another candidate since.
        granted += copy is None or copy.hard[0] > raft.term or tuple(copy.hard) == (raft.term, raft.me)
    if granted >= raft.configuration.majority:
        return ""
    return f"it leads term {raft.term} with {granted} votes that are on disks; {raft.configuration.majority} are needed"
