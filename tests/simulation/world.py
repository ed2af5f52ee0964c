"""A whole cluster in one thread and from one seed: replicas, links, disks, clients, agents, faults, and the oracle."""

from __future__ import annotations

import gc
import importlib
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
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.config.config import Config
from forebay.cluster.consensus import Consensus, Role, Seals, driver, raft_log
from forebay.cluster.consensus import snapshots as transfer_module
from forebay.cluster.consensus.frames import PROMISES, AnyMessage
from forebay.cluster.serve import timing_of
from forebay.cluster.server import controller as controller_module
from forebay.cluster.server import duties as duties_module
from forebay.cluster.server import storage as storage_module
from forebay.cluster.server.duties import POLL_PERIOD_S
from forebay.cluster.system.address import Address
from forebay.replica.fold.dedup_cache import CacheLimits
from forebay.replica.messages import features
from forebay.replica.state.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND
from forebay.snapshots import store as store_module
from forebay.wal.journal import RECENT_MAX_BYTES
from tests.simulation import deep
from tests.simulation.clients import SimAgent, SimClient
from tests.simulation.disk import SimDisk, SimEnvironments
from tests.simulation.doors import RIGHT_S
from tests.simulation.ending import Ending
from tests.simulation.external_jobs import PROFILES_WITH_EXTERNAL_JOBS, ExternalJobs
from tests.simulation.faults import Faults
from tests.simulation.inside import Inside
from tests.simulation.loop import EPOCH_US, Spinning, Timeline
from tests.simulation.members import Operator
from tests.simulation.network import Network, SimLinks
from tests.simulation.oracle import Oracle
from tests.simulation.replicas import SimReplica

STEP_US: Final = 2_000_000
"""How far ahead of the world a replica may be within one step, by slow syncs, microseconds: one that dies there was."""

DECIDE_S: Final = 0.000_02
"""What applying one entry takes, seconds: time passes while a replica works."""

answers_module: Final = importlib.import_module("forebay.replica.fold.dedup_cache")
expiry_module: Final = importlib.import_module("forebay.replica.decide.sessions")
"""Import the modules by name, because their package exports functions of the same names."""

CLUSTER_ID: Final = "5a" * 16
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
[[pool]]
name = "lakes"
quantity = "5MiB"
granularity = "1MiB"
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
election_min_ms = {election_min_ms}
heartbeat_ms = {heartbeat_ms}
node_down_s = {node_down_s}
"""


class Outcome(msgspec.Struct, frozen=True):
    """Result of one seed."""

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
        self.oracle = Oracle(self.violate, self.holders, self.clock_most)
        self.names = [f"r{number}" for number in range(1, replicas + 1)]
        """Places where replicas run, or ran; the founders' are called as they are."""
        self.places: dict[str, str] = {}
        """Replica at each address."""
        self.disks: dict[str, SimDisk] = {}
        """The disk of everybody who ever took part, by id."""
        self.destroyed: set[str] = set()
        """Ids whose disk was lost."""
        self.nodes = ["n1", "n2"]
        self.environments = SimEnvironments()
        self.is_deep = profile == deep.PROFILE
        self.pace = deep.PACE if self.is_deep else 1.0
        """How much slower than usual everything is that waits for something."""
        self.lull = 1.0
        """How much longer than usual clients think."""
        self.decide_s = DECIDE_S
        self.recent_bytes = RECENT_MAX_BYTES
        self.ending = False
        self.request_losses = 0.0
        self.request_copies = 0.0
        self.slow_reports = self.rng.choice((0.0, 0.1))
        self.failing_stages = self.rng.choice((0.0, 0.1))
        self.level_said = self.rng.randint(features.FOUNDING_LEVEL, features.FEATURE_LEVEL_KNOWN)
        """The feature level that members say they know when the leader asks: a new cluster is raised to it."""
        self._trace = blake2b(digest_size=16)
        self._stack = ExitStack()
        self._clients = clients
        self._founders = replicas
        self.look_inside = look_inside
        self.inside = Inside(self)
        self._connecting = ""

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
        agents = "".join(f'[[agent]]\nname = "{node}"\ncpus = 2\n' for node in self.nodes)
        file = self.directory / "forebay.toml"
        file.write_text(
            CONFIGURATION.format(
                cluster_id=CLUSTER_ID,
                replicas=replicas + agents,
                snapshot_every=rng.choice(deep.SNAPSHOT_EVERY if self.is_deep else (4, 10, 30, 1000)),
                snapshots_kept=rng.choice((1, 2)),
                election_min_ms=round(150 * self.pace),
                heartbeat_ms=round(40 * self.pace),
                node_down_s=round(2 * self.pace),
            )
        )
        self.config = Config.load(file)
        self.timing = timing_of(self.config)
        logging.disable(logging.CRITICAL)
        self._stack.callback(logging.disable, logging.NOTSET)
        kept: CacheLimits = answers_module.REPLY_LIMITS
        kept_s = rng.choice(deep.ANSWERS_KEPT_S if self.is_deep else (2, 600))
        for place, name, value in (
            (driver, "TlsLinks", self._links),
            (controller_module, "COMPACTION_MARGIN_ENTRIES", rng.choice((0, 2, 8, 64))),
            (controller_module, "COMPACTION_MARGIN_PERIODS", 0),  # or hardly anybody would need a snapshot
            (duties_module, "POLL_PERIOD_S", POLL_PERIOD_S if self.is_deep else rng.choice((0.1, 0.3, POLL_PERIOD_S))),
            (expiry_module, "RECEIPTS_KEPT_S", kept_s),
            (expiry_module, "_IDLE_US", kept_s * MICROSECONDS_PER_SECOND),
            (answers_module, "REPLY_LIMITS", kept._replace(least=10, of_one=60 if kept_s == 2 else kept.of_one)),
            (transfer_module, "CHUNK_BYTES", rng.choice((700, 4000))),
            (store_module, "BREATH_S", 0),
            (raft_log, "SYNC_POSTPONED_BYTES", rng.choice((0, 2000, raft_log.SYNC_POSTPONED_BYTES))),
            (lmdb, "open", self.environments.open_lmdb),
        ):
            self._stack.enter_context(patch.object(place, name, value))
        if self.is_deep:
            self._stack.enter_context(deep.small_bounds(self.seed))
        self.network = Network(self, self.names)
        self.replicas: dict[str, SimReplica] = {}
        for name in self.names:
            self._settle(name, name, self.config.replica(name).peer)
            self.replicas[name].found()
        self.agents = [SimAgent(self, node) for node in self.nodes]
        self.clients = [SimClient(self, number) for number in range(1, self._clients + 1)]
        self.operator = Operator(self, active=self.profile in ("membership", "all"))
        self.faults = Faults(self, self.profile)
        self.external_jobs = ExternalJobs(self) if self.profile in PROFILES_WITH_EXTERNAL_JOBS else None

    def __exit__(self, *exception: object) -> None:
        for replica in self.replicas.values():
            if replica.up:
                replica.crash()
        self._stack.close()

    def _settle(self, place: str, called: str, address: Address) -> SimReplica:
        replica = self.replicas[place] = SimReplica(self, place, called, address)
        self.places[replica.address] = place
        return replica

    def new_place(self, called: str) -> SimReplica:
        """Make a place for a replica of this name: at the address that it had if it ran elsewhere before."""
        earlier = self.place_of(called)
        place = called if earlier is None else f"{earlier.name}'"
        address = Address("127.0.0.1", 7400 + len(self.names)) if earlier is None else Address.parse(earlier.address)
        self.names.append(place)
        self.network.add_place(place)
        return self._settle(place, called, address)

    def lose_disk(self, replica: SimReplica) -> None:
        """Its disk breaks for good. Somebody may try to start it once more: it must refuse."""
        self.note("lose disk", replica.name, replica.identity)
        self.counts["disks_lost"] += 1
        replica.lose_disk(note_stays=self.rng.random() < 0.5)
        if self.rng.random() < 0.5:
            replica.lost = ""
            replica.start()

    def clear(self, replica: SimReplica) -> None:
        """An operator moves away what is left in a directory, for a successor."""
        self.note("clear", replica.name, replica.identity)
        replica.lose_disk(note_stays=False)

    def place_of(self, called: str) -> SimReplica | None:
        """Where the replica of this name is reached now."""
        found = [replica for replica in self.replicas.values() if replica.called == called]
        return found[-1] if found else None

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
        """Record a violation: the simulation ends with the present step."""
        self.timeline.stopped = True
        if len(self.violations) < 10:
            self.violations.append(sentence)
        self.tell("VIOLATION", sentence)

    def check_promise(self, links: SimLinks, peer: str, message: AnyMessage) -> None:
        """Check that what a message promises is on the disk of its sender."""
        if self.look_inside and isinstance(message, PROMISES):
            disk = self.replicas[links.place].disk
            if not disk.is_synced:
                self.violate(f"{links.me} promises {type(message).__name__} to {peer} before its disk has it")
            self.oracle.promised(links.me, peer, message, disk)
            self.inside.promised(links.me)

    def holders(self, name: str, index: int, term: int) -> tuple[int, int]:
        """Return on how many voters' disks an entry is, and how many are needed, by the configuration in force there.

        A disk that was lost since counts by what it held. Without looking inside nobody knows: then nothing is needed.
        """
        if not self.look_inside:
            return 0, 0
        controller = self.replicas[name].controller
        if controller is None:
            return 0, 0  # it starts again on what it had committed before
        voters = controller.journal.in_force.voter_ids
        disks = [self.disks[voter] for voter in voters if voter in self.disks]
        return sum(disk.holds(index, term) for disk in disks), len(voters) // 2 + 1

    def clock_most(self) -> int:
        """Return what a majority's wall clocks may at most have passed so far, microseconds since 1970.

        Where members change, a majority may be of two.
        """
        majority = 2 if self.profile in ("membership", "all") else self._founders // 2 + 1
        farthest = sorted((replica.clock.farthest_us for replica in self.replicas.values()), reverse=True)
        latest_s = max(replica.clock.monotonic_s() for replica in self.replicas.values())
        return EPOCH_US + farthest[majority - 1] + round(latest_s * MICROSECONDS_PER_SECOND) + STEP_US

    def clocks_are_right(self) -> bool:
        """Whether no majority of replicas ever had wrong clocks; where members change, whether none had."""
        wrong = sum(replica.clock.worst_us > RIGHT_S * MICROSECONDS_PER_SECOND for replica in self.replicas.values())
        return wrong < (1 if self.operator.active else self._founders // 2 + 1)

    def is_healthy(self, identity: str) -> bool:
        """Whether nothing was done to the disk of this member that may cost it for good."""
        return identity not in self.destroyed and not any(
            replica.identity == identity and (replica.lost or replica.is_damaged) for replica in self.replicas.values()
        )

    def may_lose(self, identity: str) -> bool:
        """Whether enough good copies are left without this member, by whatever configuration may be in force.

        Learners whose disk is gone count as if they voted already: a leader might not have noticed yet. To found the
        cluster takes the word of everybody, and the first batch may take everybody's clock: nobody may be lost before.
        """
        if self.oracle.members.newest is None or not self.oracle.state.revision:
            return False
        for configuration in self.oracle.members.possible():
            well = [one.id for one in configuration.voters if one.id != identity and self.is_healthy(one.id)]
            lost = [one.id for one in configuration.learners if one.id == identity or not self.is_healthy(one.id)]
            if len(well) < (len(configuration.voters) + len(lost)) // 2 + 1:
                return False
        return True

    def applied(self, name: str, index: int, term: int, data: bytes, state: State) -> None:
        """Take note of an entry that a replica has applied."""
        fresh = index > self.oracle.index
        self.oracle.applied_at(name, index, term, data, state)
        if fresh and self.oracle.index == index:
            self.note("commit", name, index, term, state.revision)

    # What replicas are given

    def _links(self, **given: Any) -> SimLinks:
        return SimLinks(self, self._connecting, **given)

    def make_consensus(self, replica: SimReplica, **given: Any) -> Consensus:
        """Make the real driver and engine, over simulated links."""
        self._connecting = replica.name
        return Consensus(
            members=replica.config.members,
            cluster_id=self.config.cluster.id,
            timing=self.timing,
            tls=None,  # type: ignore[arg-type]  # the links are simulated
            uniform=self.fork().uniform,
            seals=self.seals_of(given["me"]),
            **given,
        )

    def seals_of(self, member: str) -> Seals:
        """Return what a member signs with: always the same, however often its replica starts."""
        private = Ed25519PrivateKey.from_private_bytes(blake2b(member.encode(), digest_size=32).digest())
        return Seals(self.config.cluster.id, member, private)

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
        if not replica.up and not replica.lost and not replica.removed:
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
        """The members whose storage was not refused for good."""
        members = self.oracle.members.newest
        return [
            replica
            for replica in self.replicas.values()
            if not replica.lost and (members is None or members.holds(replica.identity))
        ]

    def converged(self) -> bool:
        """Whether every living replica has applied the leader's whole journal."""
        leader = self.leader()
        if leader is None or leader.controller is None:
            return False
        last = leader.controller.journal.last_index
        return all(
            replica.controller is not None
            and replica.controller.applied_index == last
            and replica.engine.leader == leader.called
            for replica in self.living()
        )

    # The course of a simulation

    def run_seed(self) -> Outcome:
        """Start, inject faults, heal, and check the recovery."""
        self.begin()
        if self.is_deep:
            deep.Deep(self).run()
        else:
            self.faults.begin()
            self.operator.begin()
            self.run(self.rng.choice((3.0, 5.0, 8.0) if self.profile == "membership" else (1.5, 3.0, 5.0)))
        if not self.violations:
            self.end()
        return self.outcome()

    def begin(self) -> None:
        """Start all replicas."""
        for replica in self.replicas.values():
            self.timeline.after(self.rng.uniform(0, 0.05), self._restart, replica)
        for agent in self.agents:
            self.timeline.after(self.rng.uniform(0, 0.5), agent.start)
        for client in self.clients:
            self.timeline.after(self.rng.uniform(0, 0.5), client.next)
        if self.external_jobs is not None:
            self.timeline.after(self.rng.uniform(0, 0.5), self.external_jobs.begin)

    def run(self, duration_s: float, until: Callable[[], bool] | None = None, *, every_s: float = 0.0) -> bool:
        """Go on for so many virtual seconds, or until a violation, or until `until()`; return whether that is true.

        `every_s`: as `Timeline.run` takes it.
        """
        try:
            self.timeline.run(duration_s, until, every_s)
        except Spinning as error:
            self.violate(str(error))
        return not self.violations and until is not None and until()

    def end(self) -> None:
        """Heal, and check the recovery."""
        Ending(self).come_right()

    def describe(self) -> str:
        """Describe the state of all replicas."""
        told = []
        for replica in self.replicas.values():
            if replica.controller is None:
                told.append(f"{replica.name} {'lost' if replica.lost else 'removed' if replica.removed else 'down'}")
                continue
            engine = replica.engine
            told.append(
                f"{replica.name} ({replica.identity}) {engine.role} of term {engine.term}, applied "
                f"{engine.applied_index} of {engine.commit_index}, last {engine.last_index}"
            )
        return "; ".join(told)

    def outcome(self) -> Outcome:
        """Return the result."""
        oracle = self.oracle
        counts = dict(self.counts)
        counts["reads"] = oracle.reads
        counts["void"] = oracle.void
        counts["entries"] = oracle.index
        counts["revisions"] = oracle.state.revision
        counts["level"] = oracle.state.feature_level
        counts["lost"] = sum(bool(replica.lost) for replica in self.replicas.values())
        counts["frames"] = self.network.frames
        return Outcome(
            seed=self.seed,
            replicas=self._founders,
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
        return _simulate(seed, replicas, profile, show, look_inside)
    finally:
        if collecting:
            gc.enable()
        # After the world has gone: collected while something still holds it, it would only be passed to the generation
        # that is hardly ever looked through, 2 MB a seed.
        gc.collect(1)


def _simulate(seed: int, replicas: int, profile: str, show: Callable[[str], None] | None, look_inside: bool) -> Outcome:
    with World(seed, replicas=replicas, profile=profile, show=show, look_inside=look_inside) as world:
        try:
            return world.run_seed()
        except Exception as error:
            # A seed that the simulator cannot run is a failing seed too, and must be possible to replay.
            last = traceback.extract_tb(error.__traceback__)[-1]
            world.violate(f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {error}")
            return world.outcome()


__all__ = ["Outcome", "World", "simulate"]
