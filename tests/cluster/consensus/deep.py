"""Deep worlds: simulated clusters with tens of virtual minutes, thousands of entries, and full windows and slices.

The worlds of `test_simulation` are too short for some cases. Here a replica is absent for thousands of entries, bursts
exceed every window, snapshots are made, sent and verified meanwhile, and some minutes pass without faults.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from forebay.cluster.consensus import log_compaction, log_replication, progress, raft_log, snapshots
from forebay.cluster.consensus.interface import Timing
from forebay.cluster.consensus.progress import Phase
from tests.cluster.consensus.simulator import Replica, Simulation
from tests.cluster.consensus.test_simulation import fault

TIMING = Timing(election_min_s=3.0, election_max_s=6.0, heartbeat_s=0.6)
"""Timing ten times slower than usual, so that a minute has as many heartbeats as a whole world of `test_simulation`."""

ROUNDS = 5
CALM_S = (60.0, 200.0)
STORM_S = (2.0, 8.0)
AWAY_S = (20.0, 60.0)
BURST = (1, 4, 30, 150)
"""Number of entries proposed at once."""


class Deep:
    """One deep world; `seen` counts full windows, slices and lags."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"deep/{seed}")
        self.sim = Simulation(
            seed, replicas=rng.choice((3, 3, 5)), timing=TIMING, latency_s=rng.choice((0.002, 0.02, 0.1))
        )
        self.seen: Counter[str] = Counter()
        self.number = 0
        cost_s = rng.choice((0.0, 0.000_1, 0.001))
        for replica in self.sim.replicas.values():
            replica.verify_s = rng.choice((0.0, 0.5, 8.0))
            replica.at_apply = lambda index, term, data: self.work(cost_s)

    def work(self, cost_s: float) -> None:
        """Let time pass while a replica applies an entry, so that slices end."""
        self.sim.clock.now_s += cost_s

    def run(self) -> None:
        for _ in range(ROUNDS):
            self.calm(self.rng.uniform(*CALM_S))
            self.storm(self.rng.uniform(*STORM_S))
            if self.rng.random() < 0.7:
                self.leave_one_behind()
        sim = self.sim
        sim.check_log_matching()
        sim.converge(within_s=300.0)
        sim.check_log_matching()
        self.seen["entries"] = len(sim.applied)
        self.seen["virtual_s"] = round(sim.clock.now_s)
        self.seen["installs"] = sum(replica.installs for replica in sim.replicas.values())
        self.seen["reads"] = sim.reads

    def calm(self, duration_s: float) -> None:
        """Run a while without faults and with few requests."""
        sim = self.sim
        sim.duplicates = sim.losses = 0.0
        for replica in sim.replicas.values():
            if replica.engine is None:
                replica.start()
        sim.heal()
        end_s = sim.clock.now_s + duration_s
        while sim.clock.now_s < end_s:
            sim.run(self.rng.uniform(1.0, 15.0))
            self.ask(self.rng.choice(BURST[:3]))
            self.snapshot()

    def storm(self, duration_s: float) -> None:
        """Run a while with faults and bursts."""
        sim, rng = self.sim, self.rng
        sim.duplicates = rng.choice((0.0, 0.05, 0.2))
        sim.losses = rng.choice((0.0, 0.02, 0.1))
        sim.slow = {name: rng.choice((0.0, 0.0, 0.3)) for name in sim.names}
        end_s = sim.clock.now_s + duration_s
        while sim.clock.now_s < end_s:
            sim.run(rng.uniform(0.05, 0.6))
            self.ask(rng.choice(BURST))
            if rng.random() < 0.3:
                fault(sim, rng)
            if rng.random() < 0.1:
                self.snapshot()
        sim.slow = {}

    def leave_one_behind(self) -> None:
        """Isolate one replica while many entries are committed; then reconnect it, perhaps after a crash."""
        sim, rng = self.sim, self.rng
        sim.duplicates = sim.losses = 0.0
        sim.heal()
        away = sim.replicas[rng.choice(sim.names)]
        if rng.random() < 0.4 and away.engine is not None:
            away.crash()
        else:
            sim.isolate(away.name)
        end_s = sim.clock.now_s + rng.uniform(*AWAY_S)
        while sim.clock.now_s < end_s:
            sim.run(rng.uniform(1.0, 6.0))
            self.ask(rng.choice(BURST[1:]))
            if rng.random() < 0.3:
                self.snapshot()
        lag = max(len(sim.applied) - away.journal.last_index, 0)
        self.seen["lag"] = max(self.seen["lag"], lag)
        if away.engine is None:
            away.start()
        sim.heal()
        if rng.random() < 0.5:  # a storm before the replica has caught up
            self.storm(rng.uniform(*STORM_S))

    def ask(self, count: int) -> None:
        """Propose a burst to every leader, and read at about the same time."""
        for replica in self.sim.replicas.values():
            if replica.engine is None or not replica.engine.raft.leads:
                continue
            if self.rng.random() < 0.5:
                self.sim.read(replica)
                self.sim.schedule_tick(replica)
            size = self.rng.choice((1, 30, 300))
            taken = 0
            for _ in range(count):
                self.number += 1
                taken += replica.propose(b"\x01%d " % self.number + b"x" * size)
            if taken:
                self.sim.tick(replica)
            self.look(replica)

    def look(self, replica: Replica) -> None:
        """Count full windows, slices and lags."""
        if replica.engine is None:
            return
        raft = replica.engine.raft
        for known in raft.progress.values():
            waits = known.next <= raft.journal.last_index
            self.seen["window full"] += waits and known.phase is Phase.REPLICATE and not known.may_send
            self.seen["snapshot under way"] += known.phase is Phase.SNAPSHOT

    def snapshot(self) -> None:
        """Let a replica take a snapshot and compact its journal as far as allowed."""
        replica = self.sim.replicas[self.rng.choice(self.sim.names)]
        if replica.engine is not None:
            replica.take_snapshot(keep=self.rng.choice((0, 3, 100)))


@contextmanager
def limits(seed: int) -> Iterator[None]:
    """Set low bounds, chosen by the seed, so that they are reached."""
    rng = random.Random(f"limits/{seed}")
    entries, size_bytes = rng.choice((2, 16, 512)), rng.choice((500, 5_000, 1 << 20))
    with ExitStack() as stack:
        for place, name, value in (
            (progress, "WINDOW_REQUESTS", rng.choice((2, 5, 64))),
            (progress, "WINDOW_BYTES", rng.choice((1_000, 20_000, 4 << 20))),
            (log_replication, "APPEND_ENTRIES", entries),
            (log_replication, "APPEND_BYTES", size_bytes),
            (raft_log, "APPEND_ENTRIES", rng.choice((7, 512))),
            (raft_log, "APPLY_BYTES", rng.choice((300, 4 << 20))),
            (raft_log, "SYNC_POSTPONED_BYTES", rng.choice((0, 600, 32 << 10))),
            (snapshots, "CHUNK_BYTES", rng.choice((5_000, 100_000))),
            (log_compaction, "HELD_BACK_ENTRIES", rng.choice((40, 400, 1 << 18))),
        ):
            stack.enter_context(patch.object(place, name, value))
        yield


@contextmanager
def world(seed: int) -> Iterator[Deep]:
    """Run one deep world to its end. A broken promise raises a Violation."""
    with limits(seed):
        deep = Deep(seed)
        with deep.sim:
            deep.run()
            yield deep
