"""A whole cluster in one thread and from one seed: replicas, links, disks, clients, agents, faults, and the oracle."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import lmdb
import msgspec

from cluster import controller as controller_module
from cluster import storage as storage_module
from cluster.config import Config
from cluster.consensus import Consensus, Role, driver
from cluster.consensus import snapshots as transfer_module
from cluster.consensus.frames import PROMISES, AnyMessage
from cluster.serve import timing_of
from replica import commands
from replica import settle as settle_module
from replica.state import State
from replica.state_digest import state_digest
from snapshots import store as store_module
from tests.simulation.clients import SimAgent, SimClient
from tests.simulation.disk import SimEnvironments
from tests.simulation.faults import Faults
from tests.simulation.loop import Spinning, Timeline
from tests.simulation.network import Network, SimLinks
from tests.simulation.oracle import Oracle
from tests.simulation.replicas import SimReplica
from wal.records import ENTRIES, STATE, index_key, unpack_entry

CLUSTER_ID: Final = "5a" * 16
CONVERGE_S: Final = 30.0
"""Virtual seconds in which healed replicas agree again and new work commits."""

DRAIN_S: Final = 60.0
"""Virtual seconds in which a healed cluster gets rid of every job when it is told to."""

CONFIGURATION: Final = """
[cluster]
name = "sim"
id = "{cluster_id}"
{replicas}
[[pool]]
name = "fast"
quantity = "8MiB"
granularity = "1MiB"
default = true
[[pool]]
name = "slow"
quantity = "5MiB"
granularity = "2MiB"
[staging]
sources = ["/in"]
destinations = ["/out"]
[policy]
stage_retries = 1
retry_backoff_s = 1
retry_backoff_max_s = 1
finished_jobs_kept = 6
[storage]
snapshot_every_entries = {snapshot_every}
snapshots_kept = {snapshots_kept}
[timing]
election_min_ms = 150
heartbeat_ms = 40
node_down_s = 2
"""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one seed."""

    seed: int
    replicas: int
    profile: str
    violations: tuple[str, ...]
    trace: str
    acknowledged: int
    counts: dict[str, int]
    virtual_s: float


class World:
    """One simulation. Use as a context: it rebinds what a replica takes from the machine, and sets it right again."""

    def __init__(
        self,
        seed: int,
        *,
        replicas: int = 3,
        profile: str = "all",
        show: Callable[[str], None] | None = None,
        clients: int = 4,
        look_inside: bool = True,
    ) -> None:
        """`look_inside`: compare what leaves with what the disks hold, and so find a bug before it does any harm."""
        self.seed = seed
        self.profile = profile
        self.rng = random.Random(f"{seed}/{replicas}/{profile}")
        self.show = show
        self.verbose = show is not None
        self.timeline = Timeline()
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.oracle = Oracle(self.violate, self.holders)
        self.names = [f"r{number}" for number in range(1, replicas + 1)]
        self.nodes = ["n1", "n2"]
        self.environments = SimEnvironments()
        self.ending = False
        self.request_losses = 0.0
        self.request_copies = 0.0
        self.slow_reports = self.rng.choice((0.0, 0.1))
        self.failing_stages = self.rng.choice((0.0, 0.1))
        self._trace = blake2b(digest_size=16)
        self._stack = ExitStack()
        self._clients = clients
        self._look_inside = look_inside
        self._callers = itertools.count()

    def __enter__(self) -> World:
        try:
            self._begin()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _begin(self) -> None:
        parent = Path("/dev/shm")
        directory = tempfile.mkdtemp(prefix="forebay-sim-", dir=parent if parent.is_dir() else None)
        self._stack.callback(shutil.rmtree, directory)
        self.directory = Path(directory)
        rng = self.rng
        replicas = "".join(
            f'[[replica]]\nname = "{name}"\npeer = "127.0.0.1:{7400 + at}"\napi = "127.0.0.1:{7500 + at}"\n'
            for at, name in enumerate(self.names)
        )
        file = self.directory / "forebay.toml"
        file.write_text(
            CONFIGURATION.format(
                cluster_id=CLUSTER_ID,
                replicas=replicas,
                snapshot_every=rng.choice((4, 10, 30, 1000)),
                snapshots_kept=rng.choice((1, 2)),
            )
        )
        self.config = Config.load(file)
        self.timing = timing_of(self.config)
        logging.disable(logging.CRITICAL)
        self._stack.callback(logging.disable, logging.NOTSET)
        for place, name, value in (
            (driver, "TlsLinks", self._links),
            (controller_module, "COMPACTION_MARGIN_ENTRIES", rng.choice((0, 2, 8, 64))),
            (settle_module, "RECEIPTS_MAX", rng.choice((40, 200))),
            (transfer_module, "CHUNK_BYTES", rng.choice((700, 4000))),
            (store_module, "BREATH_S", 0),
            (lmdb, "open", self.environments.open_lmdb),
        ):
            self._stack.enter_context(patch.object(place, name, value))
        self.network = Network(self, self.names)
        self.replicas = {name: SimReplica(self, name) for name in self.names}
        self.agents = [SimAgent(self, node) for node in self.nodes]
        self.clients = [SimClient(self, number) for number in range(1, self._clients + 1)]
        self.faults = Faults(self, self.profile)

    def __exit__(self, *exception: object) -> None:
        for replica in self.replicas.values():
            if replica.up:
                replica.crash()
        self._stack.close()

    def fork(self) -> random.Random:
        """Return a source of randomness of its own, so that one part's draws do not move another's."""
        return random.Random(self.rng.getrandbits(64))

    # What is seen

    def note(self, kind: str, *facts: object) -> None:
        """Add a fact to the trace, and to the transcript if there is one."""
        line = f"{self.timeline.now_s!r} {kind} {facts!r}"
        self._trace.update(line.encode())
        if self.verbose:
            self.tell(kind, *facts)

    def tell(self, kind: str, *facts: object) -> None:
        """Add a line to the transcript only."""
        if self.show is not None:
            self.show(f"{self.timeline.now_s:10.6f}  {kind:10} " + "  ".join(map(str, facts)))

    def hash_bytes(self, data: bytes) -> None:
        """Add bytes to the trace."""
        self._trace.update(data)

    def violate(self, sentence: str) -> None:
        """Note a broken promise: the simulation ends with the present step."""
        if len(self.violations) < 10:
            self.violations.append(sentence)
        self.tell("VIOLATION", sentence)

    def check_promise(self, name: str, peer: str, message: AnyMessage) -> None:
        """Check that what a message promises is on the disk of its sender."""
        if self._look_inside and isinstance(message, PROMISES):
            disk = self.replicas[name].disk
            if disk.unsynced:
                self.violate(f"{name} promises {type(message).__name__} to {peer} before its disk has it")
            self.oracle.promised(name, peer, message, disk.tables)

    def holders(self, index: int, term: int) -> tuple[int, int]:
        """Return on how many disks an entry is, and how many make a majority."""
        key = index_key(index)
        held = 0
        for replica in self.replicas.values():
            value = replica.disk.tables[ENTRIES].values.get(key) if ENTRIES in replica.disk.tables else None
            if value is not None:
                held += replica.damaged != "" or unpack_entry(key, value).term == term
            elif replica.damaged or (STATE in replica.disk.tables and replica.base_index >= index):
                held += 1
        return held, len(self.names) // 2 + 1

    def applied(self, name: str, index: int, term: int, data: bytes, state: State) -> None:
        """Take note of an entry that a replica has applied."""
        fresh = index > self.oracle.index
        self.oracle.applied_at(name, index, term, data, state)
        if fresh and self.oracle.index == index:
            self.note("commit", name, index, term, state.revision)

    # What replicas are given

    def _links(self, **given: Any) -> SimLinks:
        return SimLinks(self, **given)

    def make_consensus(self, **given: Any) -> Consensus:
        """Make the real driver and engine, over simulated links."""
        return Consensus(
            members=self.config.members,
            cluster_id=self.config.cluster.id,
            timing=self.timing,
            tls=None,  # type: ignore[arg-type]  # the links are simulated
            uniform=self.fork().uniform,
            **given,
        )

    @contextmanager
    def opening(self, replica: SimReplica) -> Iterator[None]:
        """Let `open_storage` find the simulated disk."""
        with (
            patch.object(storage_module, "Environment", self.environments),
            patch.object(storage_module, "Journal", replica.make_journal),
            patch.object(storage_module, "SnapshotStore", replica.make_store),
        ):
            yield

    def is_listening(self, name: str) -> bool:
        """Whether a replica's links are open."""
        links = self.replicas[name].links
        return links is not None and links.open

    def hear(self, name: str, what: str, *arguments: Any) -> None:
        """Have a replica told something by its links, when it next runs."""
        replica = self.replicas[name]
        if replica.links is not None and replica.links.open:
            replica.loop.call_soon(getattr(replica.links.listener, what), *arguments)

    def restart_later(self, replica: SimReplica) -> None:
        """Start a replica again after a while, if nobody does before."""
        self.timeline.after(self.rng.choice((0.02, 0.2, 1.0)) * self.rng.uniform(0.5, 1.5), self._restart, replica)

    def _restart(self, replica: SimReplica) -> None:
        if not replica.up and not replica.lost:
            replica.start()

    # Looking

    def leader(self) -> SimReplica | None:
        """The replica that may decide now, of the highest term if there are two that believe so."""
        leading = [replica for replica in self.replicas.values() if replica.leads]
        return max(leading, key=lambda replica: replica.engine.term, default=None)

    def believes(self, name: str) -> bool:
        """Whether a replica believes that it leads."""
        replica = self.replicas[name]
        return replica.up and replica.engine.role is Role.LEADER

    def living(self) -> list[SimReplica]:
        """The replicas whose storage was not refused for good."""
        return [replica for replica in self.replicas.values() if not replica.lost]

    def converged(self) -> bool:
        """Whether every living replica has applied the leader's whole journal."""
        leader = self.leader()
        if leader is None or leader.controller is None:
            return False
        last = leader.controller.journal.last_index
        return all(
            replica.controller is not None
            and replica.controller.applied_index == last
            and replica.engine.leader == leader.name
            for replica in self.living()
        )

    # The course of a simulation

    def run_seed(self) -> Outcome:
        """Begin, let things go wrong, heal, and check that everything comes right."""
        self.begin()
        self.faults.begin()
        self.run(self.rng.choice((1.5, 3.0, 5.0)))
        if not self.violations:
            self.end()
        return self.outcome()

    def begin(self) -> None:
        """Start everybody."""
        for replica in self.replicas.values():
            self.timeline.after(self.rng.uniform(0, 0.05), self._restart, replica)
        for agent in self.agents:
            self.timeline.after(self.rng.uniform(0, 0.5), agent.start)
        for client in self.clients:
            self.timeline.after(self.rng.uniform(0, 0.5), client.next)

    def run(self, duration_s: float, until: Callable[[], bool] | None = None) -> bool:
        """Go on for so many virtual seconds, or until a violation, or until `until()`; return whether that is true."""
        condition = until or (lambda: False)
        try:
            self.timeline.run(duration_s, lambda: bool(self.violations) or condition())
        except Spinning as error:
            self.violate(str(error))
        return not self.violations and condition()

    def heal(self) -> None:
        """Let nothing go wrong any more, and start who is down."""
        self.note("heal")
        self.faults.on = False
        self.ending = True
        self.network.heal()
        self.request_losses = self.request_copies = self.slow_reports = self.failing_stages = 0.0
        latest = max(replica.clock.offset_us for replica in self.replicas.values())
        for replica in self.replicas.values():
            replica.clock.offset_us = latest
            disk = replica.disk
            disk.full = disk.files_full = disk.next_sync_fails = False
            disk.operations_left = None
            disk.stall_s = 0.0
            if not replica.up:
                self.restart_later(replica)
        for agent in self.agents:
            agent.silent_s = 0.0

    def end(self) -> None:
        """Heal; all agree again; new work commits; every job goes and no space is missing; the ledgers are whole."""
        self.heal()
        for client in self.clients:
            client.stopped = True
        self.timeline.after(2.0, self.network.heal)  # after the last partition that was still to be mended
        if not self.run(CONVERGE_S, self.converged):
            self._complain(f"the replicas did not agree within {CONVERGE_S:.0f} s of being healed: {self.describe()}")
            return
        answers = sum(client.answers for client in self.clients)
        for client in self.clients[:2]:
            client.begin(client.request(client.submission()))
        if not self.run(CONVERGE_S, lambda: sum(client.answers for client in self.clients) >= answers + 2):
            self._complain(f"no new work was committed within {CONVERGE_S:.0f} s of being healed: {self.describe()}")
            return
        self._clean_up()
        if not self.run(DRAIN_S, self._is_empty):
            self._complain(f"jobs are left over: {self._leftovers()}")
            return
        if self.oracle.state.held_bytes:
            self._complain(f"every job is gone, but {dict(self.oracle.state.held_bytes)} bytes are held")
        if not self.run(CONVERGE_S, self.converged):
            self._complain(f"the replicas did not agree at the end: {self.describe()}")
            return
        self._check_ledgers()

    def _complain(self, sentence: str) -> None:
        if not self.violations:
            self.violate(sentence)

    def _clean_up(self) -> None:
        """The operator gets rid of every job, again and again until they are gone."""
        state = self.oracle.state
        if self._is_empty() or self.violations:
            return
        operator = self.clients[-1]
        wanted: list[Any] = []
        for job_id in sorted(state.unfinished):
            job = state.jobs[job_id]
            wanted.append(commands.ReleaseJob(job_id) if job.stuck else None)
            wanted.append(commands.CancelJob(job_id, hurry=True))
        wanted += [commands.ResumeNode(name) for name in self.nodes if name in state.nodes]
        for delay, command in enumerate(command for command in wanted if command is not None):
            caller = SimClient(self, 1000 + next(self._callers))
            caller.stopped = True
            self.timeline.after(0.005 * delay, caller.begin, operator.request(command, operator=True))
        self.timeline.after(1.0, self._clean_up)

    def _is_empty(self) -> bool:
        return not self.oracle.state.unfinished

    def _leftovers(self) -> str:
        state = self.oracle.state
        return ", ".join(
            f"{job} {state.jobs[job].state.name}/{state.buffers[job].state.word if job in state.buffers else '-'}"
            for job in sorted(state.unfinished)
        )

    def _check_ledgers(self) -> None:
        """What is on each disk is the history, whole and chained."""
        for replica in self.living():
            controller = replica.controller
            if controller is None or replica.damaged:
                continue
            if state_digest(controller.state) != state_digest(self.oracle.state):
                self.violate(f"{replica.name} ends with another state than the history")
                return
            replica.loop.call_now(controller.journal.flush_hints)
            verified = controller.ledger.verify()
            points = self.oracle.points
            for entry in controller.ledger.read(verified.first_index, limit=len(points)):
                if (entry.term, entry.data) != (points[entry.index].term, points[entry.index].data):
                    self.violate(f"the ledger of {replica.name} has another entry {entry.index}")
                    return

    def describe(self) -> str:
        """Say where everybody stands."""
        told = []
        for replica in self.replicas.values():
            if replica.controller is None:
                told.append(f"{replica.name} {'lost' if replica.lost else 'down'}")
                continue
            engine = replica.engine
            told.append(
                f"{replica.name} {engine.role} of term {engine.term}, applied {engine.applied_index} of "
                f"{engine.commit_index}, last {engine.last_index}"
            )
        return "; ".join(told)

    def outcome(self) -> Outcome:
        """Return what became of it."""
        oracle = self.oracle
        counts = dict(self.counts)
        counts["reads"] = oracle.reads
        counts["void"] = oracle.void
        counts["entries"] = oracle.index
        counts["revisions"] = oracle.state.revision
        counts["lost"] = sum(bool(replica.lost) for replica in self.replicas.values())
        counts["frames"] = self.network.frames
        return Outcome(
            seed=self.seed,
            replicas=len(self.names),
            profile=self.profile,
            violations=tuple(self.violations),
            trace=self._trace.hexdigest(),
            acknowledged=len(oracle.acknowledged),
            counts=counts,
            virtual_s=round(self.timeline.now_s, 3),
        )


def simulate(
    seed: int,
    *,
    replicas: int = 3,
    profile: str = "all",
    show: Callable[[str], None] | None = None,
    look_inside: bool = True,
) -> Outcome:
    """Run one seed from beginning to end."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with World(seed, replicas=replicas, profile=profile, show=show, look_inside=look_inside) as world:
            try:
                return world.run_seed()
            except Exception as error:
                # A seed that the simulator cannot run is a failing seed too, and must be possible to replay.
                last = traceback.extract_tb(error.__traceback__)[-1]
                world.violate(f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {error}")
                return world.outcome()
    finally:
        if collecting:
            gc.enable()
        gc.collect(1)


__all__ = ["Outcome", "World", "simulate"]
