"""What the leader knows of the agents without asking anybody to agree: contacts, progress, who waits for orders.

All of it is soft: a new leader starts without it. Silence therefore counts from the leader's own start, and from its
own last moment of attention: a leader that was stopped for a minute must not believe that everybody else was.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from cluster.server.pending import Answer, NotLeading, QueueFull
from cluster.system import Clock
from replica.messages import (
    CONTROLLER,
    Batch,
    FeatureLevelRaised,
    MarkNodeBack,
    MarkNodeDown,
    Request,
    SiteConfigured,
    TransferRecorded,
    TransferRulesSet,
    job_of,
    kind_of,
)
from replica.operations import has_shares, rules_in_force
from replica.state import State
from replica.values import Instant, Revision

LOGGER = logging.getLogger(__name__)

NODE_DOWN_S = 30.0
"""Silence after which a node is marked down, seconds: long enough for a failover and an agent's restart."""

INATTENTION_S = 5.0
"""A gap between two polls that says that this process, not the nodes, was away, seconds."""

WAIT_PARTS = 3
"""A poll is answered at the latest after this part of the silence that is tolerated: waiting must not be silence."""

POLLS_MAX = 4096
"""Polls that wait at once, count: one per node; more nodes than that poll in turns."""


class Transfer(msgspec.Struct, frozen=True):
    """How far one operation is, as its agent reported at `updated_at`."""

    job: int
    attempt: int
    node: str
    stage: str
    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int
    rate_bytes_s: float
    updated_at: Instant
    directories_done: int = 0
    retries: int = 0
    resumed_files: int = 0
    resumed_bytes: int = 0
    phase: str = ""
    file: str = ""
    waiting: bool = False


class Liveness:
    """Contacts and reported progress of the agents; meaningful on the leader only."""

    def __init__(self, clock: Clock, *, node_down_s: float = NODE_DOWN_S) -> None:
        self._clock = clock
        self._node_down_s = node_down_s
        self._since_s = clock.monotonic_s()
        self._polled_s = self._since_s
        self._contacts_s: dict[str, float] = {}
        self._progress: dict[str, tuple[Transfer, ...]] = {}

    @property
    def poll_wait_s_max(self) -> float:
        """The longest that a poll may wait, seconds."""
        return self._node_down_s / WAIT_PARTS

    def lead(self) -> None:
        """Start as a leader: nobody has been silent yet."""
        self._since_s = self._polled_s = self._clock.monotonic_s()
        self._contacts_s.clear()
        self._progress.clear()

    def heard(self, node: str) -> None:
        """Note that the node's agent has just sent something."""
        self._contacts_s[node] = self._clock.monotonic_s()

    def last_contact_s(self, node: str) -> float | None:
        """Return how long ago the node was heard of, seconds; None if never by this leader."""
        contact_s = self._contacts_s.get(node)
        return None if contact_s is None else max(0.0, self._clock.monotonic_s() - contact_s)

    def silent(self, state: State) -> list[tuple[str, float]]:
        """Return the nodes that are not down yet and were not heard of for too long, with the silence in seconds."""
        now_s = self._clock.monotonic_s()
        if now_s - self._polled_s > INATTENTION_S:
            self._since_s = now_s
        self._polled_s = now_s
        found = []
        for name, node in state.nodes.items():
            silence_s = now_s - max(self._contacts_s.get(name, self._since_s), self._since_s)
            if not node.down and silence_s > self._node_down_s:
                found.append((name, silence_s))
        for name in [name for name in self._contacts_s if name not in state.nodes]:
            del self._contacts_s[name]
        return sorted(found)

    def progressed(self, node: str, transfers: Iterable[Transfer], state: State) -> None:
        """Replace what is known of the node's operations; rows of other nodes' jobs and of old attempts are dropped."""
        kept = {row.job: row for row in transfers if _is_current(row, state)}
        if kept:
            self._progress[node] = tuple(kept[job] for job in sorted(kept))
        else:
            self._progress.pop(node, None)

    def transfers(self, state: State) -> list[Transfer]:
        """Return the operations that are still under way at `state`, by job."""
        rows = [row for rows in self._progress.values() for row in rows if _is_current(row, state)]
        return sorted(rows, key=lambda row: row.job)


def _is_current(row: Transfer, state: State) -> bool:
    job = state.jobs.get(row.job)
    return job is not None and job.node == row.node and job.attempt == row.attempt


class NodeWatch:
    """Marks down the nodes that have been silent for too long, and takes them back when they are heard of."""

    def __init__(
        self,
        liveness: Liveness,
        *,
        state: Callable[[], State],
        leads: Callable[[], bool],
        submit: Callable[[Request], Answer],
    ) -> None:
        """`submit` as `Controller.submit`."""
        self._liveness = liveness
        self._state = state
        self._leads = leads
        self._submit = submit
        self._commanded: set[str] = set()
        """Nodes about which a command is under way."""

    def heard(self, node: str) -> None:
        """Note a sign of life of a node's agent, and take the node back if it was marked down."""
        self._liveness.heard(node)
        known = self._state().nodes.get(node)
        if known is not None and known.down and self._leads():
            self._command(MarkNodeBack(node))

    def poll(self) -> None:
        """Mark down the nodes that have been silent for too long."""
        for node, silence_s in self._liveness.silent(self._state()):
            self._command(MarkNodeDown(node, f"its agent has not been heard of for {silence_s:.0f} s"))

    def stop(self) -> None:
        """Give up nothing: what was commanded is in the leader's queue."""

    def _command(self, command: MarkNodeDown | MarkNodeBack) -> None:
        if command.node in self._commanded:
            return
        try:
            answer = self._submit(Request(b"", CONTROLLER, command))
        except (QueueFull, NotLeading):
            return
        self._commanded.add(command.node)
        answer.add_done_callback(lambda done: self._note(command, done))

    def _note(self, command: MarkNodeDown | MarkNodeBack, answer: Answer) -> None:
        self._commanded.discard(command.node)
        if answer.cancelled() or answer.exception() is not None:
            return
        refusal = answer.result().refusal
        if refusal is not None:
            LOGGER.info("%s was refused: %s", kind_of(command), refusal.sentence)


_ABOUT_EVERY_NODE = frozenset((SiteConfigured, TransferRulesSet, FeatureLevelRaised))
"""Events after which every node may have other orders."""


def _shared_with(before: State, after: State) -> Iterable[str]:
    """Return the nodes whose share of a rate may have changed: those that move data, as transfers begin and end."""
    if before.moving is after.moving:
        return ()
    rules = rules_in_force(after)
    if rules is None or not has_shares(rules):
        return ()
    return [node for user, node in after.moving if node and not user]


class OrderWatch:
    """At which revision each node's orders may have changed last, and who waits to hear of it."""

    def __init__(self, revision: Revision) -> None:
        """Begin at `revision`: whoever has seen only earlier ones gets an answer at once."""
        self._floor = revision
        self._changed: dict[str, Revision] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        """Polls that wait now."""
        return len(self._waiting)

    def applied(self, before: State, batch: Batch, after: State) -> None:
        """Note whose orders the batch may have changed."""
        touched: set[str] = set()
        jobs: set[int] = set()
        for entry in batch.entries:
            for event in entry.events:
                if type(event) in _ABOUT_EVERY_NODE:
                    touched.update(after.nodes)
                jobs.add(job_of(event) or 0)  # 0 is no job's
        for former in (before.jobs, after.jobs):
            for job_id in jobs:
                job = former.get(job_id)
                if job is not None and job.node:
                    touched.add(job.node)
        touched.update(_shared_with(before, after))
        for node in touched:
            self._changed[node] = after.revision
            self._wake(node)

    def installed(self, revision: Revision) -> None:
        """Continue after an installed snapshot: anything may have changed."""
        self._floor = revision
        self._changed.clear()
        self.wake_all()

    def changed_since(self, node: str, seen: int) -> bool:
        """Whether the node's orders may differ from those at revision `seen`."""
        return self._changed.get(node, self._floor) > seen

    def wake_all(self) -> None:
        """Have every poll check again: leadership has changed, or the server stops."""
        for node in list(self._waiting):
            self._wake(node)

    async def wait(self, node: str, timeout_s: float) -> None:
        """Wait until the node's orders may have changed, a newer poll of the node comes, or `timeout_s` seconds."""
        # A node has one agent: an earlier poll that still waits belongs to a connection that is gone.
        self._wake(node)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[node] = future
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            if self._waiting.get(node) is future:
                del self._waiting[node]

    def _wake(self, node: str) -> None:
        future = self._waiting.pop(node, None)
        if future is not None and not future.done():
            future.set_result(None)


class TransferTotals:
    """Sums over receipts by (stage, outcome); every replica counts what it applies."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Transfers that ended; outcome: complete or failed."""
        self.files: Counter[str] = Counter()
        self.size_bytes: Counter[str] = Counter()
        self.resumed_bytes: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def applied(self, batch: Batch) -> None:
        """Count the receipts of a batch that was just applied."""
        for entry in batch.entries:
            for event in entry.events:
                if type(event) is TransferRecorded:
                    receipt, stage = event.receipt, event.receipt.stage.word
                    self.ended[stage, "complete" if receipt.complete else "failed"] += 1
                    self.files[stage] += receipt.files
                    self.size_bytes[stage] += receipt.size_bytes
                    self.resumed_bytes[stage] += receipt.resumed_bytes
                    self.retries[stage] += receipt.retries
                    self.left_out[stage] += receipt.left_out
