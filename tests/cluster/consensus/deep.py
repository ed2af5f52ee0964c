"""Deep worlds: tens of virtual minutes, thousands of entries, and windows, slices, lags and tails that are full.

What the small worlds of `test_simulation` never fill is made small here, and what they never wait for happens: a
replica that is away for thousands of entries, bursts that no window takes at once, snapshots that are taken, sent and
verified in the middle of all that, and minutes in which nothing goes wrong.
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
"""Ten times as slow as usual, so that a minute is as many heartbeats as the small worlds have in one of their lives."""

ROUNDS = 5
CALM_S = (60.0, 200.0)
STORM_S = (2.0, 8.0)
AWAY_S = (20.0, 60.0)
BURST = (1, 4, 30, 150)
"""Entries proposed at once, count."""


class Deep:
    """One deep world; `seen` counts what was full, or long, in it."""

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
        """A while in which nothing fails, and little is asked for."""
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
        """Faults and bursts at once."""
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
        """One replica hears nothing for long, while much is agreed on; then it is back, as it was or after a crash."""
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
        if rng.random() < 0.5:  # and it is met by a storm before it has caught up
            self.storm(rng.uniform(*STORM_S))

    def ask(self, count: int) -> None:
        """Propose a burst at everybody who leads, and ask for a state, at about the same time."""
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
        """Count what is full."""
        if replica.engine is None:
            return
        raft = replica.engine.raft
        for known in raft.progress.values():
            waits = known.next <= raft.journal.last_index
            self.seen["window full"] += waits and known.phase is Phase.REPLICATE and not known.may_send
            self.seen["snapshot under way"] += known.phase is Phase.SNAPSHOT

    def snapshot(self) -> None:
        """Somebody takes a snapshot, and compacts behind it as far as it may."""
        replica = self.sim.replicas[self.rng.choice(self.sim.names)]
        if replica.engine is not None:
            replica.take_snapshot(keep=self.rng.choice((0, 3, 100)))


@contextmanager
def limits(seed: int) -> Iterator[None]:
    """Have bounds that are reached, as the seed says."""
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
    """Run one deep world to its end; what is wrong is raised as a Violation."""
    with limits(seed):
        deep = Deep(seed)
        with deep.sim:
            deep.run()
            yield deep
