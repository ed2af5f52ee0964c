"""Comparison of the replicas' states and histories by digests. A replica that differs from the majority stops.

All replicas digest their State at the same entries: when the clock in the batches passes a whole minute, after a fixed
number of entries, and after a minute without changes. Each keeps its last few digests and requests those of its peers.
If a majority of the members agrees on another digest, this replica's state is wrong, whatever the cause (memory, disk
or program), so it stops with a message (law 10). Without a majority it logs an error and continues, because the right
state is unknown.

Ledgers are compared in the same way: at the start of a replica, up to its last applied entry, and at each checkpoint. A
history that was rewritten and rehashed while the replica was down is consistent in itself, and may lead to the same
state, so only the other replicas can detect it. Until they have confirmed its history, they do not elect this replica
(`cluster.consensus.leader_election`).

The leader records the majority's digest in the ledger (`StateDigested`), so that an old ledger can be compared with it,
and a snapshot with the ledger. A replica whose digest differs from the recorded one stops too. An idle cluster records
nothing, because each record would require another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple, NoReturn, Protocol

from forebay.cluster.server.applied_log import Transition
from forebay.cluster.server.pending import Answer, NotLeading, QueueFull
from forebay.cluster.system.eventloop import Background
from forebay.replica.messages import CONTROLLER, RecordStateDigest, Request
from forebay.replica.state import State, is_checkpoint, recorded_digests, state_digest

LOGGER = logging.getLogger(__name__)

QUIET_S = 66.0
"""Time without changes after which the last state is digested, seconds. It exceeds the minute between checkpoints, so
that the next change passes a checkpoint, and a replay of the ledger reaches this state when it reads the digest.
"""

CHECKPOINTS_KEPT = 16
"""Number of digests kept: a peer that lags by a quarter of an hour still has one in common."""

COMPARE_PERIOD_S = 5.0
"""Interval of requests until the newest digest was compared with all peers, seconds."""


class Digests(NamedTuple):
    """Digests of one replica, entry index -> hexadecimal."""

    states: Mapping[int, str]
    """Digests of the state after an entry."""
    ledgers: Mapping[int, str]
    """Digests of the ledger up to an entry."""


Ask = Callable[[str, int], Awaitable[Digests]]
"""Returns the digests of a peer, including the digest of its ledger up to the given index, or up to its last applied
entry if that is lower. Any exception means that the peer cannot be asked.
"""


class Chain(Protocol):
    """Digests of a ledger: `wal.Journal`."""

    @property
    def applied_index(self) -> int: ...
    def digest_at(self, index: int) -> bytes | None: ...


class StateDiverged(Exception):
    """The state or the ledger of this replica differs from the majority's."""


class Verdict(Enum):
    """Result of one checkpoint for this replica."""

    AGREES = "agrees"
    """A majority, this replica included, has the same digest."""
    UNDECIDED = "undecided"
    """Too few replies, and no contradiction."""
    DISPUTED = "disputed"
    """A peer has another digest, and no majority is known."""
    ODD = "odd"
    """A majority agrees on another digest."""


def judge(mine: str, theirs: Mapping[str, str], members: int) -> Verdict:
    """Return the verdict of a checkpoint; `theirs` are the digests of peers for the same entry."""
    majority = members // 2 + 1
    votes = Counter(theirs.values())
    if votes[mine] + 1 >= majority:
        return Verdict.AGREES
    if any(count >= majority for digest, count in votes.items() if digest != mine):
        return Verdict.ODD
    return Verdict.DISPUTED if set(votes) - {mine} else Verdict.UNDECIDED


class _Pending(NamedTuple):
    """State after an entry that will be digested."""

    entry_index: int
    state: State
    changed: int
    """Last revision up to this state that did more than record a digest."""


class _Digested(NamedTuple):
    revision: int
    changed: int


class _Recorded(NamedTuple):
    entry_index: int
    digest: str


class Checkpoints(Background):
    """Digests of one replica, and their comparison with those of its peers."""

    def __init__(
        self,
        name: str,
        peers: Callable[[], tuple[str, ...]],
        ask: Ask,
        fail: Callable[[BaseException], NoReturn],
        *,
        chain: Chain,
    ):
        """Initialize. `peers` returns the other members; `fail` stops the replica; `chain` is its own ledger."""
        super().__init__(fail)
        self._name = name
        self._peers = peers
        self._ask = ask
        self._digests: dict[int, str] = {}
        self._digested: dict[int, _Digested] = {}
        """Entry index -> revisions of the digested state."""
        self._agreed = 0
        """Last entry at which a majority had this state."""
        self._recorded: dict[int, _Recorded] = {}
        """Revision -> digest that the ledger records for the state after it; the last CHECKPOINTS_KEPT."""
        self._changed = 0
        self._undigested: _Pending | None = None
        """Last changed state that is not digested yet, unless it was a checkpoint."""
        self._quiet: asyncio.TimerHandle | None = None
        self._pending: deque[_Pending] = deque()
        self._woken = asyncio.Event()
        self._compared = 0
        self._chain = chain
        self._ledger_index = chain.applied_index
        """Entry up to which ledgers are compared next."""
        self._is_ledger_compared = not self._ledger_index
        """True if every peer has answered for `_ledger_index`."""
        self._of_states = self._of_ledgers = Verdict.UNDECIDED
        self._woken.set()  # compare the initial state at once

    @property
    def verdict(self) -> Verdict:
        """Verdict of the last comparison of states; DISPUTED if a ledger is disputed."""
        return Verdict.DISPUTED if self._of_ledgers is Verdict.DISPUTED else self._of_states

    @property
    def digests(self) -> Mapping[int, str]:
        """Entry index -> digest of the state after it, hexadecimal; the last CHECKPOINTS_KEPT."""
        return self._digests

    @property
    def unrecorded(self) -> RecordStateDigest | None:
        """Return the newest digest of a majority, if the state changed since the last record; else None."""
        digested = self._digested.get(self._agreed)
        if digested is None or digested.changed <= max(self._recorded, default=0):
            return None
        return RecordStateDigest(digested.revision, bytes.fromhex(self._digests[self._agreed]))

    async def stop(self) -> None:
        """Cancel the comparison, and wait for its end."""
        if self._quiet is not None:
            self._quiet.cancel()
        await super().stop()

    def applied(self, transition: Transition) -> None:
        """Handle an applied entry. At a checkpoint, the state is digested in the background.

        Does not return if the entry records another digest than this replica's.
        """
        index, before = transition.entry.index, transition.before
        after, batch = transition.after, transition.batch
        records = 0
        for recorded in () if batch is None else recorded_digests(batch):
            records += 1
            self._recorded[recorded.revision] = _Recorded(index, recorded.state.hex())
            while len(self._recorded) > CHECKPOINTS_KEPT:
                del self._recorded[min(self._recorded)]
            self._check_recorded(recorded.revision)
        changes = after.revision - before.revision > records
        if changes:
            self._changed = after.revision
        # A record alone makes no checkpoint: an idle cluster would endlessly digest digests.
        if (changes or not records) and is_checkpoint(index, before.at, after.at):
            # Keeping a State costs nothing. If digesting is slower than applying for a long time, the newest states are
            # skipped here, and are not compared with the peers' digests.
            if len(self._pending) < CHECKPOINTS_KEPT:
                self._pending.append(_Pending(index, after, self._changed))
            self._undigested = None
            self._woken.set()
        elif changes or (records and self._undigested is not None):
            # Keep the very last state, even after a record of an earlier state, because later changes follow it.
            self._undigested = _Pending(index, after, self._changed)
            if self._quiet is None:
                self._await_quiet(self._undigested)

    def _await_quiet(self, last: _Pending) -> None:
        """Digest the last state if it is still the last one after QUIET_S."""

        def passed() -> None:
            self._quiet = None
            if self._undigested is last:
                self._undigested = None
                self._pending.append(last)
                self._woken.set()
            elif self._undigested is not None:
                self._await_quiet(self._undigested)

        self._quiet = asyncio.get_running_loop().call_later(QUIET_S, passed)

    def _check_recorded(self, revision: int) -> None:
        """Compare the digest of a state with the recorded digest, if both are known. Does not return if they differ."""
        recorded = self._recorded.get(revision)
        index = next((index for index, one in self._digested.items() if one.revision == revision), None)
        if recorded is None or index is None or self._digests[index] == recorded.digest:
            return
        self._fail(
            StateDiverged(
                f"the state of {self._name} after revision {revision} has digest {self._digests[index][:16]}; the "
                f"majority had another, which entry {recorded.entry_index} records ({recorded.digest[:16]}); keep its "
                "directory for an examination, and bring the replica back with `forebay cluster replace`"
            )
        )

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._pending:
                pending = self._pending.popleft()
                # In a thread: a large state takes longer than a heartbeat, and a State never changes.
                digest = await asyncio.to_thread(state_digest, pending.state)
                self._digests[pending.entry_index] = digest.hex()
                self._digested[pending.entry_index] = _Digested(pending.state.revision, pending.changed)
                self._ledger_index, self._is_ledger_compared = pending.entry_index, False
                while len(self._digests) > CHECKPOINTS_KEPT:
                    self._digested.pop(oldest := min(self._digests), None)
                    del self._digests[oldest]
                self._check_recorded(pending.state.revision)
            while self._is_unfinished and not self._pending:
                await self._compare()
                if self._is_unfinished:
                    await asyncio.sleep(COMPARE_PERIOD_S)

    @property
    def _is_unfinished(self) -> bool:
        """Return whether a digest was not compared with all peers."""
        return self._compared < max(self._digests, default=0) or not self._is_ledger_compared

    async def _compare(self) -> None:
        """Request the digests of every peer, and judge the common ones."""
        peers, index = self._peers(), self._ledger_index
        answers = await self._answers(peers, index)
        self._compare_states(peers, {peer: answer.states for peer, answer in answers.items()})
        await self._compare_ledgers(peers, index, {peer: answer.ledgers for peer, answer in answers.items()})

    async def _answers(self, peers: tuple[str, ...], index: int) -> dict[str, Digests]:
        answers = await asyncio.gather(*(self._ask(peer, index) for peer in peers), return_exceptions=True)
        return {peer: answer for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, Digests)}

    async def _compare_ledgers(self, peers: tuple[str, ...], index: int, theirs: dict[str, Mapping[int, str]]) -> None:
        """Judge the ledgers up to `index`, or up to the entries that the peers have."""
        if not index:
            return
        verdict = self._judged_ledgers(theirs, len(peers) + 1)
        if verdict is Verdict.DISPUTED and len(theirs) > 1:
            # Lagging peers may name different entries. Ask again for the first of these, which all peers have.
            first = min(max(digests, default=index) for digests in theirs.values())
            answers = await self._answers(peers, first)
            self._judged_ledgers({peer: answer.ledgers for peer, answer in answers.items()}, len(peers) + 1)
        self._of_ledgers = verdict
        if index == self._ledger_index:
            self._is_ledger_compared = all(index in theirs.get(peer, ()) for peer in peers)

    def _judged_ledgers(self, theirs: Mapping[str, Mapping[int, str]], members: int) -> Verdict:
        """Return the verdict on the ledgers at the first entry where they differ.

        Does not return if this replica's ledger differs from the majority's.
        """
        verdict = Verdict.UNDECIDED
        for index in sorted({index for digests in theirs.values() for index in digests}):
            digest = self._chain.digest_at(index)
            if digest is None:
                continue
            mine, of_index = digest.hex(), _of_index(theirs, index)
            found = judge(mine, of_index, members)
            others = ", ".join(f"{peer} {other[:16]}" for peer, other in sorted(of_index.items()))
            if found is Verdict.ODD:
                self._fail(
                    StateDiverged(
                        f"the ledger of {self._name} up to entry {index} has digest {mine[:16]}; the majority has "
                        f"another ({others}): its history was altered; keep its directory for an examination, and "
                        "bring the replica back with `forebay cluster replace`"
                    )
                )
            if found is Verdict.DISPUTED:
                LOGGER.error(
                    "ledgers differ up to entry %d and no majority agrees: %s %s, %s; one of them was altered",
                    index,
                    self._name,
                    mine[:16],
                    others,
                )
                return found
            if found is Verdict.AGREES:
                verdict = found
        return verdict

    def _compare_states(self, peers: tuple[str, ...], theirs: dict[str, Mapping[int, str]]) -> None:
        """Judge every checkpoint in common with a peer.

        The newest one is not enough: if a peer constantly lags by a checkpoint, only the previous one has a majority.
        """
        common = sorted(index for index in self._digests if any(index in digests for digests in theirs.values()))
        if not common:
            if not peers:
                self._compared = self._agreed = max(self._digests, default=0)
            return
        verdict, decided = Verdict.UNDECIDED, common[-1]
        for index in common:
            found = self._judged(index, theirs, len(peers) + 1)
            if found is not Verdict.UNDECIDED:
                verdict, decided = found, index
            if found is Verdict.AGREES:
                self._agreed = index
        self._of_states = verdict
        if verdict is Verdict.DISPUTED:
            mine = self._digests[decided]
            LOGGER.error(
                "states differ after entry %d and no majority agrees: %s %s, %s",
                decided,
                self._name,
                mine,
                _of_index(theirs, decided),
            )
        newest = common[-1]
        if newest == max(self._digests) and all(newest in theirs.get(peer, ()) for peer in peers):
            self._compared = newest

    def _judged(self, index: int, theirs: Mapping[str, Mapping[int, str]], members: int) -> Verdict:
        """Return the verdict of one checkpoint; does not return if the majority has another state."""
        mine, of_index = self._digests[index], _of_index(theirs, index)
        verdict = judge(mine, of_index, members)
        if verdict is Verdict.ODD:
            others = ", ".join(f"{peer} {digest[:16]}" for peer, digest in sorted(of_index.items()))
            self._fail(
                StateDiverged(
                    f"the state of {self._name} after entry {index} has digest {mine[:16]}; the majority has another "
                    f"({others}); keep its directory for an examination, and bring the replica back with `forebay "
                    "cluster replace`"
                )
            )
        return verdict


def _of_index(theirs: Mapping[str, Mapping[int, str]], index: int) -> dict[str, str]:
    return {peer: digests[index] for peer, digests in theirs.items() if index in digests}


class DigestRecorder:
    """Leader's duty to record each majority digest in the ledger once."""

    def __init__(self, checkpoints: Checkpoints, *, submit: Callable[[Request], Answer]) -> None:
        """Initialize. `submit` is `Controller.submit`."""
        self._checkpoints = checkpoints
        self._submit = submit
        self._answer: Answer | None = None

    def poll(self) -> None:
        """Record the newest digest if the state has changed since the last record and none is pending."""
        unrecorded = self._checkpoints.unrecorded
        if unrecorded is not None and (self._answer is None or self._answer.done()):
            with suppress(QueueFull, NotLeading):
                self._answer = self._submit(Request(b"", CONTROLLER, unrecorded))
                # After a failure the next leader makes its own record.
                self._answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())

    def stop(self) -> None:
        """Drop the pending record, because the next leader makes its own."""
        self._answer = None
