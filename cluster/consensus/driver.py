"""The engine on the asyncio loop: ticked by proposals, frames and due timers, never by a fixed period (H19, H23)."""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NoReturn

from cluster.clock import Clock
from cluster.consensus.core import NEVER
from cluster.consensus.engine import Engine
from cluster.consensus.frames import AnyMessage
from cluster.consensus.interface import Machine, NotLeader, PeerStatus, Role, Timing
from cluster.consensus.journal_adapter import JournalLike
from cluster.consensus.seam import Uniform
from cluster.consensus.transport import TlsLinks
from cluster.tls import TlsFiles

LONGEST_WAIT_S: Final = 1.0
"""A timer is set for at most this long, so that a clock that stood still during a suspend is noticed."""


class Consensus:
    """One replica's part in the agreement. Made and used in one asyncio loop's thread.

    `journal.sync()` blocks that thread: at most once a tick, and whatever arrives meanwhile shares the next one. An
    exception from journal, machine or the rules themselves goes to `fail`, which must end the process; nothing is
    promised after it (law 10).
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
        tls: TlsFiles,
        clock: Clock,
        on_change: Callable[[], None],
        fail: Callable[[BaseException], NoReturn],
        uniform: Uniform | None = None,
    ) -> None:
        """Take over the journal from its applied index on; `members` are names and peer addresses, `me` included.

        Raises ValueError if `me` is no member, BrokenInvariant if the journal's marks are out of order, TlsRefused.
        """
        if me not in members:
            raise ValueError(f"replica {me!r} is not among the members {', '.join(sorted(members))}")
        self._journal: Final = journal
        self._clock: Final = clock
        self._fail: Final = fail
        # Timeouts must differ between replicas, even of a cluster that was cloned from one image.
        draw = uniform or random.SystemRandom().uniform
        self._links: Final = TlsLinks(
            me=me, members=members, cluster_id=cluster_id, tls=tls, timing=timing, uniform=draw, listener=self
        )
        self._engine: Final = Engine(
            me=me,
            peers=sorted(members),
            journal=journal,
            machine=machine,
            timing=timing,
            clock=clock,
            uniform=draw,
            links=self._links,
            on_change=on_change,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._running = False
        self._failed = False

    async def start(self) -> None:
        """Listen, dial the peers and take part. OSError if the peer address cannot be used."""
        self._loop = asyncio.get_running_loop()
        await self._links.start()
        self._running = True
        self._wake()

    async def stop(self) -> None:
        """Leave: close the links, end the waiting, write the lazily written marks. Peers elect another leader."""
        running, self._running = self._running, False
        if self._timer is not None:
            self._timer.cancel()
        await self._links.stop()
        if running and not self._failed:
            self._engine.stop()
            with self._guard():
                self._journal.flush_hints()

    @property
    def role(self) -> Role:
        """What this replica is in its term."""
        return self._engine.role

    @property
    def term(self) -> int:
        """The term that this replica is in."""
        return self._engine.term

    @property
    def leader(self) -> str | None:
        """The name of the replica that leads this term, as far as is known here."""
        return self._engine.leader

    @property
    def commit_index(self) -> int:
        """The last index known to be committed."""
        return self._engine.commit_index

    @property
    def applied_index(self) -> int:
        """The last index that the machine has applied."""
        return self._engine.applied_index

    @property
    def last_index(self) -> int:
        """The last index of the journal."""
        return self._journal.last_index

    @property
    def ready(self) -> bool:
        """Whether a leader may decide, and whether a follower is close behind a leader that may."""
        return self._running and self._engine.ready

    def propose(self, data: bytes) -> tuple[int, int]:
        """Propose an entry; return (index, term). `machine.apply` there, with that term, means that it is committed.

        NotLeader, EntryTooLarge, or ValueError for empty data. After a loss of leadership the outcome is unknown.
        """
        if not self._running:
            raise NotLeader(None, sentence="this replica is not running")
        try:
            place = self._engine.propose(data)
        except BaseException as error:
            if self._engine.stopped:
                self._stop_for(error)
            raise  # a refusal
        self._wake()
        return place

    async def confirm_leadership(self) -> int:
        """Return the commit index that a linearizable read has to wait for, once a majority confirms this leader.

        NotLeader if it does not lead or loses leadership meanwhile. Waits at most about one election timeout.
        """
        if not self._running or self._engine.role is not Role.LEADER:
            raise NotLeader(self._engine.leader)
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        def resolve(index: int | None) -> None:
            if not answer.done():  # the caller may have been cancelled (H7)
                answer.set_result(index)

        self._engine.read(resolve)
        self._wake()
        index = await answer
        if index is None:
            raise NotLeader(
                self._engine.leader, sentence="this replica lost its leadership before a majority confirmed it"
            )
        return index

    def peers(self) -> list[PeerStatus]:
        """Return what is known of each peer, sorted by name."""
        return self._engine.peers()

    def compact_to(self, index: int) -> None:
        """Let go of entries up to `index`, after a snapshot at `index` is sealed; the ledger keeps them."""
        with self._guard():
            self._journal.compact_to(index)

    # ---- what the links tell ----

    def on_frame(self, peer: str, message: AnyMessage) -> None:
        """A frame of an authenticated peer."""
        if self._running:
            with self._guard():
                self._engine.receive(peer, message)
            self._wake()

    def on_up(self, peer: str) -> None:
        """The link to a peer is there."""
        if self._running:
            with self._guard():
                self._engine.connected(peer)
            self._wake()

    def on_down(self, peer: str) -> None:
        """The link to a peer broke."""
        if self._running:
            with self._guard():
                self._engine.disconnected(peer)
            self._wake()

    def on_lost_sight(self, peer: str) -> None:
        """The link from a peer broke."""
        if self._running:
            with self._guard():
                self._engine.lost_sight(peer)
            self._wake()

    # ---- ticking ----

    def _wake(self) -> None:
        if not self._soon and self._running and self._loop is not None:
            self._soon = True
            self._loop.call_soon(self._tick)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _tick(self) -> None:
        self._soon = False
        if not self._running:
            return
        with self._guard():
            self._engine.tick()
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
        # A timer that is too early costs a tick that finds nothing to do; most are moved later many times first.
        if self._timer is None or self._timer.when() > at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at_s, self._on_timer)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._stop_for(error)

    def _stop_for(self, error: BaseException) -> NoReturn:
        self._running = False
        self._failed = True
        self._links.abort()
        if self._timer is not None:
            self._timer.cancel()
        self._fail(error)
        raise error
