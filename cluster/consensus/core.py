"""What all of the rules share: a replica's state beyond the stock engine's, changes of term, and the commit index.

Section numbers in this and the next modules are those of the extended Raft paper (Ongaro and Ousterhout, 2014) and,
with "thesis", of Ongaro's dissertation. The chain of classes is Core, Elections, Following, Leading, Engine: one
question each.
"""

from collections.abc import Sequence
from typing import Final

from cluster.clock import Clock
from cluster.consensus.interface import Machine, Role, Timing
from cluster.consensus.journal_adapter import JournalLike
from cluster.consensus.progress import Progress
from cluster.consensus.seam import Links, Seam, Uniform
from cluster.consensus.snapshots import SnapshotReceiver
from wal.failures import BrokenInvariant

NEVER: Final = float("inf")

GRACE_HEARTBEATS: Final = 2
"""Heartbeats that a replica listens for after it was deaf, before it believes in silence."""


class Core(Seam):
    """The shared state, and the steps that more than one rule takes."""

    def __init__(
        self,
        *,
        me: str,
        peers: Sequence[str],
        journal: JournalLike,
        machine: Machine,
        timing: Timing,
        clock: Clock,
        uniform: Uniform,
        links: Links,
    ) -> None:
        if not journal.base_index <= journal.applied_index <= journal.commit_index <= journal.last_index:
            raise BrokenInvariant(
                f"the journal's marks are out of order: base {journal.base_index}, applied {journal.applied_index}, "
                f"commit {journal.commit_index}, last {journal.last_index}"
            )
        self._journal: Final = journal
        self._machine: Final = machine
        self._progress: Final = {name: Progress() for name in sorted(set(peers) - {me})}
        self._majority: Final = (len(self._progress) + 1) // 2 + 1
        self._receiver: Final = SnapshotReceiver(machine)
        self._seq = 0
        self._leader_heard_s = -NEVER
        self._leader_ready = False
        self._leader_commit = 0
        self._checked_index = journal.commit_index
        """Everything up to here is also in the journal of the leader of this term (H25)."""
        self._durable_index = 0
        """Everything up to here is synced: what a leader may count of its own."""
        self._hints_due_s = NEVER
        self._grace_given = False
        self._grace_until_s = -NEVER
        super().__init__(me=me, peers=peers, journal=journal, timing=timing, clock=clock, uniform=uniform, links=links)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _follow(self, leader: str | None) -> None:
        """Become a follower; of nobody yet if `leader` is None."""
        led = self._leads
        self._set_role(Role.FOLLOWER, leader)
        if leader is None:
            self._leader_ready = False
        if led:
            self._postpone_election()
            self._after_leading()

    def _after_leading(self) -> None:
        raise NotImplementedError

    def _enter_term(self, term: int, voted_for: str | None) -> None:
        """Go to a higher term, in which nothing is known of a leader."""
        self._set_term(term, voted_for)
        self._leader_heard_s = -NEVER
        self._leader_commit = 0
        # What agreed with the leader of an older term may differ from the new one's, except what is committed.
        self._checked_index = self.commit_index

    def _adopt_term(self, term: int) -> None:
        """Somebody has a higher term: follow nobody in it yet, with no vote given (section 5.1)."""
        self._enter_term(term, None)
        self._follow(None)

    def _commit(self, index: int) -> None:
        if index > self.commit_index:
            self._move_commit(index)
            self._touch_hints()

    def _has_passed(self, deadline_s: float, now_s: float) -> bool:
        """Say whether a deadline for hearing from others has passed, while this replica was able to hear.

        One that is seen late passed during a slow sync or while the process did not run. What was sent meanwhile waits
        in the sockets, so it is read first, once: replicas on one slow disk would depose their leader at every stall.
        """
        if now_s < max(deadline_s, self._grace_until_s):
            return False
        if not self._grace_given and now_s - deadline_s > self._timing.heartbeat_s:
            self._grace_given = True
            self._grace_until_s = now_s + GRACE_HEARTBEATS * self._timing.heartbeat_s
            return False
        return True

    def _touch_hints(self) -> None:
        """The journal has marks to write, some quiet time from now."""
        self._hints_due_s = self._clock.monotonic_s() + self._timing.idle_flush_s

    def _last_index_not_above_term(self, index: int, term: int, floor: int) -> int:
        """Return the last index from `floor` to `index` whose term is not above `term`: logs may agree there (5.3)."""
        # A stretch of terms above `term` is as long as what one leader left uncommitted, so a step at a time is enough.
        while index > floor and (self._journal.term_of(index) or 0) > term:
            index -= 1
        return index
