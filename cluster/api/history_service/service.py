"""A replica's end of the socket to its historian: kept running, told what is asked, waited for within bounds.

The loop does nothing of what is asked but send a frame and decode the answer, so no question about the past can hold it
up, however long the ledger is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress

import msgspec

from cluster.api.history_service.frames import (
    FRAME_BYTES_MAX,
    NO_ROOM,
    CancelQuery,
    ChangesQuery,
    ChangesReply,
    ConsistencyQuery,
    CountsQuery,
    CountsReply,
    EventFilter,
    EventPageQuery,
    EventPageReply,
    HistoryQuery,
    HistoryReply,
    IndexProgress,
    PastQuery,
    PastReply,
    PoolUseQuery,
    PoolUseReply,
    ProofQuery,
    QueryFailure,
    RecordsQuery,
    RecordsReply,
    RootQuery,
    TermsQuery,
    TermsReply,
    TileQuery,
    TreeReply,
    WhyQuery,
    WhyReply,
    decode_reply,
    encode,
)
from cluster.schemas import LENGTH, ChannelProtocolError
from cluster.security import Identity
from cluster.security.proofs import HASH_BYTES
from cluster.server import Controller
from cluster.system.eventloop import end_within
from replica.values import NEVER, Instant

LOGGER = logging.getLogger(__name__)

ANSWER_S = 8.0
"""How long an answer may take, seconds: less than a client waits for one replica."""

QUESTIONS_WAITING_MAX = 16
"""Questions about the past that may wait for their answers, count; more are refused."""

QUESTIONS_PER_ASKER_MAX = 4
"""Questions about the past of one asker that wait, count: a quarter of all, so that he waits for himself."""

POOLS_LATE_S = 10.0
"""How late it may be what is told of pools, seconds."""

BACK_OFF_S = 0.1
BACK_OFF_S_MAX = 5.0
"""The pause before a historian is started again, seconds: doubled each time, up to the second, ..."""

BEGINS_S = 5.0
"""How long nobody has asked when a replica that was started has its historian started, seconds: a start is busy enough,
and one that ends soon again needs none."""

NO_ROOM_S = 15.0
"""The pause where its disk is full, seconds: each start takes a second of processor, and makes no room."""

SOUND_S = 30.0
"""... and the first again after one that ran for so long, seconds."""

_KILLED_BY_ITS_FILES = frozenset({-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT})
"""How a process ends whose mapped file is damaged: the index is begun anew then."""

STOP_S = 5.0
"""How long a historian may take to write what it has and end, seconds."""


class HistoryServiceBusy(Exception):
    """Too many questions about the past wait already; ask again later."""

    def __init__(self, sentence: str, *, own: bool = False) -> None:
        super().__init__(sentence)
        self.own = own
        """Whether they are the asker's own."""


class HistoryServiceTimeout(TimeoutError):
    """There was no answer in time; the sentence says how far the index by job has come."""


class ProofUnavailable(LookupError):
    """The tree of the ledger does not have what is asked for; the sentence says what it has."""


class HistoryService:
    """The historian of a replica."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._keeper: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._questions: dict[int, tuple[HistoryQuery, asyncio.Future[HistoryReply]]] = {}
        self._numbers = 0
        self._pools_asked_s = float("-inf")
        self._asked: Counter[Hashable] = Counter()
        """Questions that wait, by who asks them."""
        self.progress = IndexProgress(0, 0, 0, 0)
        """How far the index by job is, as it was told last."""
        self.started = 0
        """Processes started, count: more than one where one has ended."""

    @property
    def pid(self) -> int | None:
        """The process that runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Have it started within BEGINS_S, or when somebody asks, and again whenever it ends."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Have it write what it has, and end."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def records(self, job: int, limit: int, who: Hashable, *, newest: bool = False) -> RecordsReply:
        """Return what concerned a job up to the entry that is applied now (`RecordsQuery`).

        HistoryServiceBusy, HistoryServiceTimeout.
        """
        async with self._turn(who):
            through = self._controller.applied_index
            found = await self._ask(RecordsQuery(self._number(), through, job, limit, newest), through)
        assert isinstance(found, RecordsReply)
        return found

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
        """Return why a job waited after a revision or at an instant; HistoryServiceBusy, HistoryServiceTimeout."""
        async with self._turn(who):
            through = self._controller.applied_index
            found = await self._ask(WhyQuery(self._number(), through, revision, at, job, tasks, external_job), through)
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
        """Return what an operation would have been answered after a revision or at an instant.

        HistoryServiceBusy, HistoryServiceTimeout.
        """
        async with self._turn(who):
            through, whose = self._controller.applied_index, (str(who.role), who.name)
            asked = PastQuery(self._number(), through, revision, at, operation, params, query, *whose, is_private)
            found = await self._ask(asked, through)
        assert isinstance(found, PastReply | QueryFailure)
        return found

    async def event_page(
        self,
        who: Hashable,
        sought: EventFilter,
        *,
        after: int,
        since: Instant,
        until: int,
        before: Instant,
        limit: int,
    ) -> EventPageReply | QueryFailure:
        """Return a stretch of what happened (`EventPageQuery`); HistoryServiceBusy, HistoryServiceTimeout."""
        async with self._turn(who):
            through = self._controller.applied_index
            asked = EventPageQuery(self._number(), through, after, since, until, before, sought, limit)
            found = await self._ask(asked, through)
        assert isinstance(found, EventPageReply | QueryFailure)
        return found

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
        """Return what differs between two moments, each a revision or, where that is 0, an instant, as JSON.

        HistoryServiceBusy, HistoryServiceTimeout.
        """
        async with self._turn(who):
            through = self._controller.applied_index
            one = sought
            asked = ChangesQuery(
                self._number(), through, *since, *until, one.job, one.of, one.name, one.only, is_operator, limit
            )
            found = await self._ask(asked, through)
        assert isinstance(found, ChangesReply | QueryFailure)
        return found.content if isinstance(found, ChangesReply) else found

    async def terms(self, who: Hashable, limit: int) -> TermsReply:
        """Return the last terms of leaders; HistoryServiceBusy, HistoryServiceTimeout."""
        async with self._turn(who):
            through = self._controller.applied_index
            found = await self._ask(TermsQuery(self._number(), through, limit), through)
        assert isinstance(found, TermsReply)
        return found

    async def pools(self, who: Hashable, name: str = "") -> PoolUseReply:
        """Return pool use over time, of all pools or one."""
        async with self._turn(who):
            # What is applied is written for it now and then only: pages ask every second, and each writing is a flush.
            now_s = asyncio.get_running_loop().time()
            is_due = now_s - self._pools_asked_s >= POOLS_LATE_S
            if is_due:
                self._pools_asked_s = now_s
            through = self._controller.applied_index if is_due else 0
            found = await self._ask(PoolUseQuery(self._number(), name), through)
        assert isinstance(found, PoolUseReply)
        return found

    async def root(self, size: int) -> bytes:
        """Return the root over the first `size` entries; ProofUnavailable, HistoryServiceTimeout.

        Nobody waits for his turn: replicas ask, who are few, and for what they sign.
        """
        return await self._query_tree(RootQuery(self._number(), size), size)

    async def consistency(self, old_size: int, size: int) -> list[bytes]:
        """Return the proof that the first `old_size` entries begin the first `size`.

        As for `root` nobody waits for his turn: witnesses are few.
        """
        found = await self._query_tree(ConsistencyQuery(self._number(), size, old_size), size)
        return [found[at : at + HASH_BYTES] for at in range(0, len(found), HASH_BYTES)]

    async def tile(self, path: str, who: Hashable) -> bytes:
        """Return a tile or bundle of the tree; ProofUnavailable, HistoryServiceBusy, HistoryServiceTimeout."""
        async with self._turn(who):
            return await self._query_tree(TileQuery(self._number(), path), 0)

    async def proof(self, job: int, size: int, who: Hashable) -> tuple[bytes, bytes]:
        """Return the records of a job in the first `size` entries, proven, and what shows that they are all, if that is
        to be had. ProofUnavailable, HistoryServiceBusy, HistoryServiceTimeout.
        """
        async with self._turn(who):
            found = await self._query(ProofQuery(self._number(), size, job), size)
        assert isinstance(found, TreeReply)
        return found.data, found.more

    async def counts(self, size: int) -> CountsReply:
        """Return how many records of each job there are in the first `size` entries.

        As for `root` nobody waits for his turn.
        """
        found = await self._query(CountsQuery(self._number(), size), size)
        assert isinstance(found, CountsReply)
        return found

    async def _query_tree(self, asked: HistoryQuery, through: int) -> bytes:
        found = await self._query(asked, through)
        assert isinstance(found, TreeReply)
        return found.data

    async def _query(self, asked: HistoryQuery, through: int) -> HistoryReply:
        found = await self._ask(asked, through)
        if isinstance(found, QueryFailure):
            raise ProofUnavailable(found.sentence)
        return found

    async def _ask(self, asked: HistoryQuery, through: int) -> HistoryReply:
        """Return the answer of a question that needs what is applied up to entry `through`."""
        self.start()
        self._wanted.set()
        future: asyncio.Future[HistoryReply] = asyncio.get_running_loop().create_future()
        self._questions[asked.number] = asked, future
        if self._controller.ledger.applied_index < through:
            self._controller.journal.flush_hints()
        if self._writer is not None:
            self._writer.write(encode(asked))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await future
        except TimeoutError as error:
            raise HistoryServiceTimeout(
                f"the past is known up to entry {self.progress.index}, its proofs up to {self.progress.tree_size}, and "
                f"{through} is asked for"
            ) from error
        finally:
            del self._questions[asked.number]
            if self._writer is not None and (future.cancelled() or not future.done()):
                # Who asks again would wait behind answers that nobody hears.
                self._writer.write(encode(CancelQuery(asked.number)))

    @asynccontextmanager
    async def _turn(self, who: Hashable) -> AsyncIterator[None]:
        if self._asked[who] >= QUESTIONS_PER_ASKER_MAX:
            raise HistoryServiceBusy(f"{who} asks {self._asked[who]} questions about the past already", own=True)
        if len(self._questions) >= QUESTIONS_WAITING_MAX:
            raise HistoryServiceBusy(f"{len(self._questions)} questions about the past wait already")
        self._asked[who] += 1
        try:
            yield
        finally:
            self._asked[who] -= 1
            if not self._asked[who]:
                del self._asked[who]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGINS_S):
                await self._wanted.wait()
        pause_s, anew = BACK_OFF_S, False
        while True:
            began_s = loop.time()
            try:
                code: int | str = await self._run(anew=anew)
            except (OSError, ChannelProtocolError, msgspec.MsgspecError) as error:
                code = str(error)
            anew = code in _KILLED_BY_ITS_FILES
            if loop.time() - began_s > SOUND_S:
                pause_s = BACK_OFF_S
            if code == NO_ROOM:
                pause_s = NO_ROOM_S
                LOGGER.error(
                    "the historian finds no room on the disk for its index, and has ended: questions about the past "
                    "wait until there is some; it is started again in %.3g s",
                    pause_s,
                )
            else:
                LOGGER.error("the historian has ended (%s); it is started again in %.3g s", code, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACK_OFF_S_MAX)

    async def _run(self, *, anew: bool) -> int:
        """Start a historian, take what it says, and return its exit code."""
        ours, its = socket.socketpair()
        ours.setblocking(False)
        controller = self._controller
        home = controller.config.storage.directory / controller.name
        words = [str(its.fileno()), str(os.getpid()), str(home), *(["anew"] if anew else [])]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cluster.api.past_reads",
                *words,
                pass_fds=[its.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
        finally:
            its.close()
        self.started += 1
        self._process = process
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            for asked, _ in self._questions.values():
                self._writer.write(encode(asked))
            await self._take(reader)
            return await process.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
            self._writer = None
            # The closed socket ends it: it writes what it has noted first.
            await asyncio.shield(end_within(process, STOP_S))
            self._process = None

    async def _take(self, reader: asyncio.StreamReader) -> None:
        """Take what the historian says until it closes its end."""
        with suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                (size_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if size_bytes > FRAME_BYTES_MAX:
                    raise ChannelProtocolError(f"the historian says {size_bytes} bytes in one frame")
                said = decode_reply(await reader.readexactly(size_bytes))
                if isinstance(said, IndexProgress):
                    self.progress = said
                elif said.number in self._questions and not self._questions[said.number][1].done():
                    self._questions[said.number][1].set_result(said)
