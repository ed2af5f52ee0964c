"""One replica: the real controller, proposer, consensus, journal and snapshots on a virtual loop of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.consensus import Machine, Role
from cluster.controller import Controller
from cluster.serve import founding_of
from cluster.storage import StorageRefused, allow_first_start, open_storage
from snapshots import Image, SnapshotFailed, SnapshotStore
from tests.simulation.disk import SimDisk
from tests.simulation.loop import Died, SimClock, VirtualLoop
from tests.simulation.network import SimLinks
from wal import BrokenInvariant, Journal, LedgerBroken, StorageFailed
from wal.journal import Entry
from wal.records import MARKS_KEY, STATE, unpack_marks

if TYPE_CHECKING:
    from tests.simulation.world import World

DECIDE_S = 0.000_02
"""What handling one frame or one entry takes, seconds: time passes while a replica works."""

SNAPSHOT_DELAY_S = 0.03
"""Up to how long the background writer of snapshots lags behind what it was asked for, seconds."""


class WatchedJournal(Journal):
    """The real journal; what is appended and committed is shown to the oracle."""

    world: World
    name: str

    def append(self, entries: Sequence[Entry]) -> None:
        super().append(entries)
        for entry in entries:
            previous = self.term_of(entry.index - 1)
            if previous is not None:
                self.world.oracle.appended(self.name, entry.index, entry.term, entry.data, previous)

    def set_commit(self, index: int) -> None:
        before = self.commit_index
        super().set_commit(index)
        self.world.oracle.committed(self.name, before, index, self.term_of)


class WatchedController(Controller):
    """The real controller; what it has applied or installed is compared with the history."""

    world: World

    def apply(self, index: int, term: int, data: bytes) -> None:
        super().apply(index, term, data)
        self.world.replicas[self.name].loop.work(DECIDE_S)
        self.world.applied(self.name, index, term, data, self.state)

    def installed(self, image: Image) -> None:
        super().installed(image)
        self.world.note("install", self.name, image.index)
        self.world.counts["installs"] += 1
        self.world.oracle.holds(self.name, image.index, self.state)


class SimExecutor:
    """The background thread of a SnapshotStore, on the replica's own loop: it begins a little later, and is atomic."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng

    def submit(self, call: Callable[..., Path], *arguments: Any) -> Future[Path]:
        future: Future[Path] = Future()

        def run() -> None:
            try:
                path = call(*arguments)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(path)

        self._loop.call_later(self._rng.uniform(0.0, SNAPSHOT_DELAY_S), run)
        return future

    def shutdown(self, wait: bool = True) -> None:
        pass


class SimReplica:
    """What of a replica outlives its processes, and the process that lives now, if one does."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        directory = world.config.snapshot_directory(name)
        directory.mkdir(parents=True)
        allow_first_start(world.config, name)
        self.disk = SimDisk(world.fork(), directory)
        world.environments.disks[world.config.wal_directory(name)] = self.disk
        self.clock = SimClock(world.timeline)
        self.loop = VirtualLoop(world.timeline, lambda error: None)
        self.controller: WatchedController | None = None
        self.links: SimLinks | None = None
        self.damaged = ""
        """What was done to its disk while no process ran."""
        self.lost = ""
        """Why it cannot start any more: its storage was refused."""
        self.held_by_operator = False
        """It is down until somebody starts it."""
        self.serves = False
        """Whether its API takes requests: until it is asked to stop."""
        self.generation = 0
        self.role: tuple[str, int] = ("", 0)

    @property
    def up(self) -> bool:
        """Whether a process runs."""
        return self.controller is not None

    @property
    def base_index(self) -> int:
        """Everything up to here came to the disk with a snapshot, or is in the ledger."""
        return unpack_marks(self.disk.tables[STATE].values[MARKS_KEY]).base_index

    @property
    def engine(self) -> Any:
        """The consensus of the process that runs."""
        assert self.controller is not None
        return self.controller.engine

    @property
    def leads(self) -> bool:
        """Whether it leads and may decide."""
        return self.controller is not None and self.controller.leads

    def start(self) -> None:
        """Start a process on what the disk holds."""
        assert not self.up
        if self.lost:
            return
        world = self.world
        self.generation += 1
        self.loop = VirtualLoop(world.timeline, self._fault)
        self.loop.after_step = self._look
        self.clock.loop = self.loop
        self.disk.start(self._die, self.loop.work)
        self.role = ("", 0)
        world.note("start", self.name)
        world.counts["starts"] += 1
        try:
            self.loop.call_now(self._open)
        except Died:
            return
        except (StorageFailed, StorageRefused, LedgerBroken, SnapshotFailed, BrokenInvariant) as error:
            self._refused(error)

    def _open(self) -> None:
        world = self.world
        with world.opening(self):
            storage = open_storage(world.config, self.name)
        journal = storage.journal
        assert isinstance(journal, WatchedJournal)
        # A replica may have died between applying an entry durably and showing it.
        if storage.index > world.oracle.index:
            for entry in storage.ledger.read(world.oracle.index + 1, limit=storage.index):
                world.oracle.extend(entry.index, entry.term, entry.data)
        world.oracle.holds(self.name, storage.index, storage.state)

        def make_engine(
            machine: Machine, on_change: Callable[[], None], fail: Callable[[BaseException], NoReturn]
        ) -> Any:
            return world.make_consensus(
                me=storage.identity,
                founding=founding_of(world.config, storage.identity),
                configuration=storage.configuration,
                journal=journal,
                machine=machine,
                clock=self.clock,
                on_change=on_change,
                fail=fail,
            )

        controller = WatchedController(
            name=self.name,
            config=world.config,
            storage=storage,
            make_engine=make_engine,
            clock=self.clock,
            fail=self._fail,
            node_down_s=world.config.timing.node_down_s,
        )
        controller.world = world
        self.controller = controller
        self.serves = True
        self.loop.create_task(controller.start())

    def make_journal(self, environment: Any) -> WatchedJournal:
        """Open the real journal, watched."""
        journal = WatchedJournal(environment)
        journal.world, journal.name = self.world, self.name
        return journal

    def make_store(self, directory: Path, keep: int, **options: Any) -> SnapshotStore:
        """Open the real store of snapshots on this replica's disk, without its thread."""
        store = SnapshotStore(directory, keep, disk=self.disk.files, **options)
        store._executor.shutdown()
        store._executor = SimExecutor(self.loop, self.world.fork())  # type: ignore[assignment]
        return store

    # How it ends

    def crash(self, *, silently: bool = False) -> None:
        """End the process at once; what was not synced is gone. `silently`: its peers are not told by the network."""
        controller, self.controller = self.controller, None
        self.loop.kill()
        self.disk.dead = True
        if controller is not None:
            receiver = controller.snapshots._receiver
            if receiver is not None:
                receiver.abort()
            for sender in getattr(getattr(controller.engine, "_engine", None), "_senders", {}).values():
                sender.close()
        self.disk.lose_power()
        links, self.links = self.links, None
        if links is not None:
            links.open = False
        self.world.network.drop_all(self.name, silently=silently)
        self.world.counts["crashes"] += 1
        self.generation += 1

    def stop(self) -> None:
        """Ask the process to end in good order."""
        if self.controller is not None and self.serves:
            self.serves = False
            self.loop.call_soon(self._stop, self.controller)

    def _stop(self, controller: Controller) -> None:
        def ended(task: Any) -> None:
            if self.controller is controller:
                self.world.timeline.after(0.0, self._ended, controller)

        self.loop.create_task(controller.stop()).add_done_callback(ended)

    def _ended(self, controller: Controller) -> None:
        if self.controller is controller:
            self.world.note("stopped", self.name)
            self.controller = None
            self.loop.kill()
            self.disk.dead = True
            if self.links is not None:
                self.links.open = False
                self.links = None
            self.world.network.drop_all(self.name)
            self.world.restart_later(self)

    def _die(self, where: str) -> NoReturn:
        """The process dies in the middle of what it does."""
        if not self.disk.dead:
            self.world.note("die", self.name, where)
            self._end()
        raise Died

    def _end(self) -> None:
        """Let nothing of this process have an effect any more; the rest is done when its code has come to an end."""
        self.disk.dead = True
        self.loop.kill()
        if self.links is not None:
            self.links.open = False
        self.world.timeline.after(0.0, self._bury, self.generation)

    def _bury(self, generation: int) -> None:
        if self.generation == generation:
            self.crash()
            self.world.restart_later(self)

    def _fail(self, error: BaseException) -> NoReturn:
        """What `cluster.serve.fail_stop` is to a real process."""
        if isinstance(error, Died) or self.disk.dead:
            raise Died
        self.world.note("fail-stop", self.name, type(error).__name__)
        self.world.tell("", str(error))
        self.world.counts["fail_stops"] += 1
        expected = isinstance(error, StorageFailed | LedgerBroken) and (self.disk.injected or self.damaged)
        if not expected:
            self.world.violate(f"{self.name} stops itself: {type(error).__name__}: {error}")
        self._end()
        raise Died

    def guarded(self, call: Callable[..., object], *arguments: Any) -> None:
        """Do what a request asks for, as `cluster.api.server` does: what says that the storage is broken stops all."""
        try:
            call(*arguments)
        except (StorageFailed, BrokenInvariant) as error:
            self._fail(error)

    def stop_for(self, error: BaseException) -> NoReturn:
        """Stop the replica, as `cluster.api.server` does for an error that says that its storage is broken."""
        self._fail(error)

    def _fault(self, error: BaseException) -> None:
        """An exception that nobody caught, in a callback or a task."""
        if not isinstance(error, Died) and not self.disk.dead:
            self.world.violate(f"{self.name}: {type(error).__name__} in a callback: {error}")

    def _refused(self, error: Exception) -> None:
        """The storage was refused: `cluster.serve` would exit with 66."""
        self.world.note("refused", self.name, type(error).__name__)
        self.world.tell("", str(error))
        self.loop.kill()
        self.disk.dead = True
        if self.damaged:
            self.lost = str(error)
            self.world.counts["refused"] += 1
        elif isinstance(error, StorageFailed) and self.disk.injected:
            self.world.restart_later(self)
        else:
            self.world.violate(f"{self.name} refuses its undamaged storage: {type(error).__name__}: {error}")
            self.lost = str(error)

    # What is looked at after every step

    def _look(self) -> None:
        """Compare what the replica shows with what may be."""
        controller = self.controller
        if controller is None or self.disk.dead:
            return
        engine = controller.engine
        role = (str(engine.role), engine.term)
        if role == self.role:
            return
        self.role = role
        self.world.note("role", self.name, *role)
        if engine.role is Role.LEADER:
            oracle, journal = self.world.oracle, controller.journal
            if oracle.leaders.get(engine.term) is None:
                self.world.counts["elections"] += 1
                oracle.led_without(self.name, engine.term, journal.last_index)
            oracle.leads(self.name, engine.term, journal.term_of)
