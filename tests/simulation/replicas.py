"""Replica: the real controller, proposer, consensus, journal and snapshots on a virtual event loop."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from forebay.cluster.api.service import ApiService
from forebay.cluster.config.config import ReplicaConfig
from forebay.cluster.consensus import Machine, RemovedFromCluster, Role
from forebay.cluster.consensus.leader_election import GRACE_HEARTBEATS
from forebay.cluster.consensus.log_replication import quorum_deadline_s
from forebay.cluster.schemas.jobs import StatusView
from forebay.cluster.serve import founding_of
from forebay.cluster.server.controller import Controller
from forebay.cluster.server.storage import MEMBER_NAME, StorageRefused, allow_first_start, open_storage
from forebay.cluster.system.address import Address
from forebay.replica.values import MICROSECONDS_PER_SECOND
from forebay.snapshots import SnapshotFailed, SnapshotStore
from forebay.wal import BrokenInvariant, LedgerBroken, StorageFailed
from forebay.wal.configuration import ConfigurationAt
from tests.simulation.disk import SimDisk
from tests.simulation.loop import Died, SimClock, VirtualLoop
from tests.simulation.network import SimLinks
from tests.simulation.watched import WatchedController, WatchedJournal

if TYPE_CHECKING:
    from tests.simulation.world import World

SNAPSHOT_DELAY_S = 0.03
"""Up to how long the background writer of snapshots lags behind what it was asked for, seconds."""


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


SILENCE_HEARTBEATS = 2 * GRACE_HEARTBEATS
"""For how long a leader may run without a majority, heartbeats: one grace, and as much for the steps around it."""


class SimReplica:
    """Persistent parts of a replica, and its present process, if there is one."""

    def __init__(self, world: World, name: str, called: str, address: Address) -> None:
        """`name` is the place where it runs, `called` the replica's name, which a successor elsewhere shares."""
        self.world = world
        self.name = name
        self.called = called
        self.address = str(address)
        base = world.config
        own = ReplicaConfig(called, address, Address(address.host, address.port + 1000), joins=name not in base.members)
        storage = msgspec.structs.replace(base.storage, directory=world.directory / name)
        others = tuple(replica for replica in base.replicas if replica.name != called)
        self.config = msgspec.structs.replace(
            base, storage=storage, replicas=base.replicas if called in base.members else (*others, own)
        )
        self.clock = SimClock(world.timeline)
        self.clock.set(round(world.fork().uniform(-0.3, 0.3) * MICROSECONDS_PER_SECOND))
        self.loop = VirtualLoop(world.timeline, lambda error: None)  # type: ignore[abstract]  # asyncio calls nothing else of it
        self.controller: WatchedController | None = None
        self.service: ApiService | None = None
        """The API of the process that runs, of which the door is used."""
        self.links: SimLinks | None = None
        self.identity = ""
        """The id under which it takes part; empty before it ever did."""
        self.lost = "it has not joined"
        """Reason why the replica cannot start: its storage was rejected."""
        self.removed = False
        """It was told that it is no member any more."""
        self.serves = False
        """Whether its API takes requests: until it is asked to stop."""
        self.generation = 0
        self.role: tuple[str, int] = ("", 0)
        self._looked_s = self._silent_s = 0.0
        self._format()

    def _format(self) -> None:
        """Give it an empty disk."""
        directory = self.config.snapshot_directory(self.called)
        directory.mkdir(parents=True)
        self.disk = SimDisk(self.world.fork(), directory)
        self.world.environments.disks[self.config.wal_directory(self.called)] = self.disk

    def found(self) -> None:
        """It is one of those with whom the cluster begins."""
        allow_first_start(self.config, self.called)
        self.identity, self.lost = self.called, ""

    def lose_disk(self, *, note_stays: bool) -> None:
        """Its disk is gone, for good; perhaps not the file that says under which id it joined."""
        if self.up:
            self.crash()
        home = self.config.storage.directory / self.called
        note = home / MEMBER_NAME
        kept = note.read_bytes() if note_stays and note.exists() else None
        shutil.rmtree(home)
        self._format()
        if kept is not None:
            note.write_bytes(kept)
        self.disk.dead = True
        self.lost = "its disk was lost"
        if self.identity:
            self.world.destroyed.add(self.identity)

    @property
    def is_damaged(self) -> bool:
        """Whether its journal or a snapshot was damaged, and is there."""
        return bool(self.disk.damaged or self.disk.files.flipped)

    @property
    def is_leader(self) -> bool:
        """Whether it believes that it leads."""
        return self.controller is not None and self.controller.engine.role is Role.LEADER

    @property
    def up(self) -> bool:
        """Whether a process runs."""
        return self.controller is not None

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
        if self.lost or self.removed:
            return
        world = self.world
        self.generation += 1
        self.loop = VirtualLoop(world.timeline, self._fault)  # type: ignore[abstract]  # asyncio calls nothing else of it
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
        except RemovedFromCluster as error:
            self._leave(error)
        except (StorageFailed, StorageRefused, LedgerBroken, SnapshotFailed, BrokenInvariant) as error:
            self._refused(error)

    def _open(self) -> None:
        world = self.world
        with world.opening(self):
            storage = open_storage(self.config, self.called)
        journal = storage.journal
        assert isinstance(journal, WatchedJournal)
        if world.look_inside and storage.identity in world.destroyed:
            world.violate(f"{self.name} starts as {storage.identity}, whose disk was lost with all that it promised")
        self.identity = storage.identity
        world.disks[self.identity] = self.disk
        founding = founding_of(self.config, self.identity)
        journal.read_configurations(storage.configuration or ConfigurationAt(0, founding))
        # A replica may have died between applying an entry durably and showing it.
        if storage.index > world.oracle.index:
            for entry in storage.ledger.read(world.oracle.index + 1, limit=storage.index):
                world.oracle.extend(entry.index, entry.term, entry.data)
        world.oracle.holds(self.name, storage.index, storage.state)
        world.oracle.members.holds(self.name, storage.index, storage.configuration)

        def make_engine(
            machine: Machine, on_change: Callable[[], None], fail: Callable[[BaseException], NoReturn]
        ) -> Any:
            return world.make_consensus(
                self,
                me=storage.identity,
                bootstrap=founding,
                configuration=storage.configuration,
                journal=journal,
                machine=machine,
                clock=self.clock,
                on_change=on_change,
                fail=fail,
            )

        controller = WatchedController(
            name=self.called,
            config=self.config,
            storage=storage,
            make_engine=make_engine,
            clock=self.clock,
            fail=self._fail,
            node_down_s=world.config.timing.node_down_s,
            ask=self._ask_level,
            draw=random.Random(f"draw/{world.seed}/{self.name}").randbytes,
        )
        controller.world, controller.place = world, self.name
        self.controller = controller
        self.service = ApiService(controller, version="simulated", fail=self._fail)
        self.serves = True
        self.loop.create_task(controller.start())

    async def _ask_level(self, name: str) -> StatusView:
        """Ask a peer which feature level it knows, as `cluster.serve` does over HTTP."""
        world, peer = self.world, self.world.place_of(name)
        await asyncio.sleep(0.002)
        links = world.network.links
        if peer is None or not peer.up or not peer.serves or links[self.name, peer.name].cut:
            raise LookupError(name)
        return StatusView(
            cluster=world.config.cluster.name,
            cluster_id=world.config.cluster.id,
            replica=peer.called,
            role=str(peer.engine.role),
            term=peer.engine.term,
            leader=peer.engine.leader,
            ready=peer.engine.ready,
            commit_index=peer.engine.commit_index,
            applied_index=peer.engine.applied_index,
            last_index=peer.engine.last_index,
            revision=peer.engine.applied_index,
            feature_level_known=world.level_said,
            sync_s=peer.engine.sync_s,
        )

    def make_journal(self, environment: Any) -> WatchedJournal:
        """Open the real journal, watched."""
        journal = WatchedJournal(environment, recent_max_bytes=self.world.recent_bytes)
        journal.world, journal.name, journal.placed = self.world, self.name, []
        return journal

    def make_store(self, directory: Path, keep: int, **options: Any) -> SnapshotStore:
        """Open the real store of snapshots on this replica's disk, without its thread."""
        store = SnapshotStore(directory, keep, disk=self.disk.files, **options)
        store._executor.shutdown()
        store._executor = SimExecutor(self.loop, self.world.fork())
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
        if self.world.look_inside:
            self.world.inside.crashed(self)
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
            if not self.removed:
                self.world.restart_later(self)

    def _fail(self, error: BaseException) -> NoReturn:
        """What `cluster.serve.fail_stop` is to a real process."""
        if isinstance(error, Died) or self.disk.dead:
            raise Died
        if isinstance(error, RemovedFromCluster):
            self._leave(error)
            raise Died
        self.world.note("fail-stop", self.name, type(error).__name__)
        self.world.tell("", str(error))
        self.world.counts["fail_stops"] += 1
        expected = isinstance(error, StorageFailed) and self.disk.raised
        expected = expected or (isinstance(error, StorageFailed | LedgerBroken) and bool(self.disk.damaged))
        if not expected:
            self.world.violate(f"{self.name} stops itself: {type(error).__name__}: {error}")
        self._end()
        raise Died

    def _leave(self, error: RemovedFromCluster) -> None:
        """It knows that it is no member any more: it stops for good."""
        self.world.note("removed", self.name, self.identity, error.version)
        self.world.counts["removed"] += 1
        self.world.oracle.members.removed(self.name, self.identity, error.version)
        self.removed = True
        self._end()

    def guarded(self, call: Callable[..., object], *arguments: Any) -> None:
        """Do what a request asks for, as `cluster.api.local_backend` does: broken storage stops all."""
        try:
            call(*arguments)
        except (StorageFailed, BrokenInvariant) as error:
            self._fail(error)

    def stop_for(self, error: BaseException) -> NoReturn:
        """Stop the replica, as `cluster.api.local_backend` does for an error that says that its storage is broken."""
        self._fail(error)

    def _fault(self, error: BaseException) -> None:
        """Handle an uncaught exception of a callback or task."""
        if not isinstance(error, Died) and not self.disk.dead:
            self.world.violate(f"{self.name}: {type(error).__name__} in a callback: {error}")

    def _refused(self, error: Exception) -> None:
        """The storage was refused: `cluster.serve` would exit with 66."""
        self.world.note("rejected", self.name, type(error).__name__)
        self.world.tell("", str(error))
        self.loop.kill()
        self.disk.dead = True
        if self.disk.damaged or self._lacks_a_snapshot(error):
            self.lost = str(error)
            self.world.counts["rejected"] += 1
        elif self.identity in self.world.destroyed and isinstance(error, StorageRefused):
            self.lost = "its disk was lost"
            self.world.counts["refused_without_data"] += 1
        elif isinstance(error, StorageFailed) and self.disk.raised:
            self.world.restart_later(self)
        else:
            self.world.violate(f"{self.name} refuses its undamaged storage: {type(error).__name__}: {error}")
            self.lost = str(error)

    def _lacks_a_snapshot(self, error: Exception) -> bool:
        """Whether it was refused for a damaged snapshot that no other on its disk can stand in for."""
        gap = re.search(r"entries \d+ to (\d+) were installed from a snapshot", str(error))
        files = self.disk.files
        if gap is None or not isinstance(error, StorageRefused) or not files.flipped:
            return False
        return not any(int(gap[1]) <= index <= self.disk.applied_index for index in files.sound)

    # What is looked at after every step

    def _look(self) -> None:
        """Compare what the replica shows with what may be."""
        controller = self.controller
        if controller is None or self.disk.dead:
            return
        engine = controller.engine
        journal = controller.journal
        if self.world.look_inside and engine.configuration.version != journal.in_force.version:
            self.world.violate(
                f"{self.name} counts by version {engine.configuration.version} of the configuration; its journal says "
                f"{journal.in_force.version}"
            )
        if self.world.look_inside:
            self.world.inside.look(self)
        self._look_for_silence(engine)
        role = (str(engine.role), engine.term)
        if role == self.role:
            return
        self.role = role
        self.world.note("role", self.name, *role)
        if engine.role is Role.LEADER:
            oracle = self.world.oracle
            if oracle.leaders.get(engine.term) is None:
                self.world.counts["elections"] += 1
                oracle.led_without(self.name, engine.term, journal.last_index)
            oracle.leads(self.identity, engine.term, journal.term_of)
            if self.world.look_inside:
                self.world.inside.elected(self)
                if not journal.in_force.votes(self.identity):
                    self.world.violate(f"{self.name} leads term {engine.term} without being a voter")

    def _look_for_silence(self, consensus: Any) -> None:
        """Nobody leads without a majority for longer than one grace, late as its timers may have been (H15).

        The time for which it did not run does not count: of each gap between two looks as much as a heartbeat.
        """
        engine, now_s = consensus._engine, self.world.timeline.now_s
        heartbeat_s = self.world.timing.heartbeat_s
        if engine.role is not Role.LEADER or now_s < quorum_deadline_s(engine.raft):
            self._silent_s = 0.0
        else:
            self._silent_s += min(now_s - self._looked_s, heartbeat_s)
            if self._silent_s > SILENCE_HEARTBEATS * heartbeat_s:
                self.world.violate(f"{self.name} leads term {engine.term} on, although no majority answers it")
        self._looked_s = now_s
