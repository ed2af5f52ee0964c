"""Driver of the engine on the asyncio loop: proposals, frames and timers cause ticks, without a period (H19, H23)."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, NoReturn, TypeVar

import msgspec

from forebay.cluster.consensus.configurations import MemberChange
from forebay.cluster.consensus.engine import Engine
from forebay.cluster.consensus.frames import AnyMessage, ClockReply, ClockRequest
from forebay.cluster.consensus.interface import (
    ChangeRefused,
    IncarnationOver,
    JournalLike,
    Machine,
    NotLeader,
    PeerStatus,
    Role,
    Timing,
    Uniform,
)
from forebay.cluster.consensus.peer_clocks import ASK_S, ClockBounds, PeerClocks
from forebay.cluster.consensus.seals import Seals
from forebay.cluster.consensus.state import NEVER
from forebay.cluster.consensus.transport import TlsLinks
from forebay.cluster.security import Credentials, Peers
from forebay.cluster.system import Clock
from forebay.wal import FIRST_INCARNATION, Configuration, ConfigurationAt, Incarnation, lineage_of, name_of

_Answer = TypeVar("_Answer")

LONGEST_WAIT_S: Final = 1.0
"""Maximum timer duration, to notice in time that the machine was suspended."""

TIMER_SLACK_S: Final = 0.001
"""Tolerated lateness of a timer: the loop waits in whole milliseconds."""


class Consensus:
    """Participation of one replica in consensus. Create and use it in the thread of one asyncio loop.

    `journal.sync()` blocks that thread at most once a tick; everything that arrives meanwhile shares the next sync. An
    exception from journal, machine or rules goes to `fail`, which must end the process. No promise is made afterwards
    (law 10).
    """

    def __init__(
        self,
        *,
        me: str,
        members: Mapping[str, str],
        cluster_id: str,
        journal: JournalLike,
        machine: Machine,
        timing: Timing,
        tls: Credentials,
        peers: Peers | None = None,
        clock: Clock,
        on_change: Callable[[], None],
        fail: Callable[[BaseException], NoReturn],
        uniform: Uniform | None = None,
        bootstrap: Configuration | None = None,
        configuration: ConfigurationAt | None = None,
        found_without: frozenset[str] = frozenset(),
        seals: Seals | None = None,
        incarnation: Incarnation = FIRST_INCARNATION,
    ) -> None:
        """Continue from the journal's applied index.

        `me` is this replica's ID. `members` maps names to peer addresses, including this replica's own, where it
        listens. An address in `members` takes precedence over the configuration's. `bootstrap`, `configuration`,
        `found_without` and `seals` are passed to `cluster.consensus.engine.Engine`; without the first two, `members` is
        the permanent membership.

        `incarnation` is the incarnation of the journal's cluster; frames of other incarnations are rejected. `tls`
        holds this replica's credentials. `peers` registers the connections, together with those of other listeners.

        Raises the exceptions of `Engine`, and those below.

        Raises:

        Raises:
            ValueError: This replica is not in `members`.
            TlsError: This replica's certificate cannot be used.
        """
        if name_of(me) not in members:
            raise ValueError(f"replica {me!r} is not among the members {', '.join(sorted(members))}")
        self._journal: Final = journal
        self._members = dict(members)
        self._timing: Final = timing
        self._clock: Final = clock
        self._fail: Final = fail
        self._incarnation: Final = incarnation
        # Timeouts must differ between replicas, even in a cluster cloned from one image.
        draw = uniform or random.SystemRandom().uniform
        self._links: Final = TlsLinks(
            me=me,
            members=members,
            cluster_id=lineage_of(cluster_id, incarnation),
            tls=tls,
            peers=peers or Peers(cluster_id, clock),
            timing=timing,
            uniform=draw,
            listener=self,
        )
        self._clocks: Final = PeerClocks(me, clock)
        self._asking: asyncio.TimerHandle | None = None
        self._engine: Final = Engine(
            me=me,
            peers=sorted(members),
            bootstrap=bootstrap,
            configuration=configuration,
            found_without=found_without,
            seals=seals,
            journal=journal,
            machine=machine,
            timing=timing,
            clock=clock,
            uniform=draw,
            links=self._links,
            on_change=self._changed,
            on_members=self._find_peers,
            on_due=self._wake,
            clock_off=self._is_off,
        )
        self._me: Final = me
        self._on_change: Final = on_change
        self._watching: set[asyncio.Future[None]] = set()
        """Waiters for a change of role, term, leader or readiness."""
        self._find_peers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon = False
        self._timer: asyncio.Handle | None = None
        self._timer_at_s = 0.0
        """Loop time of the timer: uvloop's handle lacks it within the last millisecond."""
        self._running = False
        self._failed = False

    async def start(self) -> None:
        """Listen, dial the peers and participate.

        Raises:
            OSError: The peer address cannot be used.
        """
        self._loop = asyncio.get_running_loop()
        await self._links.start()
        self._running = True
        self._wake()
        self._ask_clocks()

    async def stop(self) -> None:
        """Stop: close the links, wake all waiters, and write the lazy marks. Peers elect another leader."""
        running, self._running = self._running, False
        self._release()
        for timer in (self._timer, self._asking):
            if timer is not None:
                timer.cancel()
        await self._links.stop()
        if running and not self._failed:
            self._engine.stop()
            with self._guard():
                self._journal.flush_hints()

    @property
    def role(self) -> Role:
        """Role of this replica in its term."""
        return self._engine.role

    @property
    def term(self) -> int:
        """Current term of this replica."""
        return self._engine.term

    @property
    def leader(self) -> str | None:
        """Name of this term's leader, if known."""
        leader = self._engine.leader
        return None if leader is None else name_of(leader)

    @property
    def configuration(self) -> Configuration:
        """Configuration in force on this replica, committed or not."""
        return self._engine.configuration

    @property
    def commit_index(self) -> int:
        """Last index known to be committed."""
        return self._engine.commit_index

    @property
    def applied_index(self) -> int:
        """Last index applied by the machine."""
        return self._engine.applied_index

    @property
    def last_index(self) -> int:
        """Last index of the journal."""
        return self._journal.last_index

    @property
    def ready(self) -> bool:
        """Return whether a leader accepts proposals, or a follower is close behind such a leader."""
        return self._running and self._engine.ready

    def propose(self, data: bytes) -> tuple[int, int]:
        """Propose an entry; return (index, term).

        The entry is committed if `machine.apply` is called with that index and term. After a loss of leadership the
        outcome is unknown. Raises the exceptions of `Engine.propose`.
        """
        place = self._ask(lambda: self._engine.propose(data))
        self._wake()
        return place

    async def confirm_leadership(self) -> int:
        """Return the commit index that a linearizable read must wait for, after a majority has confirmed this leader.

        Waits at most about one election timeout.

        Raises:
            NotLeader: This replica does not lead, or loses leadership meanwhile.
        """
        if not self._running or self._engine.role is not Role.LEADER:
            raise NotLeader(self.leader)
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        def resolve(index: int | None) -> None:
            if not answer.done():  # the caller may have been cancelled (H7)
                answer.set_result(index)

        self._engine.read(resolve)
        self._wake()
        index = await answer
        if index is None:
            raise NotLeader(self.leader, sentence="this replica lost its leadership before a majority confirmed it")
        return index

    async def read_index(self, news: bytes) -> int:
        """Return the index that this follower must apply before a linearizable read of its own state.

        Sends `news` to the leader. The leader returns the index after a majority has confirmed its leadership, later
        than this call.

        Raises:
            NotLeader: No leader is known, or no answer arrives within the longest election timeout.
        """
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        def resolve(index: int | None) -> None:
            if not answer.done():
                answer.set_result(index)

        if self._running:
            with self._guard():
                self._engine.ask_leader(news, resolve)
        else:
            resolve(None)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.election_max_s):
                index = await answer
                if index is not None:
                    return index
        raise NotLeader(self.leader, sentence="the leader is not known, or did not answer in time")

    def peers(self) -> list[PeerStatus]:
        """Return the status of each peer, sorted by name."""
        found = []
        for peer in self._engine.peers():
            offset = self._clocks.offset(peer.name)
            found.append(
                msgspec.structs.replace(
                    peer,
                    name=name_of(peer.name),
                    clock_offset_s=None if offset is None else offset.middle_s,
                    clock_off=self._is_off(peer.name),
                )
            )
        return found

    @property
    def sync_s(self) -> float | None:
        """Typical duration of a sync on this replica's disk, seconds; None after fewer than SYNCS syncs."""
        return self._engine.sync_s

    @property
    def clock_off(self) -> bool:
        """Return whether this replica's wall clock deviates from a majority's; it then avoids leading."""
        return self._is_off(self._me)

    @property
    def clock_bounds(self) -> ClockBounds:
        """Bounds on the time from the wall clocks of a majority of the voters."""
        return self._clocks.bounds(self._engine.configuration.voter_ids)

    def change(self, wanted: MemberChange) -> tuple[int, int]:
        """Change the membership as leader; return (index, term) of the entry. Raises as `Engine.change`."""
        place = self._ask(lambda: self._engine.change(wanted))
        self._wake()
        return place

    def reach_at(self, members: Mapping[str, str]) -> None:
        """Set addresses, by name, that are dialled before those of the configuration."""
        self._members = dict(members)
        self._find_peers()

    def address_of(self, name: str) -> str | None:
        """Return the address at which replica `name` is connected now, or None."""
        return self._links.address_of(name)

    def promotable(self) -> str | None:
        """Return the ID of a learner that may be promoted now, or None."""
        return self._engine.promotable() if self._running else None

    def unrecorded(self) -> tuple[str, bytes] | None:
        """Return the ID of a voter whose key a change should record, and the key, or None."""
        return self._engine.unrecorded() if self._running else None

    async def transfer(self, target: str | None = None) -> str | None:
        """Transfer leadership to `target`, or to the best voter; return the new leader's name, or None if not known
        yet.

        Waits at most three times the longest election timeout.

        Raises:
            NotLeader: This replica does not lead, or stops during the transfer.
            ChangeRefused: The target cannot take over, or no voter took over.
        """
        chosen = self._ask(lambda: self._engine.transfer(target))
        self._wake()
        # After a pause of the process, the first tick may end the transfer without a status change.
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._timing.election_max_s):
                while self._running and self._engine.role is Role.LEADER and self._engine.hands_over:
                    await self._change()
        if not self._running:
            raise NotLeader(None, sentence="this replica stopped while it transferred leadership")
        if self._engine.role is Role.LEADER:
            # The target's campaign may have begun, and cannot be withdrawn.
            raise ChangeRefused(
                "not_taken",
                f"{name_of(chosen)} has not taken over leadership yet, and may still do so",
                "check which replica leads before you try again: forebay cluster members",
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.election_max_s):
                while self._running and self._engine.leader is None:
                    await self._change()
        return self.leader

    def compact_to(self, index: int) -> None:
        """Drop entries up to `index` after a snapshot at `index` is finalized. The ledger keeps them.

        Keeps entries that a peer still needs. Has no effect after `stop`, because a snapshot may be finalized during
        the stop.
        """
        if not self._running:
            return
        with self._guard():
            self._journal.compact_to(self._engine.compactable_to(index))

    # ---- events of the links ----

    def on_frame(self, peer: str, message: AnyMessage) -> None:
        """Handle a frame of an authenticated peer."""
        if not self._running:
            return
        if isinstance(message, ClockRequest):
            self._send(peer, self._clocks.answer(message))
            return
        if isinstance(message, ClockReply):
            self._clocks.heard(peer, message)
            return
        try:
            wants_tick = self._engine.receive(peer, message)
        except BaseException as error:
            self._stop_for(error)
        if wants_tick:
            self._wake()

    def on_up(self, peer: str) -> None:
        """Handle a new link to a peer."""
        self._link(self._engine.connected, peer)
        if self._running:
            self._send(peer, self._clocks.ask(peer))

    def on_down(self, peer: str) -> None:
        """Handle the loss of the link to a peer."""
        self._link(self._engine.disconnected, peer)
        self._clocks.forget(peer)

    def on_lost_sight(self, peer: str) -> None:
        """Handle the loss of the connection that a peer opened."""
        self._link(self._engine.lost_sight, peer)

    def on_later_incarnation(self, peer: str, incarnation: Incarnation) -> None:
        """Stop this replica if a known member has a later incarnation of the cluster."""
        known = self._members.keys() | {name_of(one.id) for one in self._engine.configuration.members()}
        if self._running and peer in known:
            self._stop_for(IncarnationOver(name_of(self._me), str(self._incarnation), str(incarnation), peer))

    # ---- clocks ----

    def _is_off(self, member: str) -> bool:
        return self._clocks.is_off(member, self._engine.configuration.voter_ids)

    def _ask_clocks(self) -> None:
        """Request the clock of every linked peer, and schedule the next round."""
        if not self._running or self._loop is None:
            return
        self._asking = self._loop.call_later(ASK_S, self._ask_clocks)
        for peer in sorted(self._engine.raft.connected):
            self._send(peer, self._clocks.ask(peer))

    def _send(self, peer: str, message: AnyMessage) -> None:
        self._links.send(peer, message)
        self._links.flush()

    # ---- inside ----

    def _link(self, note: Callable[[str], None], peer: str) -> None:
        if self._running:
            with self._guard():
                note(peer)
            self._wake()

    def _ask(self, ask: Callable[[], _Answer]) -> _Answer:
        """Make a request to the engine. Rejections are raised; a failure of the engine stops this replica."""
        if not self._running:
            raise NotLeader(None, sentence="this replica is not running")
        try:
            return ask()
        except BaseException as error:
            if self._engine.stopped:
                self._stop_for(error)
            raise  # a rejection

    def _find_peers(self) -> None:
        """Dial the members of every configuration that may be in force, at the file's address first, then at their own.

        If all replicas change addresses at once, only their files have the new addresses. After a `cluster update`, an
        outdated file must not separate the replicas.
        """
        found = {}
        for identity, address in self._engine.addresses.items():
            places = (self._members.get(name_of(identity)), address)
            if any(places):
                found[identity] = tuple(dict.fromkeys(place for place in places if place))
        self._links.set_peers(found)

    def _changed(self) -> None:
        self._release()
        self._on_change()

    def _release(self) -> None:
        """Wake all waiters for a change."""
        watching, self._watching = self._watching, set()
        for future in watching:
            if not future.done():
                future.set_result(None)

    async def _change(self) -> None:
        """Wait for a change of role, term, leader or readiness."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching.add(future)
        try:
            await future
        finally:
            self._watching.discard(future)

    # ---- ticking ----

    def _wake(self) -> None:
        if not self._soon and self._running and self._loop is not None:
            self._soon = True
            self._loop.call_soon(self._tick)

    def _on_timer(self) -> None:
        self._timer = None
        if self._soon or not self._running:
            return
        if self._engine.next_due_s() <= self._clock.monotonic_s():
            self._tick()
        else:
            self._set_timer()  # the work is due later now

    def _tick(self) -> None:
        self._soon = False
        if not self._running:
            return
        try:
            self._engine.tick()
        except BaseException as error:
            self._stop_for(error)
        self._set_timer()

    def _set_timer(self) -> None:
        due_s = self._engine.next_due_s()
        if not self._running or self._loop is None or due_s == NEVER:
            return
        wait_s = min(due_s - self._clock.monotonic_s(), LONGEST_WAIT_S)
        if wait_s <= 0:
            self._wake()
            return
        at_s = self._loop.time() + wait_s
        # Keep a timer that is too early: it costs one check, and most timers are postponed many times.
        if self._timer is None or self._timer_at_s > at_s + TIMER_SLACK_S:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at_s = self._loop.call_at(at_s, self._on_timer), at_s

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._stop_for(error)

    def _stop_for(self, error: BaseException) -> NoReturn:
        self._running = False
        self._failed = True
        self._release()
        self._links.abort()
        for timer in (self._timer, self._asking):
            if timer is not None:
                timer.cancel()
        self._fail(error)
        raise error
