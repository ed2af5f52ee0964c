"""What all of the rules share: a replica's state beyond the stock engine's, changes of term, and the commit index.

Section numbers in this and the next modules are those of the extended Raft paper (Ongaro and Ousterhout, 2014) and,
with "thesis", of Ongaro's dissertation. The chain of classes is Core, Elections, Following, Leading, Changing, Engine:
one question each.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from cluster.consensus.configurations import Configurations
from cluster.consensus.interface import Machine, Role, Timing
from cluster.consensus.journal_adapter import JournalLike
from cluster.consensus.progress import Progress
from cluster.consensus.seam import Links, Seam, Uniform
from cluster.consensus.seldom import Seldom
from cluster.consensus.snapshots import SnapshotReceiver
from cluster.system import Clock
from wal import BrokenInvariant, Configuration, Entry, Member, Placed, incarnation_of, initial

SCAN_BYTES: Final = 4 << 20
SCAN_ENTRIES: Final = 1024
"""Entries read from the journal at once while configurations are looked for: bytes and count."""

_Reached = TypeVar("_Reached", int, float)

NEVER: Final = float("inf")

GRACE_HEARTBEATS: Final = 2
"""Heartbeats that a replica listens for after it was deaf, before it believes in silence."""


SEQ_BITS: Final = 40
"""Bits of a request's number that count requests of one process: at 100,000 a second they last 127 days, after which
only the protection below is gone. Above them is room for 2**22 changes of the members."""


def first_seq(me: str) -> int:
    """Return where a member's request numbers begin: its successor at the same address has others.

    A frame says who speaks, not to whom. One that was meant for a member that was replaced can reach the new one,
    which must not take an answer to its predecessor for its own (a vote, or the news that it was removed).
    """
    return incarnation_of(me) << SEQ_BITS


class Core(Seam):
    """The shared state, and the steps that more than one rule takes."""

    def __init__(
        self,
        *,
        me: str,
        peers: Sequence[str] = (),
        journal: JournalLike,
        machine: Machine,
        timing: Timing,
        clock: Clock,
        uniform: Uniform,
        links: Links,
        founding: Configuration | None = None,
        configuration: Placed | None = None,
    ) -> None:
        """Take part as the member with the id `me`, over `journal`.

        `configuration`: what snapshot and ledger say of the members as of `journal.applied_index`; later entries are
        read here. None if nothing does: then the whole journal is read, and before its first configuration
        `founding` is in force. Without that either, `peers` and `me` are: nobody is told of them, for tests.
        """
        if not journal.base_index <= journal.applied_index <= journal.commit_index <= journal.last_index:
            raise BrokenInvariant(
                f"the journal's marks are out of order: base {journal.base_index}, applied {journal.applied_index}, "
                f"commit {journal.commit_index}, last {journal.last_index}"
            )
        self._journal: Final = journal
        self._machine: Final = machine
        self.stopped = False
        self._fail_stop: Final = _FailStop(self)
        members = tuple(Member(identity) for identity in {*peers, me})
        self._founding: Final = founding
        self._members: Final = Configurations(configuration or Placed(0, founding or initial(members)))
        self._read_configurations(journal, journal.base_index if configuration is None else journal.applied_index)
        self._progress: dict[str, Progress] = {}
        """The other members in force, voters and learners, in the order of their ids."""
        self._receiver: Final = SnapshotReceiver(machine)
        self._seldom: Final = Seldom(clock.monotonic_s)
        self._seq = first_seq(me)
        self._leader_heard_s = -NEVER
        self._led_s = clock.monotonic_s()
        """When this replica last led or heard a leader, of whatever term; when it started, if it never did."""
        self._leader_ready = False
        self._leader_commit = 0
        self._checked_index = journal.commit_index
        """Everything up to here is also in the journal of the leader of this term (H25)."""
        self._durable_index = 0
        """Everything up to here is synced: what a leader may count of its own."""
        self._sync_due_s = self._sync_owed_s = NEVER
        """When a leader that put off its own sync does it, and by when at the latest; NEVER when it owes none."""
        self._unsynced_bytes = 0
        """What was proposed here since the last sync."""
        self._hints_due_s = NEVER
        self._grace_given = False
        self._grace_until_s = -NEVER
        others = [member.id for member in self.configuration.members() if member.id != me]
        super().__init__(me=me, peers=others, journal=journal, timing=timing, clock=clock, uniform=uniform, links=links)
        self._rearrange()

    # ---- who is in it ----

    @property
    def configuration(self) -> Configuration:
        """The members by whom this replica counts: the newest configuration in its journal, committed or not."""
        return self._members.in_force

    @property
    def addresses(self) -> dict[str, str]:
        """Where to reach each other member, by id: of every configuration that may be in force."""
        known = self._members.known()
        return {one.id: one.peer for each in known for one in each.members() if one.id != self.me}

    @property
    def _votes_here(self) -> bool:
        """Whether this replica is a voter of the configuration in force."""
        return self.configuration.votes(self.me)

    def _read_configurations(self, journal: JournalLike, index: int) -> None:
        """Find those after `index` in the journal: they are in force although nobody has applied them (H13)."""
        while index < journal.last_index:
            entries = journal.entries(index + 1, max_bytes=SCAN_BYTES, max_entries=SCAN_ENTRIES)
            self._members.appended(entries, read_back=True)
            index = entries[-1].index

    def _append(self, entries: Sequence[Entry]) -> None:
        """Append to the journal; a configuration among the entries is in force from now on (thesis 4.1)."""
        self._journal.append(entries)
        if self._members.appended(entries):
            self._rearrange()

    def _truncate_from(self, index: int) -> None:
        """Cut the journal; a configuration that was in it is undone."""
        self._journal.truncate_from(index)
        if self._members.truncated_from(index):
            self._rearrange()

    def _rearrange(self) -> None:
        """Keep books on the members in force, and on nobody else."""
        others = sorted(member.id for member in self.configuration.members() if member.id != self.me)
        gone = set(self._progress) - set(others)
        new = set(others) - set(self._progress)
        self._progress = {peer: self._progress.get(peer) or Progress() for peer in others}
        self._at_configuration(new, gone)

    def _at_configuration(self, new: set[str], gone: set[str]) -> None:
        """Another configuration is in force; `new` and `gone` are the other members by which it differs."""

    def _reached(self, own: _Reached, of: Callable[[Progress], _Reached]) -> _Reached:
        """Return the most that a majority of the voters has reached, where this replica stands at `own`."""
        reached = [own if one.id == self.me else of(self._progress[one.id]) for one in self.configuration.voters]
        reached.sort(reverse=True)
        return reached[self.configuration.majority - 1]

    # ---- steps ----

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
            self._led_s = self._clock.monotonic_s()
            self._postpone_election()
            self._after_leading()

    def _after_leading(self) -> None:
        raise NotImplementedError

    def _enter_term(self, term: int, voted_for: str | None) -> None:
        """Go to a higher term, in which nothing is known of a leader."""
        # Nobody needs what was to be promised in an older one, and a new leader may cut off what it was about.
        self._bridge.forget()
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
            self._members.forget_before(index)
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

    # ---- fail stop ----

    def _require_running(self) -> None:
        if self.stopped:
            raise RuntimeError("this engine has stopped; make a new one over the journal")

    def _stopping_at_an_exception(self) -> "_FailStop":
        return self._fail_stop


class _FailStop:
    """A context out of which an exception stops the engine: a plain class, since each frame and each tick enters it."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Core) -> None:
        self._engine: Final = engine

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._engine.stopped = True
            self._engine._bridge.forget()
