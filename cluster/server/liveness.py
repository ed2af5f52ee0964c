"""Unreplicated knowledge about agents: contacts, progress, and polls that wait for orders.

Any replica answers polls from its own state, once the state is proven to be current. The request for that proof carries
the agents' reports to the leader. All of this is soft state: a new leader starts without it. A node's silence therefore
counts from the latest of these times: its last report, the leader's start, the end of the leader's last pause (so that
the leader does not blame nodes for its own pause), and the loss of the follower that relayed the node's reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from typing import Protocol

import msgspec

from forebay.cluster.consensus import Engine, NotLeader, Peer, Role
from forebay.cluster.schemas import OperationProgress
from forebay.cluster.server.applied_log import Transition
from forebay.cluster.server.pending import Answer, NotLeading, QueueFull
from forebay.cluster.system import Clock
from forebay.replica.messages import (
    CONTROLLER,
    AbandonedBufferRemoved,
    BufferAbandoned,
    FeatureLevelRaised,
    MarkNodeBack,
    MarkNodeDown,
    Request,
    SiteConfigured,
    TransferRulesSet,
    job_of,
    kind_of,
)
from forebay.replica.operations import active_rules, has_shares
from forebay.replica.state import State
from forebay.replica.values import Instant, Revision

LOGGER = logging.getLogger(__name__)

NODE_DOWN_S = 30.0
"""Silence after which a node is marked down, seconds: long enough for a failover and an agent's restart."""

INATTENTION_S = 5.0
"""Gap between two checks above which this process itself was inactive, seconds."""

AWAY_S = 2.0
"""Silence of a replica after which its agents are assumed to look for another replica, seconds: some elections."""

WAIT_PARTS = 3
WAIT_PARTS_MAX = 2
"""Maximum wait of a poll, in thirds of the tolerated silence: one third normally, two thirds if many polls wait."""

POLLS_PER_S = 150
"""Rate above which polls wait longer, counting only polls that are renewed because their wait ended. Each costs about
0.9 ms of processor time, so this rate takes an eighth of a core.
"""

SPREAD_S_PER_POLL = 0.0015
SPREAD_S_MAX = 6.0
"""Period over which agents of a lost replica look for another one, seconds: for each waiting agent, and the maximum. A
handshake takes a replica at least 1 ms. With few nodes the period is negligible.
"""

POLLS_MAX = 8192
"""Maximum number of waiting polls: one per node, so 10,000 nodes on two of three replicas fit."""

ROUND_S = 0.02
"""Interval between two proofs, seconds. Each proof serves all polls that arrived meanwhile, so there are at most fifty
a second for any number of agents. The first proof after a pause is immediate.
"""

NEWS_S = 1.0
"""Maximum delay of an agent's report at a follower, seconds: negligible beside 30 s of silence."""

NEWS_BYTES = 64 * 1024
"""Maximum size of the reports that a follower relays in one frame: about 1,000 nodes, a few milliseconds for the
leader.

A report that does not fit loses progress rows.
"""

PROVE_S_MAX = 4.0
"""Time limit of a proof, seconds: a few elections, and less than an agent waits for one replica."""

ASK_AGAIN_S = 0.05
"""Interval of repeated proofs, seconds."""

LEADERLESS_S = 3.0
"""Time without a leader after which polls are woken, so that agents try other replicas: elections take less."""


class Transfer(msgspec.Struct, frozen=True):
    """Progress of one operation, as reported by its agent at `updated_at`."""

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


class AgentContacts(Protocol):
    """Contacts and reported progress of the agents, for display."""

    def last_contact_s(self, node: str) -> float | None:
        """Return the seconds since the node's last contact; None if there has been none."""
        ...

    def transfers(self, state: State) -> list[Transfer]:
        """Return the operations that are still under way at `state`, by job."""
        ...


class AgentReports(msgspec.Struct, frozen=True, array_like=True):
    """Contacts and reported progress of the agents at one time, for another process."""

    contacts_s: dict[str, float] = {}
    """Time since the last contact of each node, seconds."""
    progress: tuple[Transfer, ...] = ()

    def last_contact_s(self, node: str) -> float | None:
        """Return the seconds since the node's last contact; None if there has been none."""
        return self.contacts_s.get(node)

    def transfers(self, state: State) -> list[Transfer]:
        """Return the operations that are still under way at `state`, by job."""
        return sorted((row for row in self.progress if _is_current(row, state)), key=lambda row: row.job)


class Liveness:
    """Contacts and reported progress of the agents; valid on the leader only."""

    def __init__(self, clock: Clock, *, node_down_s: float = NODE_DOWN_S) -> None:
        self._clock = clock
        self._node_down_s = node_down_s
        self._since_s = clock.monotonic_s()
        self._polled_s = self._since_s
        self._contacts_s: dict[str, float] = {}
        self._through: dict[str, str] = {}
        """Follower that last relayed a node's report; empty for direct reports."""
        self._away_s: dict[str, float] = {}
        """Time at which a follower was last found absent, by name."""
        self._progress: dict[str, tuple[Transfer, ...]] = {}

    def poll_wait_s_max(self, polls: int) -> float:
        """Return the maximum wait of a poll if `polls` are waiting at this replica, seconds."""
        least_s, most_s = self._node_down_s / WAIT_PARTS, self._node_down_s * WAIT_PARTS_MAX / WAIT_PARTS
        return min(max(least_s, polls / POLLS_PER_S), most_s)

    def lead(self) -> None:
        """Reset at the start of a leadership: no node has been silent yet."""
        self._since_s = self._polled_s = self._clock.monotonic_s()
        self._contacts_s.clear()
        self._through.clear()
        self._away_s.clear()
        self._progress.clear()

    def heard(self, node: str, through: str = "") -> None:
        """Record a report of the node's agent. `through` is the follower that relayed it, if any."""
        self._contacts_s[node] = self._clock.monotonic_s()
        if through:
            self._through[node] = through
        else:
            self._through.pop(node, None)

    def away(self, replica: str) -> None:
        """Record that a follower has disappeared: its agents need time to find another replica."""
        self._away_s[replica] = self._clock.monotonic_s()

    def last_contact_s(self, node: str) -> float | None:
        """Return the seconds since the node's last contact; None if this leader has had none."""
        contact_s = self._contacts_s.get(node)
        return None if contact_s is None else max(0.0, self._clock.monotonic_s() - contact_s)

    def silent(self, state: State) -> list[tuple[str, float]]:
        """Return the nodes that are not down yet and have been silent for too long, with the silence in seconds."""
        now_s = self._clock.monotonic_s()
        if now_s - self._polled_s > INATTENTION_S:
            self._since_s = now_s
        self._polled_s = now_s
        found = []
        for name, node in state.nodes.items():
            heard_s = max(self._contacts_s.get(name, self._since_s), self._since_s)
            silence_s = now_s - max(heard_s, self._away_s.get(self._through.get(name, ""), heard_s))
            if not node.down and silence_s > self._node_down_s:
                found.append((name, silence_s))
        for name in [name for name in self._contacts_s if name not in state.nodes]:
            del self._contacts_s[name]
            self._through.pop(name, None)
        return sorted(found)

    def progressed(self, node: str, transfers: Iterable[Transfer], state: State) -> None:
        """Replace the progress of the node's operations. Drop rows of other nodes' jobs and of old attempts."""
        kept = {row.job: row for row in transfers if row.node == node and _is_current(row, state)}
        if kept:
            self._progress[node] = tuple(kept[job] for job in sorted(kept))
        else:
            self._progress.pop(node, None)

    def transfers(self, state: State) -> list[Transfer]:
        """Return the operations that are still under way at `state`, by job."""
        return self.reports(contacts=False).transfers(state)

    def reports(self, *, contacts: bool = True, progress: bool = True) -> AgentReports:
        """Return the contacts, the progress, or both, as they are now."""
        now_s = self._clock.monotonic_s()
        return AgentReports(
            {node: max(0.0, now_s - at_s) for node, at_s in self._contacts_s.items()} if contacts else {},
            tuple(chain.from_iterable(self._progress.values())) if progress else (),
        )


def _is_current(row: Transfer, state: State) -> bool:
    job = state.jobs.get(row.job)
    return job is not None and row.node in (job.node, job.mover) and job.attempt == row.attempt


class NodeWatch:
    """Marks silent nodes as down, and marks them as up again on contact."""

    def __init__(
        self,
        liveness: Liveness,
        *,
        state: Callable[[], State],
        leads: Callable[[], bool],
        submit: Callable[[Request], Answer],
        peers: Callable[[], Sequence[Peer]] = tuple,
    ) -> None:
        """Initialize. `submit` is `Controller.submit`; `peers` returns the status of the peers."""
        self._peers = peers
        self._present: set[str] = set()
        """Followers present at the last check."""
        self._liveness = liveness
        self._state = state
        self._leads = leads
        self._submit = submit
        self._commanded: set[str] = set()
        """Nodes with a pending command."""

    def heard(self, node: str, through: str = "") -> None:
        """Record a contact as `Liveness.heard` does. If the node is marked as down, mark it as up."""
        self._liveness.heard(node, through)
        known = self._state().nodes.get(node)
        if known is not None and known.down and self._leads():
            self._command(MarkNodeBack(node))

    def poll(self) -> None:
        """Mark nodes as down that have been silent for too long."""
        present = {
            peer.name
            for peer in self._peers()
            if peer.connected and peer.last_contact_s is not None and peer.last_contact_s < AWAY_S
        }
        for replica in sorted(self._present - present):
            self._liveness.away(replica)
        self._present = present
        for node, silence_s in self._liveness.silent(self._state()):
            self._command(MarkNodeDown(node, f"its agent has not been heard of for {silence_s:.0f} s"))

    def stop(self) -> None:
        """Do nothing: pending commands are already in the leader's queue."""

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
        rejection = answer.result().rejection
        if rejection is not None:
            LOGGER.info("%s was rejected: %s", kind_of(command), rejection.sentence)


_ABOUT_EVERY_NODE = frozenset((SiteConfigured, TransferRulesSet, FeatureLevelRaised))
"""Events after which every node's orders may differ."""


def _shared_with(before: State, after: State) -> Iterable[str]:
    """Return the nodes whose share of a rate limit may have changed, because a transfer began or ended."""
    if before.moving is after.moving:
        return ()
    rules = active_rules(after)
    if rules is None or not has_shares(rules):
        return ()
    return [node for user, node in after.moving if node and not user]


class OrderWatch:
    """Last possible change of each node's orders, and the polls that wait for a later change."""

    def __init__(self, revision: Revision) -> None:
        """Start at `revision`. Polls that have seen only earlier revisions are answered at once."""
        self._floor = revision
        self._changed: dict[str, Revision] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        """Number of waiting polls."""
        return len(self._waiting)

    def applied(self, transition: Transition) -> None:
        """Record the nodes whose orders the entry may have changed."""
        before, after, batch = transition.before, transition.after, transition.batch
        if batch is None:
            return
        touched: set[str] = set()
        jobs: set[int] = set()
        for entry in batch.entries:
            for event in entry.events:
                if type(event) in _ABOUT_EVERY_NODE:
                    touched.update(after.nodes)
                elif isinstance(event, BufferAbandoned | AbandonedBufferRemoved):
                    touched.add(event.node)
                jobs.add(job_of(event) or 0)  # 0 belongs to no job
        for former in (before.jobs, after.jobs):
            for job_id in jobs:
                job = former.get(job_id)
                if job is not None:
                    touched.update(name for name in (job.node, job.mover) if name)
        touched.update(_shared_with(before, after))
        for node in touched:
            self._changed[node] = after.revision
            self._wake(node)

    def installed(self, revision: Revision) -> None:
        """Continue after an installed snapshot: all orders may have changed."""
        self._floor = revision
        self._changed.clear()
        self.wake_all()

    def changed_since(self, node: str, seen: int) -> bool:
        """Return whether the node's orders may differ from those at revision `seen`."""
        return self._changed.get(node, self._floor) > seen

    def wake_all(self) -> None:
        """Wake every poll to check again, after a change of leadership or when the server stops."""
        for node in list(self._waiting):
            self._wake(node)

    async def wait(self, node: str, timeout_s: float) -> None:
        """Wait until the node's orders may have changed or the node polls again, at most `timeout_s` seconds."""
        # A node has one agent: an earlier waiting poll belongs to a lost connection.
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


class AgentReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Agent's report in a poll: its instance, and the progress of its operations."""

    node: str
    instance: str
    progress: tuple[OperationProgress, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[AgentReport])


def _row(said: AgentReport) -> msgspec.Raw:
    """Encode a report to relay. Progress rows that do not fit are dropped."""
    progress = said.progress
    while len(data := _ENCODER.encode(AgentReport(said.node, said.instance, progress))) > NEWS_BYTES and progress:
        progress = progress[: len(progress) // 2]
    return msgspec.Raw(data)


def read_news(news: bytes) -> list[AgentReport]:
    """Decode the reports relayed by a follower.

    Raises:
        ValueError: The reports are malformed.
    """
    try:
        return _DECODER.decode(news)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


class PollRounds:
    """Proofs that this replica may answer polls: one proof that its state is current serves all waiting polls.

    On the leader, a majority confirms its leadership. A follower gets from the leader the entry that it must have
    applied, after a majority has confirmed the leader. The follower's request carries the agents' reports, so the
    leader has an agent's report before the agent's poll is answered. (An agent that got an answer relies on not being
    marked as down soon.)
    """

    def __init__(
        self,
        *,
        engine: Engine,
        current: Callable[[], Awaitable[object]],
        wait_applied: Callable[[int], Awaitable[None]],
        hear: Callable[[AgentReport], None],
    ) -> None:
        """Initialize. On a leader, `current` is `Controller.current`, and `hear` receives each agent's report."""
        self._engine = engine
        self._current = current
        self._wait_applied = wait_applied
        self._hear = hear
        self._said: dict[str, msgspec.Raw] = {}
        """Reports not sent to the leader yet, by node; oldest first."""
        self._asked: list[tuple[str, asyncio.Future[None]]] = []
        """Polls waiting for a proof, by node."""
        self._soon: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.rounds = 0

    def stop(self) -> None:
        """Stop proving."""
        self._stopped = True
        if self._soon is not None:
            self._soon.cancel()
        if self._task is not None:
            self._task.cancel()
        self._end(self._asked, NotLeading(None))
        self._asked = []

    def note(self, said: AgentReport) -> None:
        """Send a waiting agent's report to the leader within NEWS_S."""
        if self._leads:
            self._hear(said)
            return
        self._said[said.node] = _row(said)
        if self._soon is None and not self._stopped:
            self._soon = asyncio.get_running_loop().call_later(NEWS_S, self._run)

    async def prove(self, node: str, said: AgentReport | None) -> None:
        """Wait until this replica's state is proven to be no older than this call, and the leader has the report.

        On a leader, also raises the exceptions of `current`.

        Raises:
            NotLeading: There was no proof within PROVE_S_MAX.
        """
        if self._stopped:
            raise NotLeading(None)
        if said is not None:
            if self._leads:
                self._hear(said)
            else:
                self._said[node] = _row(said)
        proof: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append((node, proof))
        self._run()
        await proof

    @property
    def _leads(self) -> bool:
        return self._engine.role is Role.LEADER

    def _run(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._task is None and not self._stopped:
            self._task = asyncio.get_running_loop().create_task(self._go_on())

    async def _go_on(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._asked or self._said:
                next_s = loop.time() + ROUND_S
                rows, asked = self._take()
                try:
                    await self._round(rows)
                except Exception as error:
                    self._said = {**rows, **self._said}
                    self._end(asked, error)
                    if not self._asked:
                        # The reports wait for the next request.
                        break
                else:
                    self._end(asked, None)
                await asyncio.sleep(max(0.0, next_s - loop.time()))
        finally:
            self._task = None

    def _take(self) -> tuple[dict[str, msgspec.Raw], list[tuple[str, asyncio.Future[None]]]]:
        """Take the content of one round: as many reports as fit, and the polls whose reports are included."""
        rows: dict[str, msgspec.Raw] = {}
        size_bytes = 0
        for node, row in self._said.items():
            size_bytes += len(bytes(row))
            if rows and size_bytes > NEWS_BYTES:
                break
            rows[node] = row
        for node in rows:
            del self._said[node]
        asked = [one for one in self._asked if one[0] not in self._said]
        self._asked = [one for one in self._asked if one[0] in self._said]
        return rows, asked

    async def _round(self, rows: dict[str, msgspec.Raw]) -> None:
        self.rounds += 1
        news = _ENCODER.encode(list(rows.values())) if rows else b""
        try:
            async with asyncio.timeout(PROVE_S_MAX):
                while True:
                    try:
                        await self._proof(news)
                        return
                    except (NotLeader, NotLeading):
                        await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError as error:
            raise NotLeading(self._engine.leader) from error

    async def _proof(self, news: bytes) -> None:
        if self._leads:
            for said in read_news(news) if news else ():
                self._hear(said)
            await self._current()
        else:
            await self._wait_applied(await self._engine.read_index(news))

    @staticmethod
    def _end(asked: Iterable[tuple[str, asyncio.Future[None]]], error: Exception | None) -> None:
        for _, proof in asked:
            if proof.done():
                continue
            if error is None:
                proof.set_result(None)
            else:
                proof.set_exception(error)


EXTERNAL_JOB_POLLS_MAX = 4096
EXTERNAL_JOB_POLLS_PER_SCHEDULER_MAX = 2048
"""Maximum number of waiting requests about external jobs: in total, and of one scheduler; others retry later."""


class ExternalJobWatch:
    """Requests waiting for the progress of an external job."""

    def __init__(self) -> None:
        """Start without requests."""
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._of: Counter[str] = Counter()

    def has_room(self, scheduler: str) -> bool:
        """Return whether one more request of the scheduler may wait."""
        return self._of.total() < EXTERNAL_JOB_POLLS_MAX and self._of[scheduler] < EXTERNAL_JOB_POLLS_PER_SCHEDULER_MAX

    def applied(self, transition: Transition) -> None:
        """Wake requests for external jobs in the entry."""
        if not self._waiting or transition.batch is None:
            return
        for entry in transition.batch.entries:
            for event in entry.events:
                job = transition.after.jobs.get(job_of(event) or 0)
                if job is not None and job.external_job is not None:
                    self._wake(job.external_job.name)

    def wake_all(self) -> None:
        """Wake all requests, after a change of leadership, a snapshot, or when the server stops."""
        for name in list(self._waiting):
            self._wake(name)

    async def wait(self, scheduler: str, name: str, timeout_s: float) -> None:
        """Wait until the external job may have changed, or `timeout_s` seconds."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(future)
        self._of[scheduler] += 1
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            self._of[scheduler] -= 1
            if not self._of[scheduler]:
                del self._of[scheduler]
            others = self._waiting.get(name)
            if others is not None:
                others.discard(future)
                if not others:
                    del self._waiting[name]

    def _wake(self, name: str) -> None:
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(None)
