"""Invariants of the cluster under any fault, checked after every step from the replicas' observed behaviour.

The oracle keeps the one history there may be: each entry from the moment when the first replica has applied it, and the
state that follows, folded here from the first entry on. Every replica is compared with it, at every entry.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from forebay.cluster.consensus.frames import AnyMessage, AppendReply, SnapshotReply, VoteReply, VoteRequest
from forebay.replica.messages.entries import CachedReply, Entry
from forebay.replica.messages.events import job_of
from forebay.replica.state.builder import StateBuilder
from forebay.replica.state.digest import state_digest
from forebay.replica.state.invariants import find_violations
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.errors import LedgerViolation
from forebay.replica.values.units import Revision
from forebay.wal.codec import EntryKind, decode_batch, kind_of
from forebay.wal.configuration import ConfigurationAt, decode_configuration
from tests.simulation.disk import SimDisk
from tests.simulation.lives import Lives
from tests.simulation.register import Register

FIELDS = State.__struct_fields__


class Effect(NamedTuple):
    """Outcome of a command."""

    revision: int
    job: int
    rejection: int | None


class Point(NamedTuple):
    """The history up to one entry."""

    term: int
    data: bytes
    revision: int
    state: State


class Oracle:
    """The history, and what each replica has claimed. `violate` is told each broken promise, as a sentence."""

    def __init__(
        self,
        violate: Callable[[str], None],
        holders: Callable[[str, int, int], tuple[int, int]],
        clock_most: Callable[[], int],
    ) -> None:
        """`holders` says of an entry on how many disks of voters it is, and how many are needed, as a replica counts.

        It is given the replica, index and term of the entry. `clock_most`: what a majority's wall clocks may at most
        have passed.
        """
        self._violate = violate
        self.members = Register(violate)
        self._holders = holders
        self._clock_most = clock_most
        self.points: list[Point] = [Point(0, b"", 0, EMPTY)]
        self.effects: dict[bytes, Effect] = {}
        self.acknowledged: dict[bytes, Effect] = {}
        self.leaders: dict[int, str] = {}
        self._logs: dict[tuple[int, int], tuple[bytes, int]] = {}
        self._votes: dict[tuple[str, int], str] = {}
        self._committed: dict[int, tuple[int, str]] = {}
        self._committed_by: dict[int, int] = {}
        """Term -> the last entry that was committed first by its leader."""
        self.lives = Lives(violate)
        self._held: dict[str, tuple[int, State]] = {}
        """Where each replica was last found to be equal to the history."""
        self._settled_at: dict[bytes, int] = {}
        """The entry that settled a command."""
        self.told_index = 0
        """The newest entry that an answer was given by."""
        self.floor = 0
        """The newest revision that anybody outside was told of: no later read may be older."""
        self.void = 0
        self.reads = 0
        self.applied = 0

    @property
    def state(self) -> State:
        """The state after everything that is agreed."""
        return self.points[-1].state

    @property
    def index(self) -> int:
        """The last agreed entry that some replica has applied."""
        return len(self.points) - 1

    # Raft's own promises

    def appended(self, name: str, index: int, term: int, data: bytes, previous_term: int) -> None:
        """Log matching: one entry for each index and term, with one history before it (Raft, figure 3)."""
        shown = (blake2b(data, digest_size=8).digest(), previous_term)
        known = self._logs.setdefault((index, term), shown)
        if known != shown:
            self._violate(f"log matching: {name} has another entry {index} of term {term}, or after another one")

    def leads(self, name: str, term: int, term_of: Callable[[int], int | None]) -> None:
        """Election safety: one leader a term; leader completeness: it has what leaders before its term committed."""
        known = self.leaders.setdefault(term, name)
        if known != name:
            self._violate(f"election safety: {known} and {name} both lead term {term}")
        elif known is name:
            last = self._committed_before(term)
            held = term_of(last)
            if last and held is not None and held != self._committed[last][0]:
                self._violate(f"leader completeness: {name} leads term {term} with another entry {last}")

    def led_without(self, name: str, term: int, last_index: int) -> None:
        """A new leader's journal reaches as far as what leaders before its term committed.

        Not as far as what a later term did: the votes for a leader may arrive when the cluster has gone on without it,
        and then it commits nothing any more (Raft, 5.4.3).
        """
        last = self._committed_before(term)
        if last_index < last:
            self._violate(
                f"leader completeness: {name} leads term {term} with {last_index} entries; {last} were committed "
                "before that term"
            )

    def _committed_before(self, term: int) -> int:
        return max((last for by, last in self._committed_by.items() if by < term), default=0)

    def committed(
        self, name: str, before: int, after: int, term_of: Callable[[int], int | None], current_term: int
    ) -> None:
        """Commit never moves back, and never over an entry that differs from one that is committed.

        `current_term` is that of `name`, which leads it where it is the first to commit.
        """
        if after < before:
            self._violate(f"{name}'s commit index moved back from {before} to {after}")
        for index in range(before + 1, after + 1):
            term = term_of(index)
            if term is None:
                continue
            if index not in self._committed:
                self._on_majority(name, index, term)
                self._committed_by[current_term] = index
            known = self._committed.setdefault(index, (term, name))
            if known[0] != term:
                self._violate(f"{name} commits entry {index} of term {term}; {known[1]} committed that of {known[0]}")

    def _on_majority(self, name: str, index: int, term: int) -> None:
        held, needed = self._holders(name, index, term)
        if held < needed:
            self._violate(f"{name} commits entry {index} of term {term}, which is on {held} disks; {needed} are needed")

    def changed(self, name: str, before: ConfigurationAt, placed: ConfigurationAt, term: int) -> None:
        """A leader has changed who is a member (thesis 4.1): one change at a time, and not before it knows its own."""
        self.members.seen(placed.configuration)
        known = self._committed.get(before.index)
        if before.index and known is None:
            self._violate(
                f"{name} appends version {placed.configuration.version} of the configuration while version "
                f"{before.configuration.version} is not committed"
            )
        if placed.configuration.version > 1 and not any(one == term for one, _ in self._committed.values()):
            self._violate(
                f"{name} appends version {placed.configuration.version} of the configuration before an entry of its "
                f"own term {term} is committed"
            )

    def promised(self, name: str, peer: str, message: AnyMessage, disk: SimDisk) -> None:
        """Durable before promised: what a vote or an acknowledgement claims is on the disk when it leaves."""
        hard = disk.hard
        if isinstance(message, VoteReply | VoteRequest) and message.pre:
            return
        if isinstance(message, VoteReply) and not message.granted:
            return
        if message.term > hard.term:
            self._violate(f"{name} speaks in term {message.term} to {peer}, but term {hard.term} is on its disk")
            return
        candidate = {VoteReply: peer, VoteRequest: name}.get(type(message))
        if candidate is not None:
            if message.term == hard.term and hard.voted_for != candidate:
                self._violate(f"{name} votes for {candidate} in term {message.term}; its disk says {hard.voted_for}")
            known = self._votes.setdefault((name, message.term), candidate)
            if known != candidate:
                self._violate(f"{name} votes for {known} and for {candidate} in term {message.term}")
        elif isinstance(message, AppendReply | SnapshotReply) and message.match_index:
            last = disk.last_index
            if message.match_index > last:
                self._violate(f"{name} acknowledges entry {message.match_index} to {peer}; its disk ends at {last}")

    # The state machine's

    def applied_at(self, name: str, index: int, term: int, data: bytes, state: State) -> None:
        """State machine safety: every replica applies the same entries and has the same state after each."""
        self.applied += 1
        if index == len(self.points):
            self.extend(index, term, data)
        if index >= len(self.points):
            self._violate(f"{name} applied entry {index}; the history ends at {len(self.points) - 1}")
            return
        point = self.points[index]
        if (point.term, point.data) != (term, data):
            self._violate(f"{name} applied another entry {index}, of term {term} instead of {point.term}")
            return
        self.holds(name, index, state)

    def holds(self, name: str, index: int, state: State) -> None:
        """The state of a replica at an entry is the one that the history gives, derived parts included."""
        if index >= len(self.points):
            self._violate(f"{name} is at entry {index}; the history ends at {len(self.points) - 1}")
            return
        point = self.points[index]
        if self._equal(name, index, state, point.state):
            self._held[name] = (index, state)  # the whole of it, so its digest is the same too
            return
        if state.revision != point.revision:
            self._violate(f"{name} is at revision {state.revision} after entry {index} instead of {point.revision}")
        elif state_digest(state) != state_digest(point.state):
            self._violate(
                f"{name} has another state at revision {state.revision} (entry {index}): {_differ(state, point)}"
            )
        else:
            self._violate(
                f"{name} derives something else after entry {index}: it holds {dict(state.held_bytes)}, its buffers "
                f"{dict(point.state.held_bytes)}"
            )

    def _equal(self, name: str, index: int, state: State, truth: State) -> bool:
        """Compare two whole states; what neither side has touched since they were last equal is equal still."""
        before_index, before = self._held.get(name, (0, EMPTY))
        if before_index != index - 1:
            return state == truth
        truth_before = self.points[before_index].state
        for field in FIELDS:
            mine, theirs = getattr(state, field), getattr(truth, field)
            untouched = mine is getattr(before, field) and theirs is getattr(truth_before, field)
            if not untouched and mine != theirs:
                return False
        return True

    def extend(self, index: int, term: int, data: bytes) -> None:
        """Take in the next entry, which was applied for the first time: fold it, and check what it does."""
        before = self.state
        after = before
        kind = kind_of(data)
        if kind is EntryKind.CONFIGURATION:
            self.members.agreed(index, decode_configuration(data))
        elif kind is EntryKind.BATCH:
            batch = decode_batch(data)
            if batch.base != before.revision:
                self.void += 1
            else:
                draft = StateBuilder(before)
                try:
                    for entry in batch.entries:
                        self._settle(draft, entry, batch.at, index)
                except LedgerViolation as error:
                    self._violate(f"entry {index} holds what no ledger can hold: {error}")
                after = draft.finish()
                if batch.at < before.at:
                    self._violate(f"entry {index}: the clock goes back from {before.at} to {batch.at}")
                if batch.at > (most := self._clock_most()):
                    self._violate(f"entry {index}: the time is {batch.at}, and no majority's clocks ever passed {most}")
                for fault in find_violations(after):
                    self._violate(f"after entry {index}: {fault}")
                self.lives.check_space(before, after, index)
        self.points.append(Point(term, data, after.revision, after))

    def _settle(self, draft: StateBuilder, entry: Entry, at: int, index: int) -> None:
        draft.at = at
        draft.revision += 1
        for event in entry.events:
            self.lives.fold(draft, event, index)
        if entry.id:
            job = next((job for job in map(job_of, entry.events) if job is not None), 0)
            if entry.id in self.effects:
                self._violate(f"exactly once: command {entry.id.hex()} is settled again by entry {index}")
            code = None if entry.rejection is None else int(entry.rejection.code)
            self.effects[entry.id] = Effect(draft.revision, job, code)
            draft.settle(
                entry.id, CachedReply(Revision(draft.revision), job, entry.rejection, entry.digest, entry.actor)
            )
            self._settled_at[entry.id] = index

    # What clients were told

    def answered(self, name: str, command_id: bytes, revision: int, job: int, rejection: int | None) -> None:
        """An answer follows a commit, and is the one answer that there is for its command."""
        told, truth = Effect(revision, job, rejection), self.effects.get(command_id)
        if truth is None:
            self._violate(f"{name} answers command {command_id.hex()} with revision {revision}; it is not committed")
        elif truth != told:
            self._violate(f"{name} answers command {command_id.hex()} with {told}; it was settled as {truth}")
        else:
            self.told_index = max(self.told_index, self._settled_at[command_id])

    def heard(self, command_id: bytes, revision: int, job: int, rejection: int | None) -> None:
        """A client has its answer."""
        self.acknowledged[command_id] = Effect(revision, job, rejection)
        self.floor = max(self.floor, revision)

    def read(self, name: str, floor: int, state: State) -> None:
        """A linearizable read is not older than what anybody knew when it was asked for."""
        self.reads += 1
        if state.revision < floor:
            self._violate(f"stale read: {name} gave revision {state.revision}; {floor} was known when it was asked for")


def _differ(state: State, point: Point) -> str:
    """Say in which fields two states differ."""
    theirs = point.state
    fields = [name for name in State.__struct_fields__ if getattr(state, name) != getattr(theirs, name)]
    return ", ".join(fields) or "only in what is derived"
