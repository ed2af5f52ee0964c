"""Controller of one replica: its state and everything that may change it, in one asyncio loop.

Lifecycle: `open_storage` rebuilds the state from snapshot and ledger. `start` joins consensus. Consensus passes each
committed entry to `apply`, once and in order. `stop` leaves consensus. For consensus, the controller is the machine.
For the API, it provides the state, a proof that the state is current, and the settling of commands.

Steps for an entry: decode, check the base and apply (`apply_batch`), chain (`record_applied`), replace the State,
notify waiters. None of these steps may fail for an entry of a correct leader; a failure stops the replica (law 10).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

from forebay.cluster.config import Config
from forebay.cluster.consensus import HELD_BACK_ENTRIES, Engine, Machine, NotLeader, Role, SnapshotRef, SnapshotSink
from forebay.cluster.schemas import made_of
from forebay.cluster.server.agreed_time import AgreedTime, ClockWatch
from forebay.cluster.server.applied_log import (
    AppliedEntry,
    AppliedLog,
    Observer,
    Transition,
    read_batch,
    read_configuration,
)
from forebay.cluster.server.bootstrap import Bootstrap
from forebay.cluster.server.disk_watch import DiskWatch, Room, room_of
from forebay.cluster.server.divergence import Checkpoints, DigestRecorder
from forebay.cluster.server.duties import AnswerExpiry, Duties, Duty
from forebay.cluster.server.feature_levels import Ask, FeatureLevels, never_ask
from forebay.cluster.server.history_fetch import ScrubResults
from forebay.cluster.server.liveness import (
    LEADERLESS_S,
    NODE_DOWN_S,
    AgentReport,
    ExternalJobWatch,
    Liveness,
    NodeWatch,
    OrderWatch,
    PollRounds,
    Transfer,
    read_news,
)
from forebay.cluster.server.membership import Membership
from forebay.cluster.server.operation_restart import OperationRestart
from forebay.cluster.server.pending import (
    STEPS_PER_TURN,
    STORED_BYTES_PER_BYTE,
    Answer,
    Asker,
    NotLeading,
    steps_of_events,
)
from forebay.cluster.server.proposer import Proposer
from forebay.cluster.server.pruning import PruneNote
from forebay.cluster.server.snapshots import SnapshotInstall, call_soon
from forebay.cluster.server.storage import Storage
from forebay.cluster.server.totals import JobTotals, TransferTotals
from forebay.cluster.system import Clock, about
from forebay.replica.fold import apply_batch, apply_batch_steps
from forebay.replica.messages import Batch, FoundCluster, Request
from forebay.replica.state import State
from forebay.replica.values import StepRunner
from forebay.snapshots import Image, SnapshotStore
from forebay.wal import (
    BrokenInvariant,
    ConfigurationAt,
    Entry,
    Gap,
    HistoryEntry,
    Incarnation,
    StorageFailed,
    authorise,
    fill,
    prune_some,
    replace_damaged,
)

LOGGER = logging.getLogger(__name__)

READ_WAIT_S = 4.0
"""Maximum duration of a linearizable read, seconds: a few elections, and less than a client waits for one replica."""

READY_POLL_S = 0.02
"""Polling interval of a read for a new leader's readiness, seconds."""

COMPACTION_MARGIN_ENTRIES = 1024
COMPACTION_MARGIN_PERIODS = 2
"""Number of entries before a snapshot that consensus keeps, in snapshot periods. A replica that was absent for less
time needs no snapshot, and after a snapshot a new leader also has the following entries. At most HELD_BACK_ENTRIES,
because a start reads all of them.
"""

EngineFactory = Callable[[Machine, Callable[[], None], Callable[[BaseException], NoReturn]], Engine]
"""Creates this replica's consensus: (machine, on_change, fail) -> engine."""


class Unavailable(Exception):
    """This replica could not prove in time that its state is current. Retry, here or at another replica."""


class Controller:
    """State of a replica and everything that may change it. Runs in the event loop's thread."""

    def __init__(
        self,
        *,
        name: str,
        config: Config,
        storage: Storage,
        make_engine: EngineFactory,
        clock: Clock,
        fail: Callable[[BaseException], NoReturn],
        node_down_s: float = NODE_DOWN_S,
        ask: Ask = never_ask,
        version: str = "",
        checkpoints: Checkpoints | None = None,
        raises_level: bool = True,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """Take over the opened storage. `fail` must end the process (in tests, the test).

        `ask` returns the status of a peer, `version` is this release's. `checkpoints` compares states with the peers';
        None for a replica without peers. `raises_level` and `draw` are passed to `Bootstrap`.
        """
        self.name = name
        self.config = config
        self.clock = clock
        self.journal = storage.journal
        self.ledger = storage.ledger
        self.snapshots: SnapshotStore = storage.snapshots
        self._storage = storage
        self._fail = fail
        self._state = storage.state
        self._index = storage.index
        self._term = storage.journal.term_of(storage.index) or 0
        self._digest = storage.journal.applied_digest
        self._placed = storage.configuration
        """Membership after the last applied entry."""
        self.applied_log = AppliedLog(
            storage.journal, storage.ledger, index=storage.index, revision=storage.state.revision
        )
        self.liveness = Liveness(clock, node_down_s=node_down_s)
        self.orders = OrderWatch(storage.state.revision)
        self.external_jobs = ExternalJobWatch()
        self.transfer_totals = TransferTotals()
        self.job_totals = JobTotals(clock.now())
        self.engine = make_engine(self, self._on_change, fail)
        self.polls = PollRounds(
            engine=self.engine, current=self.current, wait_applied=self.wait_applied, hear=self._heard
        )
        self._led_s = clock.monotonic_s()
        """Time at which a leader was last known."""
        self.levels = FeatureLevels(name, self.engine, ask=ask, version=version)
        self.membership = Membership(
            name, config, self.engine, leads=lambda: self.leads, wait_applied=self.wait_applied
        )
        self.agreed = AgreedTime(clock, bounds=lambda: self.engine.clock_bounds, at=storage.state.at)
        self.clock_watch = ClockWatch(name, self.engine, self.agreed)
        self.disk_watch = DiskWatch(
            self.engine, measure=self.measure_room, map_size_bytes=config.storage.map_size_bytes, ask=ask, clock=clock
        )
        self.proposer = Proposer(
            engine=self.engine, applied=lambda: self._state, fill_with=self.fill_with, clock=self.agreed, fail=fail
        )
        self._folding: tuple[Batch, StepRunner[State | None]] | None = None
        """Batch of the next entry while it is folded over several turns of the loop."""
        self._appliers: list[tuple[int, asyncio.Future[None]]] = []
        self._snapshot_index = self._newest_snapshot_index()
        self._attempted_index = self._snapshot_index
        """Index of the last snapshot attempt: after a failure, a whole snapshot period passes before the next one."""
        self._saving: Future[Path] | None = None
        self._leading_term = 0
        self.entries_applied = 0
        self.entries_void = 0
        self.snapshots_failed = 0
        self.snapshot_at_s: float | None = None
        self.scrubbed = ScrubResults()
        self.checkpoints = checkpoints
        self._observers: tuple[Observer, ...] = (
            self.orders,
            self.external_jobs,
            self.job_totals,
            self.transfer_totals,
            self.applied_log,
            self.proposer,
            *(() if checkpoints is None else (checkpoints,)),
        )
        """Observers of applied entries, in the order in which they are called."""
        self._duties = Duties(leads=lambda: self.leads, check=self._check)
        self._register_duties(raises_level=raises_level, draw=draw)

    def _register_duties(self, *, raises_level: bool, draw: Callable[[int], bytes]) -> None:
        state, leads, submit = lambda: self._state, lambda: self.leads, self.submit
        restart = OperationRestart(state=state, leads=leads, term=lambda: self._leading_term, submit=submit)
        bootstrap = Bootstrap(
            self.config,
            self.levels,
            state=state,
            leads=lambda: self.leads and self.agreed.begin(),
            submit=submit,
            raises=raises_level,
            draw=draw,
        )
        self.node_watch = NodeWatch(
            self.liveness, state=state, leads=leads, submit=submit, peers=lambda: self.engine.peers()
        )
        expiry = AnswerExpiry(state=state, now=self.agreed.now, submit=submit)
        self.register(restart, on_change=restart.poll)
        self.register(expiry)
        self.register(bootstrap, on_change=bootstrap.begin)
        self.register(self.membership)
        self.register(self.node_watch)
        self.register(self.clock_watch)
        self.register(self.disk_watch)
        if self.checkpoints is not None:
            self.register(DigestRecorder(self.checkpoints, submit=submit))

    # Interface

    @property
    def state(self) -> State:
        """Applied state."""
        return self._state

    @property
    def applied_index(self) -> int:
        """Index of the last applied entry."""
        return self._index

    @property
    def applied_digest(self) -> bytes:
        """Digest of the ledger up to the last applied entry."""
        return self._digest

    @property
    def snapshot_index(self) -> int:
        """Index of the newest finalized snapshot; 0 if there is none."""
        return self._snapshot_index

    @property
    def incarnation(self) -> Incarnation:
        """Incarnation of the cluster."""
        return self._storage.environment.incarnation

    @property
    def leads(self) -> bool:
        """Return whether this replica leads and may decide."""
        return self.proposer.leading

    async def start(self) -> None:
        """Join consensus."""
        await self.engine.start()
        self._duties.start()
        if self.checkpoints is not None:
            self.checkpoints.start()

    async def stop(self) -> None:
        """Leave consensus without a transfer, write everything known, and close the storage."""
        if self.checkpoints is not None:
            await self.checkpoints.stop()
        self._duties.stop()
        self.proposer.stop()
        self.polls.stop()
        self.orders.wake_all()
        self.external_jobs.wake_all()
        await self.engine.stop()
        self.applied_log.close()
        self._storage.close()

    @property
    def journal_fill(self) -> float:
        """Used share of the journal's space, from 0 to 1."""
        return self._storage.environment.fill

    def follow(self, observer: Observer) -> None:
        """Notify an observer of each entry from now on."""
        self._observers = (*self._observers, observer)

    def register(self, duty: Duty, *, on_change: Callable[[], None] | None = None) -> None:
        """Register a duty of the leader (`Duties.register`)."""
        self._duties.register(duty, on_change=on_change)

    def submit(self, request: Request) -> Answer:
        """Submit a command (`cluster.server.proposer`).

        Raises:
            QueueFull: The queue has no space for it.
            NotLeading: This replica cannot decide commands.
        """
        self._check_founded(request)
        return self.proposer.submit(request)

    def queue(self, request: Request, asker: Asker) -> None:
        """Submit a command whose answer goes to `asker`. Raises the exceptions of `submit`."""
        self._check_founded(request)
        self.proposer.queue(request, asker)

    def _check_founded(self, request: Request) -> None:
        if self._state.revision == 0 and not isinstance(request.command, FoundCluster):
            raise NotLeading(None)

    def fill_with(self, size_bytes: int) -> float:
        """Return the used share of the journal, from 0 to 1, with pending entries and this many additional bytes.

        If the disk is fuller than the journal and no other replica's disk has space, return the used share of the disk.
        """
        stored_bytes = STORED_BYTES_PER_BYTE * (self.journal.behind_bytes + size_bytes)
        return max(self._storage.environment.fill_with(stored_bytes), self.disk_watch.fill_with(stored_bytes))

    def measure_room(self) -> Room | None:
        """Return the journal's size on disk and the free space there; None if the file system does not report it."""
        used_bytes = round(self._storage.environment.fill * self.config.storage.map_size_bytes)
        return room_of(self.config.wal_directory(self.name), used_bytes)

    async def current(self) -> State:
        """Return a state that includes every answer given before this call, after a scheduling cycle.

        Raises:
            NotLeading: This replica does not lead.
            Unavailable: This replica cannot prove its leadership within READ_WAIT_S.
        """
        try:
            async with asyncio.timeout(READ_WAIT_S):
                while self.engine.role == Role.LEADER and not self.engine.ready:
                    await asyncio.sleep(READY_POLL_S)
                if self.engine.role != Role.LEADER:
                    raise NotLeading(self.engine.leader)
                passed = self.proposer.pass_now()
                await self.wait_applied(max(passed, await self.engine.confirm_leadership()))
        except NotLeader as error:
            raise NotLeading(error.leader) from error
        except TimeoutError as error:
            raise Unavailable("this replica could not confirm in time that it still leads") from error
        return self._state

    async def wait_applied(self, index: int) -> None:
        """Wait until the entry at `index` is applied."""
        if self._index >= index:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (index, future)
        self._appliers.append(waiting)
        try:
            await future
        finally:
            if waiting in self._appliers:
                self._appliers.remove(waiting)

    def save_snapshot(self) -> Future[Path]:
        """Write a snapshot of the present state in the background; the future returns its path or SnapshotFailed."""
        # A snapshot ahead of the applied mark on disk could not be used after a crash.
        self.journal.flush_hints()
        image = Image(self._state, self._index, self._term, self._digest, self._placed)
        loop = asyncio.get_running_loop()
        future = self.snapshots.save_in_background(image)
        if future is not self._saving:
            self._saving = future
            self._attempted_index = self._index
            future.add_done_callback(lambda done: call_soon(loop, self._saved, image, done))
        return future

    def fill_history(self, gap: Gap, handed: Sequence[HistoryEntry]) -> Gap | None:
        """Add entries that a snapshot replaced to the ledger; return the remaining gap (`wal.fill`)."""
        return fill(self._storage.environment, gap, handed)

    def mend_history(self, stretch: Gap, handed: Sequence[HistoryEntry]) -> Gap | None:
        """Replace damaged entries; return the remaining range (`wal.replace_damaged`)."""
        return replace_damaged(self._storage.environment, stretch, handed)

    def authorise_pruning(self, note: PruneNote) -> None:
        """Record the entries to prune (`wal.authorise`) and the location of their archive; durable on return.

        Raises:
            BrokenInvariant: The entries belong to another history, or a restart or a peer would need them.
        """
        last = note.below - 1
        if note.cluster_id != self.config.cluster.id or self.journal.digest_at(last) != bytes.fromhex(note.digest):
            raise BrokenInvariant(f"entry {last} of this ledger differs from the entry in the pruning request")
        if self._snapshot_index < last:
            raise BrokenInvariant(
                f"the newest snapshot is of entry {self._snapshot_index}, before entry {last}, which would be pruned"
            )
        authorise(self._storage.environment, note.pruned)

    def prune_some(self) -> bool:
        """Prune some of the recorded entries; return whether some are left (`wal.prune_some`)."""
        return prune_some(self._storage.environment)

    # Callbacks of consensus

    def apply(self, index: int, term: int, data: bytes) -> bool:
        """Settle a committed entry. An entry that no correct leader makes raises; consensus then stops the replica.

        A large entry is folded in slices, one per call: returns True until the entry is settled. The state does not
        change before that.
        """
        if index != self._index + 1:
            raise BrokenInvariant(f"entry {index} was to be applied out of order, after entry {self._index}")
        before, void = self._state, False
        batch: Batch | None
        precomputed = self.proposer.precomputed(before, data)
        if precomputed is not None:
            batch, after = precomputed
        else:
            batch, after = read_batch(data) if self._folding is None else self._folding[0], before
            if batch is not None:
                if self._folds_on(before, batch):
                    return True
                settled = apply_batch(before, batch) if self._folding is None else self._folding[1].result
                void = settled is None
                after = before if settled is None else settled
        self._folding = None
        configuration = read_configuration(data)
        if configuration is not None:
            self._placed = ConfigurationAt(index, configuration)
        digest = self.journal.record_applied(Entry(index, term, data), after.revision)
        self._state, self._index, self._term, self._digest = after, index, term, digest
        self.entries_applied += 1
        self.entries_void += void
        if batch is not None and not void and precomputed is None:
            self.agreed.applied(after.at)
        entry = AppliedEntry(
            index, term, digest, before.revision, after.revision, batch, void, len(data), configuration
        )
        transition = Transition(before, after, entry, data)
        for observer in self._observers:
            observer.applied(transition)
        self._release_appliers()
        if index - self._attempted_index >= self.config.storage.snapshot_every_entries and not self.snapshots.saving:
            self.save_snapshot()
        return False

    def _folds_on(self, before: State, batch: Batch) -> bool:
        """Fold a slice of a batch that is too large for one call; return whether a part is left."""
        if self._folding is None:
            if sum(1 + steps_of_events(entry.events) for entry in batch.entries) <= STEPS_PER_TURN:
                return False
            self._folding = batch, StepRunner(apply_batch_steps(before, batch))
        return not self._folding[1].advance(STEPS_PER_TURN)

    def hear(self, peer: str, news: bytes) -> None:
        """Record reports of agents, relayed by a follower. Reports are untrusted: unknown nodes are ignored."""
        try:
            said = read_news(news)
        except ValueError as error:
            LOGGER.warning("replica %s sent an unreadable report on its agents: %s", peer, error)
            return
        for one in said:
            self._heard(one, peer)

    def _heard(self, said: AgentReport, through: str = "") -> None:
        """Record an agent's report, received here or through a follower. Ignore other instances of the agent."""
        known = self._state.nodes.get(said.node)
        if known is None or known.instance != said.instance:
            return
        self.node_watch.heard(said.node, through)
        now = self.agreed.now()
        self.liveness.progressed(
            said.node, (made_of(row, Transfer, node=said.node, updated_at=now) for row in said.progress), self._state
        )

    def newest_snapshot(self) -> SnapshotRef | None:
        """Return the newest snapshot that may be sent to a peer. If it ends before the journal begins, start a new one.

        Snapshots may have been damaged since the journal was compacted, and an idle cluster makes no new ones by
        itself.
        """
        newest = self.snapshots.newest()
        if (newest is None or newest.index < self.journal.base_index) and not self.snapshots.saving:
            LOGGER.warning("a peer needs a newer snapshot than this replica has: writing one")
            self.save_snapshot()
        if newest is None:
            return None
        return SnapshotRef(newest.path, newest.index, newest.term, newest.size_bytes)

    def snapshot_refused(self, index: int) -> None:
        """Verify a snapshot that a peer rejected, in a thread. A damaged snapshot is not sent again."""
        self.snapshots.doubt(index)

    def begin_install(self, index: int, term: int) -> SnapshotSink:
        """Return the receiver of the leader's snapshot."""
        return SnapshotInstall(self.snapshots, index, term, installed=self.installed)

    def installed(self, image: Image) -> None:
        """Continue from a received, verified snapshot."""
        if image.index <= self._index:
            raise BrokenInvariant(f"a snapshot of entry {image.index} was received, but {self._index} is applied")
        self.journal.reset_to(image.index, image.term, image.chain_digest, image.state.revision)
        self.journal.sync()
        self._state, self._index, self._term = image.state, image.index, image.term
        self._digest = image.chain_digest
        self._placed = image.configuration
        self._folding = None
        self.agreed.applied(image.state.at)
        self._snapshot_index = self._attempted_index = image.index
        self.orders.installed(image.state.revision)
        self.external_jobs.wake_all()
        self.proposer.installed()
        self.applied_log.reset(image.index, image.state.revision)
        self._release_appliers()
        LOGGER.info(
            "caught up by a snapshot of entry %d, revision %d",
            image.index,
            image.state.revision,
            extra=about(revision=image.state.revision),
        )
        # Prune only now: before the journal used this snapshot, a restart needed an older one.
        self.snapshots.prune_in_background()

    def _on_change(self) -> None:
        leading_term = self.engine.term if self.engine.role == Role.LEADER else 0
        if leading_term != self._leading_term:
            self._leading_term = leading_term
            self.liveness.lead()
            self.external_jobs.wake_all()
            LOGGER.info(
                "%s in term %d, leader %s",
                self.engine.role,
                self.engine.term,
                self.engine.leader or "unknown",
                extra=about(term=self.engine.term),
            )
        self.proposer.leadership_changed()
        self._duties.leadership_changed()

    def _check(self) -> None:
        """Check the storage files (StorageFailed stops the replica) and the clocks."""
        try:
            self._storage.environment.check_files()
        except StorageFailed as error:
            self._fail(error)
        self.clock_watch.check()
        # A replica without contact to a leader gets no orders, so agents that wait here should try another one.
        now_s = self.clock.monotonic_s()
        if self.engine.leader is not None:
            self._led_s = now_s
        elif now_s - self._led_s > LEADERLESS_S:
            self.orders.wake_all()

    def _release_appliers(self) -> None:
        if not self._appliers:
            return
        for index, future in self._appliers:
            if index <= self._index and not future.done():
                future.set_result(None)

    def _newest_snapshot_index(self) -> int:
        newest = self.snapshots.newest()
        return 0 if newest is None else min(newest.index, self._index)

    def _saved(self, image: Image, done: Future[Path]) -> None:
        self._saving = None
        error = done.exception()
        if error is not None:
            # Older snapshots are kept: consensus continues with a longer journal until the next attempt.
            self.snapshots_failed += 1
            LOGGER.error("a snapshot of entry %d could not be written: %s", image.index, error)
            return
        self._snapshot_index = max(self._snapshot_index, image.index)
        self.snapshot_at_s = self.clock.monotonic_s()
        LOGGER.info(
            "snapshot %s: entry %d, revision %d",
            done.result().name,
            image.index,
            image.state.revision,
            extra=about(revision=image.state.revision),
        )
        periods = min(COMPACTION_MARGIN_PERIODS * self.config.storage.snapshot_every_entries, HELD_BACK_ENTRIES)
        keep_from = image.index - max(COMPACTION_MARGIN_ENTRIES, periods)
        if keep_from > 0:
            self.engine.compact_to(keep_from)
