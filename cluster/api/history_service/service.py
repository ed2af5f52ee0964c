"""Replica's side of the history service: supervises the process and sends queries within bounds.

The event loop only sends a frame and decodes the reply, so no query can delay it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from forebay.cluster.api.history_service.entry_feed import EntryFeed
from forebay.cluster.api.history_service.frames import (
    NO_ROOM,
    REPLICA_CODEC,
    CancelQuery,
    ChangesQuery,
    ChangesReply,
    ConsistencyQuery,
    CountsQuery,
    CountsReply,
    EventFilter,
    FromReplica,
    HistoryQuery,
    HistoryReply,
    IndexProgress,
    PastQuery,
    PastReply,
    PoolUseQuery,
    PoolUseReply,
    PresentQuery,
    ProofQuery,
    QueryCost,
    QueryFailure,
    ReplyPart,
    RootQuery,
    TermsQuery,
    TermsReply,
    TileQuery,
    TreeReply,
    WhyQuery,
    WhyReply,
)
from forebay.cluster.ipc import FrameConnection, SupervisedProcess
from forebay.cluster.security import Identity
from forebay.cluster.security.proofs import HASH_BYTES
from forebay.cluster.server import Controller
from forebay.cluster.system.eventloop import ProcessorShares, ShareExceeded, Turns
from forebay.replica.values import NEVER, Instant

LOGGER = logging.getLogger(__name__)

ANSWER_S = 8.0
"""Time for a reply, seconds: less than a client waits for one replica."""

QUESTIONS_WAITING_MAX = 16
"""Outstanding queries, count; further ones are rejected."""

QUESTIONS_PER_ASKER_MAX = 4
"""Outstanding queries of one caller, count: a quarter of all."""

READS_MAX = 4
"""Reads of the present that the process has at a time, count; it answers them one after the other."""

READS_PER_ASKER_MAX = 2
"""Those of one caller, count."""

SHARE = 0.25
"""Processors that the queries of one caller may use, in the long run: four listings of 10,000 jobs in eight seconds."""

RESERVE_S = 2.0
"""Processor time that a caller may use at once after a pause, seconds: four such listings."""

SHARE_WAIT_S_MAX = 2.0
"""Longest wait for a caller's share, seconds: with the query less than a client waits for one replica."""

SHARE_WAITING_MAX = 8
"""Queries of one caller that wait for its share, count: those of a page, and some more."""

POOLS_LATE_S = 10.0
"""Largest age of reported pool use, seconds."""

BEGINS_S = 5.0
"""Delay of the first start without queries, seconds: a replica is busy while it starts, and a short run needs none."""

NO_ROOM_S = 15.0
"""Restart delay if its disk is full, seconds: each start costs a second of processor time and frees nothing."""

_KILLED_BY_ITS_FILES = frozenset({-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT})
"""Signals that indicate a damaged mapped file; the index is then rebuilt."""


Live = Callable[[], Awaitable[bytes]]
"""Returns encoded values of the replica that its state does not contain."""


class HistoryServiceBusy(Exception):
    """Too many queries are outstanding; try again later."""

    def __init__(self, sentence: str, *, own: bool = False, after_s: int = 1) -> None:
        super().__init__(sentence)
        self.own = own
        """True if they are the caller's own."""
        self.after_s = after_s
        """Time after which to try again, seconds."""


class HistoryServiceTimeout(TimeoutError):
    """No reply arrived in time; the message gives the progress of the index."""


class HistoryServiceLost(Exception):
    """The process ended before it answered; the replica can answer itself."""


class ProofUnavailable(LookupError):
    """The ledger's tree lacks the requested part; the message says what it has."""


class HistoryService:
    """The history service of a replica."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.process = SupervisedProcess(
            "the history service",
            "forebay.cluster.api.past_reads",
            self._connect,
            arguments=self._arguments,
            judge=self._judge,
        )
        self._is_damaged = False
        """True if the last process was killed by a damaged file: the next one rebuilds the index."""
        self._wanted = asyncio.Event()
        self._questions: dict[int, tuple[HistoryQuery, asyncio.Future[HistoryReply]]] = {}
        self._numbers = 0
        self._pools_asked_s = float("-inf")
        self._asked: Counter[Hashable] = Counter()
        """Outstanding queries by caller."""
        self.progress = IndexProgress(0, 0, 0, 0)
        """Last reported progress of the index."""
        self._reads: dict[int, asyncio.Future[PastReply]] = {}
        """Outstanding reads of the present state."""
        self._parts: dict[int, list[bytes]] = {}
        """Parts of bodies that have arrived, by query."""
        self._turns = Turns(READS_MAX, READS_PER_ASKER_MAX)
        self._callers: dict[int, Hashable] = {}
        """Caller of each outstanding query that is charged."""
        self._shares = ProcessorShares(
            controller.clock.monotonic_s,
            share=SHARE,
            reserve_s=RESERVE_S,
            wait_s_max=SHARE_WAIT_S_MAX,
            waiting_max=SHARE_WAITING_MAX,
        )
        self._feed = EntryFeed(controller, self.process)

    def start(self) -> None:
        """Start the process within BEGINS_S or at the first query, and restart it when it exits."""
        self.process.start(after=self._wanted, within_s=BEGINS_S)

    async def stop(self) -> None:
        """Let the process write its rows and exit."""
        await self.process.stop()

    async def why(
        self,
        job: int,
        who: Hashable,
        *,
        revision: int = 0,
        at: Instant = NEVER,
        tasks: tuple[int, ...] | None = None,
        external_job: str = "",
    ) -> WhyReply | QueryFailure:
        """Return the reason a job waited after a revision or at an instant."""
        async with self._turn(who):
            through = self._controller.applied_index
            found = await self._ask(
                WhyQuery(self._number(), through, revision, at, job, tasks, external_job), through, who
            )
        assert isinstance(found, WhyReply | QueryFailure)
        return found

    async def read_past(
        self,
        who: Identity,
        operation: str,
        params: dict[str, str],
        query: dict[str, str],
        *,
        revision: int,
        at: Instant,
        is_private: bool,
    ) -> PastReply | QueryFailure:
        """Return the response to a read after a revision or at an instant.

        Raises:
            HistoryServiceBusy, HistoryServiceTimeout: Try again later.
        """
        async with self._turn(who):
            through, whose = self._controller.applied_index, (str(who.role), who.name)
            asked = PastQuery(self._number(), through, revision, at, operation, params, query, *whose, is_private)
            found = await self._ask(asked, through, who)
        assert isinstance(found, PastReply | QueryFailure)
        return found

    @property
    def has_present(self) -> bool:
        """Return whether the process has the present state, so that it can answer reads."""
        return self._feed.completes(self.progress.present)

    async def read_present(
        self, who: Identity, operation: str, params: dict[str, str], query: dict[str, str], *, live: Live
    ) -> PastReply:
        """Return the response to a read of what is applied now. Callers take turns.

        `live` returns encoded values of the replica that the state does not contain.

        Raises:
            HistoryServiceLost: The process ended; the caller can answer itself.
            HistoryServiceBusy, HistoryServiceTimeout: Try again later.
        """
        async with self._share(who), self._turns.turn(who):
            asked = await self._present_query(who, operation, params, query, live)
            number = asked.number
            future = self._reads[number] = asyncio.get_running_loop().create_future()
            self._callers[number] = who
            self._feed.flush()
            self._send(asked)
            try:
                if not self.has_present:
                    raise HistoryServiceLost("the history service has just ended")
                async with asyncio.timeout(ANSWER_S):
                    found: PastReply = await future
                return found
            except TimeoutError as error:
                self._feed.stop()  # until it reports progress, this replica answers itself
                raise HistoryServiceTimeout(
                    f"the history service has read entry {self.progress.present}; the query needs entry {asked.through}"
                ) from error
            finally:
                del self._reads[number], self._callers[number]
                self._parts.pop(number, None)
                if not future.done() or future.cancelled():
                    self._send(CancelQuery(number))

    async def read_records(
        self, who: Identity, operation: str, params: dict[str, str], query: dict[str, str], *, live: Live
    ) -> PastReply:
        """Return the response to a read of the ledger's records up to the currently applied entry.

        `live` as for `read_present`.

        Raises:
            HistoryServiceBusy, HistoryServiceTimeout: Try again later.
        """
        async with self._turn(who):
            asked = await self._present_query(who, operation, params, query, live, indexed=True)
            found = await self._ask(asked, asked.through, who)
        assert isinstance(found, PastReply)
        return found

    async def _present_query(
        self,
        who: Identity,
        operation: str,
        params: dict[str, str],
        query: dict[str, str],
        live: Live,
        *,
        indexed: bool = False,
    ) -> PresentQuery:
        """Return a query of what is applied now."""
        values, controller = await live(), self._controller
        through, now, whose = controller.applied_index, controller.agreed.now(), (str(who.role), who.name)
        return PresentQuery(self._number(), through, now, operation, params, query, *whose, indexed, values)

    async def changes(
        self,
        who: Hashable,
        since: tuple[int, Instant],
        until: tuple[int, Instant],
        sought: EventFilter,
        *,
        is_operator: bool,
        limit: int,
    ) -> bytes | QueryFailure:
        """Return the differences between two states, each after a revision or, if that is 0, at an instant, as JSON.

        Raises:
            HistoryServiceBusy, HistoryServiceTimeout: Try again later.
        """
        async with self._turn(who):
            through = self._controller.applied_index
            one = sought
            asked = ChangesQuery(
                self._number(), through, *since, *until, one.job, one.of, one.name, one.only, is_operator, limit
            )
            found = await self._ask(asked, through, who)
        assert isinstance(found, ChangesReply | QueryFailure)
        return found.content if isinstance(found, ChangesReply) else found

    async def terms(self, who: Hashable, limit: int) -> TermsReply:
        """Return the last leader terms."""
        async with self._turn(who):
            through = self._controller.applied_index
            found = await self._ask(TermsQuery(self._number(), through, limit), through, who)
        assert isinstance(found, TermsReply)
        return found

    async def pools(self, who: Hashable, name: str = "") -> PoolUseReply:
        """Return pool use over time, of all pools or one."""
        async with self._turn(who):
            # The applied entries are written for it only occasionally, because pages poll every second and each write
            # is a flush.
            now_s = asyncio.get_running_loop().time()
            is_due = now_s - self._pools_asked_s >= POOLS_LATE_S
            if is_due:
                self._pools_asked_s = now_s
            through = self._controller.applied_index if is_due else 0
            found = await self._ask(PoolUseQuery(self._number(), name), through, who)
        assert isinstance(found, PoolUseReply)
        return found

    async def root(self, size: int) -> bytes:
        """Return the root over the first `size` entries.

        Not limited per caller: only the few replicas send it, before they sign.

        Raises:
            ProofUnavailable: The tree is smaller.
        """
        return await self._query_tree(RootQuery(self._number(), size), size)

    async def consistency(self, old_size: int, size: int) -> list[bytes]:
        """Return the proof that the first `old_size` entries are a prefix of the first `size`.

        Not limited per caller: witnesses are few.
        """
        found = await self._query_tree(ConsistencyQuery(self._number(), size, old_size), size)
        return [found[at : at + HASH_BYTES] for at in range(0, len(found), HASH_BYTES)]

    async def tile(self, path: str, who: Hashable) -> bytes:
        """Return a tile or bundle of the tree.

        Raises:
            ProofUnavailable: The tile does not exist.
        """
        async with self._turn(who):
            return await self._query_tree(TileQuery(self._number(), path), 0, who)

    async def proof(self, job: int, size: int, who: Hashable) -> tuple[bytes, bytes]:
        """Return the proven records of a job in the first `size` entries, and a completeness proof if available."""
        async with self._turn(who):
            found = await self._query(ProofQuery(self._number(), size, job), size, who)
        assert isinstance(found, TreeReply)
        return found.data, found.more

    async def counts(self, size: int) -> CountsReply:
        """Return the record counts of all jobs in the first `size` entries.

        Not limited per caller, like `root`.
        """
        found = await self._query(CountsQuery(self._number(), size), size)
        assert isinstance(found, CountsReply)
        return found

    async def _query_tree(self, asked: HistoryQuery, through: int, who: Hashable = None) -> bytes:
        found = await self._query(asked, through, who)
        assert isinstance(found, TreeReply)
        return found.data

    async def _query(self, asked: HistoryQuery, through: int, who: Hashable = None) -> HistoryReply:
        found = await self._ask(asked, through, who)
        if isinstance(found, QueryFailure):
            raise ProofUnavailable(found.sentence)
        return found

    async def _ask(self, asked: HistoryQuery, through: int, who: Hashable = None) -> HistoryReply:
        """Return the reply to a query that needs entries up to `through`, and charge the caller; None: a replica."""
        self.start()
        self._wanted.set()
        future: asyncio.Future[HistoryReply] = asyncio.get_running_loop().create_future()
        self._questions[asked.number] = asked, future
        if who is not None:
            self._callers[asked.number] = who
        if self._controller.ledger.applied_index < through:
            self._controller.journal.flush_hints()
        self._send(asked)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await future
        except TimeoutError as error:
            raise HistoryServiceTimeout(
                f"the history service has read entry {self.progress.index}, and can prove entries up to "
                f"{self.progress.tree_size}; the query needs entry {through}"
            ) from error
        finally:
            del self._questions[asked.number]
            self._callers.pop(asked.number, None)
            self._parts.pop(asked.number, None)
            if future.cancelled() or not future.done():
                # A repeated query would otherwise wait behind unwanted replies.
                self._send(CancelQuery(asked.number))

    def _send(self, frame: FromReplica) -> None:
        if self.process.link is not None:
            self.process.link.send(frame)

    @asynccontextmanager
    async def _turn(self, who: Hashable) -> AsyncIterator[None]:
        if self._asked[who] >= QUESTIONS_PER_ASKER_MAX:
            raise HistoryServiceBusy(f"{who} has {self._asked[who]} history queries outstanding", own=True)
        if len(self._questions) >= QUESTIONS_WAITING_MAX:
            raise HistoryServiceBusy(f"{len(self._questions)} history queries are outstanding")
        self._asked[who] += 1
        try:
            async with self._share(who):
                yield
        finally:
            self._asked[who] -= 1
            if not self._asked[who]:
                del self._asked[who]

    @asynccontextmanager
    async def _share(self, who: Hashable) -> AsyncIterator[None]:
        """Wait until the caller's share of the process permits another query."""
        try:
            async with self._shares.use(who):
                yield
        except ShareExceeded as error:
            sentence = f"the queries of {who} have used more than a caller's share of this replica's processor time"
            raise HistoryServiceBusy(sentence, own=True, after_s=math.ceil(error.after_s)) from error

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _judge(self, ending: int | str, delay_s: float) -> float:
        self._is_damaged = ending in _KILLED_BY_ITS_FILES
        if ending != NO_ROOM:
            return delay_s
        LOGGER.error("history queries wait, because the disk has no space for the index of the history service")
        return NO_ROOM_S

    def _arguments(self) -> list[str]:
        controller = self._controller
        home = controller.config.storage.directory / controller.name
        return [str(home), *(["anew"] if self._is_damaged else [])]

    def _connect(self) -> HistoryConnection:
        return HistoryConnection(self)

    def outstanding(self) -> list[HistoryQuery]:
        """Return the queries that wait for a reply."""
        return [asked for asked, _ in self._questions.values()]

    def disconnected(self) -> None:
        """Give up the reads that the process has not answered."""
        self._feed.stop()
        self._parts.clear()  # the next process begins its replies anew
        for future in self._reads.values():
            if not future.done():
                future.set_exception(HistoryServiceLost("the history service has ended"))

    def receive(self, said: HistoryReply) -> None:
        """Take a reply or a progress report of the process."""
        if isinstance(said, IndexProgress):
            self.progress = said
            self._feed.begin()
        elif isinstance(said, QueryCost):
            if said.number in self._callers:
                self._shares.charge(self._callers[said.number], said.used_s)
        elif isinstance(said, ReplyPart):
            if said.number in self._reads or said.number in self._questions:
                self._parts.setdefault(said.number, []).append(said.content)
        elif isinstance(said, PastReply):
            self._receive_read(said)
        elif said.number in self._questions and not self._questions[said.number][1].done():
            self._questions[said.number][1].set_result(said)

    def _receive_read(self, said: PastReply) -> None:
        parts = self._parts.pop(said.number, None)
        if parts:
            said = msgspec.structs.replace(said, content=b"".join((*parts, said.content)))
        future: asyncio.Future[Any] | None = self._reads.get(said.number)
        if said.number in self._questions:
            future = self._questions[said.number][1]
        if future is not None and not future.done():
            future.set_result(said)


class HistoryConnection(FrameConnection[FromReplica, HistoryReply]):
    """Connection to one process of the history service."""

    def __init__(self, service: HistoryService) -> None:
        super().__init__(REPLICA_CODEC, "the history service")
        self._service = service

    def connected(self) -> None:
        for asked in self._service.outstanding():
            self.send(asked)

    def disconnected(self) -> None:
        self._service.disconnected()

    def receive(self, frame: HistoryReply) -> None:
        self._service.receive(frame)
