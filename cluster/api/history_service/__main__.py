"""History service process: `python -m cluster.api.past_reads SOCKET PARENT DIRECTORY [anew]`.

SOCKET is a descriptor, PARENT the replica's process, whose death ends this one, and DIRECTORY the replica's directory.
The process reads ledger and snapshots there, as an audit does, and owns `index` and `tlog`. `anew` rebuilds `index`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.api.history_service.frames import (
    COST_LEAST_S,
    NO_ROOM,
    PART_BYTES_MAX,
    SERVICE_CODEC,
    CancelQuery,
    ChangesQuery,
    EntriesApplied,
    FromReplica,
    HistoryQuery,
    HistoryReply,
    IndexProgress,
    PastQuery,
    PastReply,
    PoolUseQuery,
    PresentQuery,
    QueryCost,
    QueryFailure,
    ReplyPart,
    TermsQuery,
    TermsReply,
    TreeQuery,
)
from forebay.cluster.api.history_service.index_scrub import IndexScrub
from forebay.cluster.api.history_service.present import PresentState
from forebay.cluster.api.history_service.queries import HistoryQueries
from forebay.cluster.api.history_service.record_counts import RecordCounts
from forebay.cluster.api.history_service.terms import terms_of
from forebay.cluster.api.history_service.tree import Tree
from forebay.cluster.ipc import ChildSocket, begin_child
from forebay.cluster.server.tlog import LOG_DIRECTORY
from forebay.cluster.system import (
    SystemClock,
    collect_for_a_reader,
    is_disk_full,
    processor_s,
)
from forebay.replica.state import State
from forebay.wal import Environment, JobIndex, JobIndexBroken, Ledger

LOGGER = logging.getLogger("forebay.cluster.api.history_service")

POLL_S = 0.25
"""Interval of ledger checks without queries, seconds; a check reads its marks."""

TOLD_S = 1.0
"""Interval of progress reports to the replica, seconds."""

NICENESS = 10
"""Under load the history service gets a tenth of the processor, since commits come first.

It catches up later, and still answers queries.
"""

ANEW = "anew"


HistorySocket = ChildSocket[HistoryReply, FromReplica]


class Reader(Protocol):
    """Answers reads."""

    def prepare(self) -> None:
        """Prepare for the first read."""
        ...

    def past(self, asked: PastQuery, state: State) -> PastReply:
        """Return the response from a past state."""
        ...

    def present(self, asked: PresentQuery, state: PresentState, history: HistoryQueries) -> PastReply:
        """Return the response from the present state, and from the records of the ledger."""
        ...


class HistoryProcess:
    """Follows the ledger and answers queries in between."""

    def __init__(
        self, link: HistorySocket, follower: Follower, histories: RecordCounts, tree: Tree, reader: Reader
    ) -> None:
        self._link = link
        self._follower = follower
        self._histories = histories
        self._tree = tree
        self._reader = reader
        self._present = PresentState(follower)
        self._clock = SystemClock()
        self._scrub = IndexScrub(follower, self._clock.monotonic_s)
        self._questions = HistoryQueries(follower, self._clock.monotonic_s)
        self._waiting: deque[HistoryQuery] = deque()
        self._is_fed = False
        """True if the replica feeds this process, because it is to answer reads of the present."""
        self._is_prepared = False
        self._told_s = 0.0
        self._told: IndexProgress | None = None

    def run(self) -> None:
        """Run until the replica closes the socket (EOFError)."""
        is_behind = True
        while True:
            if self._link.is_readable(0 if is_behind else POLL_S):
                self._receive()
            try:
                self._answer()
                is_behind = False
                for part in (self._follower, self._histories, self._tree, self._present):
                    is_behind |= part.step()
                    self._answer()
                if not is_behind:
                    if self._is_fed and not self._is_prepared:
                        self._is_prepared = True
                        self._reader.prepare()
                    self._scrub.step()
            except JobIndexBroken as error:
                LOGGER.error("rebuilding the index by job: %s", error)
                self._follower.begin_anew()
                is_behind = True
            self._tell()

    def _receive(self) -> None:
        for asked in self._link.receive():
            if isinstance(asked, EntriesApplied):
                self._present.take(asked)
                self._is_fed = True
            elif isinstance(asked, CancelQuery):
                self._waiting = deque(one for one in self._waiting if one.number != asked.number)
            else:
                self._waiting.append(asked)

    def _answer(self) -> None:
        """Answer the queries whose entries are indexed and that were not cancelled."""
        if self._link.is_readable():
            self._receive()
        for _ in range(len(self._waiting)):
            if self._link.is_readable():
                self._receive()
            if not self._waiting:
                return
            asked = self._waiting.popleft()
            if isinstance(asked, PresentQuery):
                while self._present.step():  # not at the caller's cost
                    pass
            began_s = processor_s()
            said = self._reply(asked)
            if said is None:
                self._waiting.append(asked)
                continue
            used_s = processor_s() - began_s
            if used_s >= COST_LEAST_S:
                self._say(QueryCost(asked.number, used_s))
            self._say_in_parts(said)

    def _reply(self, asked: HistoryQuery) -> HistoryReply | None:
        """Return the reply; None if the entries that it needs have not been read yet."""
        if isinstance(asked, TreeQuery):
            return self._tree.answer(asked, self._follower)
        if isinstance(asked, PresentQuery):
            if self._present.index < asked.through or (asked.indexed and not self._is_indexed(asked.through)):
                return None
            return self._reader.present(asked, self._present, self._questions)
        if isinstance(asked, PoolUseQuery):
            return self._follower.capacity.answer(asked)
        if isinstance(asked, ChangesQuery):
            # Authors of changes come from the index.
            return self._questions.changes(asked) if self._is_indexed(asked.through) else None
        if self._follower.ledger.applied_index < asked.through:
            return None
        if isinstance(asked, PastQuery):
            state = self._questions.moment(asked)
            return state if isinstance(state, QueryFailure) else self._reader.past(asked, state)
        if isinstance(asked, TermsQuery):
            return TermsReply(asked.number, terms_of(self._follower.ledger, asked.limit))
        return self._questions.why(asked)

    def _is_indexed(self, through: int) -> bool:
        return self._follower.index >= through and not self._histories.is_reading

    def _tell(self) -> None:
        now_s, follower = self._clock.monotonic_s(), self._follower
        if now_s - self._told_s < TOLD_S:
            return
        size, made_again = self._tree.progress
        said = IndexProgress(
            0, follower.index, follower.revision, follower.jobs.size_bytes, size, made_again, self._present.index
        )
        if said != self._told:
            self._say(said)
        self._told, self._told_s = said, now_s

    def _say_in_parts(self, said: HistoryReply) -> None:
        """Send a reply, its body in parts."""
        if isinstance(said, PastReply):
            last = max(0, len(said.content) - 1) // PART_BYTES_MAX * PART_BYTES_MAX
            for first in range(0, last, PART_BYTES_MAX):
                self._say(ReplyPart(said.number, said.content[first : first + PART_BYTES_MAX]))
            said = msgspec.structs.replace(said, content=said.content[last:])
        self._say(said)

    def _say(self, said: HistoryReply) -> None:
        self._link.send(said)


def main(arguments: Sequence[str], reader: Reader) -> int:
    """Run the history service; return its exit code."""
    link, (directory, *options) = begin_child(arguments, niceness=NICENESS)
    collect_for_a_reader()
    try:
        _follow(link, Path(directory), reader, anew=ANEW in options)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return NO_ROOM
    return 0


def _follow(link: socket.socket, home: Path, reader: Reader, *, anew: bool) -> None:
    """Follow the ledger and answer queries until the replica closes the socket."""
    index = JobIndex(home / "index")
    if anew:
        index.begin_anew()
    with Environment.open_readonly(home / "wal") as environment, link:
        follower = Follower(
            Ledger(environment),
            snapshots=home / "snapshots",
            index=index,
            monotonic_s=SystemClock().monotonic_s,
            images=home / "index" / "states",
        )
        histories = RecordCounts(follower, home / "index")
        tree = Tree(Ledger(environment), home / LOG_DIRECTORY, histories, SystemClock().monotonic_s)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            HistoryProcess(ChildSocket(link, SERVICE_CODEC), follower, histories, tree, reader).run()
        # In any case, save the indexed rows.
        follower.write()
    index.close()
