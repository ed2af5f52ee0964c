"""Bugs to plant: each takes one guard away from the code under test, by rebinding names, for as long as it is entered.

The production code has no switch for any of them. They are what the simulator must be able to find.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final
from unittest.mock import patch

import lmdb
import msgspec

from forebay.cluster.consensus import Role, log_compaction, log_replication, raft_log
from forebay.cluster.consensus.state import Outbox, RaftState
from forebay.cluster.server import controller as controller_module
from forebay.cluster.server import storage as storage_module
from forebay.cluster.server.applied_log import read_batch
from forebay.cluster.server.controller import Controller
from forebay.cluster.server.liveness import PollRounds
from forebay.cluster.server.pending import NotLeading, Settlement
from forebay.cluster.server.proposer import Proposer
from forebay.replica.fold import HistoryFold
from forebay.replica.fold.apply import apply_batch
from forebay.replica.state.state import EMPTY, State
from forebay.snapshots import restore as restore_module
from forebay.wal import environment as environment_module
from forebay.wal import replay, rows
from forebay.wal.environment import Environment
from forebay.wal.journal import Journal
from tests.simulation.bugs_of_members import PLANTS_OF_MEMBERS
from tests.simulation.bugs_of_sync_log import PLANTS_OF_SYNC_LOG
from tests.simulation.bugs_of_whole import PLANTS_OF_WHOLE

Plant = Callable[[], "list[Any]"]


def no_sync() -> list[Any]:
    """LMDB is opened without syncing (H1)."""

    def unsafe(directory: Any, map_size_bytes: int, *, readonly: bool) -> Any:
        return lmdb.open(
            os.fspath(directory), map_size=map_size_bytes, sync=False, metasync=True, writemap=False, readonly=readonly
        )

    return [patch.object(environment_module, "_open_lmdb", unsafe)]


def vote_not_stored() -> list[Any]:
    """The term is written, the vote in it is not (H1)."""
    write, pack = rows.write, replay.pack

    def without_vote(what: Any) -> Any:
        return what._replace(hard=None if what.hard is None else what.hard._replace(voted_for=None))

    return [
        patch.object(rows, "write", lambda env, changes: write(env, without_vote(changes))),
        patch.object(replay, "pack", lambda sync: pack(without_vote(sync))),
    ]


def promised_before_sync() -> list[Any]:
    """Votes and acknowledgements leave as they are made, not after the sync (H2)."""

    def send(self: Any, peer: str, message: Any) -> None:
        self._links.send(peer, message)

    return [patch.object(Outbox, "send", send)]


def counted_before_sync() -> list[Any]:
    """A leader counts its own entries, and answers, before they are on its disk (H2)."""

    def hasty(raft: RaftState) -> None:
        raft.outbox.flush()
        raft.durable_index = raft.journal.last_index
        raft.outbox.release()
        raft.outbox.flush()

    return [patch.object(raft_log, "make_durable", hasty)]


def own_copy_counted_before_sync() -> list[Any]:
    """A leader that has put off its own sync counts the entries for its own vote already (H2, thesis 10.2.1)."""
    original = raft_log.postpones_sync

    def postpones(raft: RaftState) -> bool:
        postponed = original(raft)
        if postponed:
            raft.durable_index = raft.journal.last_index
        return postponed

    return [patch.object(raft_log, "postpones_sync", postpones)]


def unconditional_truncation() -> list[Any]:
    """The journal is cut after what the request begins with, whether or not it differs (H3)."""
    original = log_replication.append_what_is_missing

    def cut(raft: RaftState, peer: str, entries: list[Any]) -> None:
        journal = raft.journal
        if entries and max(raft.commit_index, journal.base_index) < entries[0].index <= journal.last_index:
            raft_log.truncate_from(raft, entries[0].index)
        original(raft, peer, entries)

    return [patch.object(log_replication, "append_what_is_missing", cut)]


def stale_answer_counted() -> list[Any]:
    """An acknowledgement counts whatever its term (H4)."""
    original = log_replication.on_reply

    def trusting(raft: RaftState, peer: str, reply: Any) -> None:
        known = raft.progress.get(peer)
        if raft.leads and known is not None and reply.term < raft.term:
            reply = msgspec.structs.replace(reply, term=raft.term, seq=max(known.acked_seq + 1, 1))
        original(raft, peer, reply)

    return [patch.object(log_replication, "on_reply", trusting)]


def grace_renewed() -> list[Any]:
    """An answer of any one peer has a leader whose timer was late listen again for a majority (H15)."""
    original = log_replication.on_reply

    def patient(raft: RaftState, peer: str, reply: Any) -> None:
        original(raft, peer, reply)
        raft.grace_given = False

    return [patch.object(log_replication, "on_reply", patient)]


def old_terms_committed() -> list[Any]:
    """Entries of older terms are committed by counting replicas (Raft, figure 8)."""

    def counting(raft: RaftState) -> None:
        raft_log.commit(raft, raft.reached(raft.durable_index, lambda known: known.match))

    return [patch.object(log_replication, "advance_commit", counting)]


def one_too_few() -> list[Any]:
    """One replica less than a majority is enough to commit."""

    def reached(self: Any, own: Any, of: Any) -> Any:
        values = [own if one.id == self.me else of(self.progress[one.id]) for one in self.configuration.voters]
        return sorted(values, reverse=True)[max(0, self.configuration.majority - 2)]

    return [patch.object(RaftState, "reached", reached)]


def commit_unchecked() -> list[Any]:
    """A follower takes the leader's commit index for all that it holds, checked or not (H25)."""

    def take(raft: RaftState, message: Any) -> None:
        raft.leader_ready = message.ready
        raft_log.commit(raft, min(message.commit_index, raft.journal.last_index))

    return [patch.object(log_replication, "take_commit", take)]


def stale_snapshot_installed() -> list[Any]:
    """A snapshot is installed although its entries are held, and what follows them is thrown away (H25)."""
    original, reset = log_compaction.on_chunk, Journal.reset_to

    def on_chunk(raft: RaftState, peer: str, chunk: Any) -> None:
        checked, raft.checked_index = raft.checked_index, min(raft.checked_index, raft.applied_index)
        original(raft, peer, chunk)
        raft.checked_index = max(raft.checked_index, min(checked, raft.journal.last_index))

    def reset_to(self: Any, index: int, term: int, digest: bytes, revision: int) -> None:
        if index < self.last_index:
            self._commit_index = min(self._commit_index, index)
            self.truncate_from(index + 1)
        reset(self, index, term, digest, revision)

    return [patch.object(log_compaction, "on_chunk", on_chunk), patch.object(Journal, "reset_to", reset_to)]


def leads_too_early() -> list[Any]:
    """A leader decides and answers before it has applied its own first entry."""
    return [patch.object(RaftState, "has_begun", property(lambda self: self.leads))]


def starts_from_an_empty_state() -> list[Any]:
    """A replica that cannot use a snapshot goes on with an empty state (H8)."""
    replay: Any = storage_module._replay
    return [
        patch.object(storage_module, "_replay", lambda *given: (EMPTY, *replay(*given)[1:])),
        patch.object(storage_module, "_check", lambda *given: None),
    ]


def applied_twice() -> list[Any]:
    """After a restart the last entry of the ledger is folded again, past the fence (H7)."""
    replay: Any = storage_module._replay

    def again(ledger: Any, journal: Any, image: Any) -> Any:
        state, *rest = replay(ledger, journal, image)
        for entry in ledger.read(max(1, journal.applied_index), limit=1):
            batch = read_batch(entry.data)
            if batch is not None:
                batch = msgspec.structs.replace(
                    batch, base=state.revision, entries=tuple(msgspec.structs.replace(e, id=b"") for e in batch.entries)
                )
                with suppress(Exception):
                    state = apply_batch(state, batch) or state
        return (state, *rest)

    return [
        patch.object(storage_module, "_replay", again),
        patch.object(storage_module, "_check", lambda *given: None),
    ]


def stale_read() -> list[Any]:
    """Who believes to lead answers reads without asking anybody (H15)."""

    async def current(self: Any) -> State:
        if self.engine.role is not Role.LEADER:
            raise NotLeading(self.engine.leader)
        return self._state  # type: ignore[no-any-return]

    return [patch.object(Controller, "current", current)]


def minority_polls() -> list[Any]:
    """A replica answers polls for ever, without asking whoever leads whether its state is the newest."""

    async def prove(self: Any, node: str, said: Any) -> None:
        return None

    return [patch.object(PollRounds, "prove", prove)]


def receipts_dropped_at_snapshot() -> list[Any]:
    """A state that comes from a snapshot has no receipts (law 6)."""
    usable, installed = storage_module._usable_image, Controller.installed

    def without(image: Any) -> Any:
        return image and msgspec.structs.replace(
            image, state=msgspec.structs.replace(image.state, receipts=EMPTY.receipts)
        )

    def install(self: Any, image: Any, *rest: Any) -> Any:
        return installed(self, without(image), *rest)

    return [
        patch.object(storage_module, "_usable_image", lambda *given: without(usable(*given))),
        patch.object(Controller, "installed", install),
    ]


def failed_sync_ignored() -> list[Any]:
    """A sync that fails is taken for one that did not (H23)."""

    @contextmanager
    def write(self: Any) -> Iterator[Any]:
        self.check()
        with suppress(lmdb.Error, OSError):
            transaction = self._environment.begin(write=True)
            yield transaction
            self.commit(transaction)

    def append(self: Any, body: bytes) -> None:
        self.check()
        record = self.log.record(body)
        with suppress(lmdb.Error, OSError):
            self.commit(record)
        self.log.added(record)

    return [patch.object(Environment, "write", write), patch.object(Environment, "append", append)]


def capacity_leaked_on_failover() -> list[Any]:
    """What a leader had given away tentatively stays given away when it loses its leadership (law 8)."""
    original = Controller._on_change

    def leaky(self: Any) -> None:
        flights = self.proposer._in_flight
        tentative = flights[-1].after if flights else None
        original(self)
        if tentative is not None and self.engine.role is not Role.LEADER:
            self._state = msgspec.structs.replace(self._state, held_bytes=tentative.held_bytes)

    return [patch.object(Controller, "_on_change", leaky)]


class _Anything(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


class _NoDigest:
    def __init__(self, data: bytes = b"") -> None:
        self.update = lambda data: None

    def digest(self) -> bytes:
        return _Anything(32)


class _AnyNumber(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def digest_skipped() -> list[Any]:
    """The checksums of a snapshot are not looked at (H8)."""
    return [
        patch.object(restore_module, "sha256", _NoDigest),
        patch.object(restore_module, "frame_checksum", lambda *given: _AnyNumber()),
    ]


def base_unchecked() -> list[Any]:
    """A batch is folded whatever revision it was decided on (law 4)."""

    def fold_anyway(state: State, batch: Any) -> State | None:
        return apply_batch(state, msgspec.structs.replace(batch, base=state.revision, at=max(batch.at, state.at)))

    take = HistoryFold.take

    def take_anyway(history: HistoryFold, index: int, batch: Any) -> bool:
        if batch is not None:
            batch = msgspec.structs.replace(batch, base=history.revision, at=max(batch.at, history.at))
        return take(history, index, batch)

    return [
        patch.object(controller_module, "apply_batch", fold_anyway),
        patch.object(HistoryFold, "take", take_anyway),
    ]


def receipts_not_asked() -> list[Any]:
    """A leader decides a command again although its receipt is there (law 6)."""
    return [patch.object(Proposer, "_answered_before", lambda *given: False)]


def answered_before_commit() -> list[Any]:
    """A client has its answer when the batch is proposed, not when it is applied (law 4)."""
    original = Proposer._propose

    def hasty(self: Any, *given: Any, **named: Any) -> Any:
        proposed = original(self, *given, **named)
        if self._in_flight:
            flight = self._in_flight[-1]
            for waiter in flight.waiters:
                if not waiter.answer.done():
                    waiter.answer.set_result(
                        Settlement(waiter.revision, waiter.job, waiter.rejection, flight.after, waiter.fresh)
                    )
        return proposed

    return [patch.object(Proposer, "_propose", hasty)]


PLANTS: Final[dict[str, Plant]] = {
    plant.__name__: plant
    for plant in (
        no_sync,
        vote_not_stored,
        promised_before_sync,
        counted_before_sync,
        own_copy_counted_before_sync,
        unconditional_truncation,
        stale_answer_counted,
        grace_renewed,
        old_terms_committed,
        one_too_few,
        commit_unchecked,
        stale_snapshot_installed,
        leads_too_early,
        starts_from_an_empty_state,
        applied_twice,
        stale_read,
        minority_polls,
        receipts_dropped_at_snapshot,
        failed_sync_ignored,
        capacity_leaked_on_failover,
        digest_skipped,
        base_unchecked,
        receipts_not_asked,
        answered_before_commit,
        *PLANTS_OF_MEMBERS,
        *PLANTS_OF_SYNC_LOG,
        *PLANTS_OF_WHOLE,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have the bug of this name in the code while the block runs."""
    with ExitStack() as stack:
        for change in PLANTS[name]():
            stack.enter_context(change)
        yield
