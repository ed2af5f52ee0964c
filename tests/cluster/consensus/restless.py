"""Restless worlds: leaders change often, and each leaves an uncommitted tail on some replicas.

Random faults rarely combine in the way that election rules must handle. Here each act isolates a leader with some
peers, gives it entries, and removes it while the entries are under way. The others elect the next leader.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from forebay.cluster.consensus import log_replication, raft_log
from tests.cluster.consensus.simulator import Replica, Simulation, Violation

ACTS = 25


class Restless:
    """One restless world."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"restless/{seed}")
        self.sim = Simulation(seed, replicas=rng.choice((3, 5, 5)), latency_s=rng.choice((0.002, 0.02)))
        self.number = 0

    def run(self) -> None:
        sim, rng = self.sim, self.rng
        sim.batches_s = rng.choice((0.0, 0.01, 0.1))
        for _ in range(ACTS):
            sim.duplicates, sim.losses = rng.choice((0.0, 0.1, 0.3)), rng.choice((0.0, 0.0, 0.1))
            sim.slow = {name: rng.choice((0.0, 0.0, 0.05, 0.3)) for name in sim.names}
            self.until_led()
            for leader in self.leading():
                self.desert(leader)
            self.ask_all()
            sim.run(rng.uniform(0.0, 0.4))
            self.come_back()
        sim.slow, sim.batches_s = {}, 0.0
        sim.check_log_matching()
        self.need_no_minority()
        sim.converge()
        sim.check_log_matching()

    def need_no_minority(self) -> None:
        """Check that a majority can continue without the other replicas."""
        sim, rng = self.sim, self.rng
        gone = rng.sample(list(sim.replicas.values()), len(sim.replicas) // 2)
        for replica in sim.replicas.values():
            if replica in gone and replica.engine is not None:
                replica.crash()
            elif replica not in gone and replica.engine is None:
                replica.start()
        sim.duplicates = sim.losses = 0.0
        sim.heal()
        for attempt in range(5):
            data = b"\x01without a minority %d" % attempt
            sim.run(6.0, until=lambda: sim.leader() is not None)
            leader = sim.leader()
            if leader is not None and leader.propose(data):
                sim.tick(leader)
                if sim.run(6.0, until=lambda data=data: data in sim.acknowledged):  # type: ignore[misc]
                    return
        raise Violation(f"a majority commits nothing: {sim.describe()}")

    def leading(self) -> list[Replica]:
        """Return all replicas that believe that they lead."""
        return [one for one in self.sim.replicas.values() if one.engine is not None and one.engine.raft.leads]

    def until_led(self) -> None:
        """Wait for a leader, which need not be ready."""
        wants_ready = self.rng.random() < 0.8
        self.sim.run(5.0, until=lambda: bool(self.sim.leader() if wants_ready else self.leading()))

    def ask_all(self) -> None:
        """Propose to every leader, and read from it."""
        for replica in self.leading():
            assert replica.engine is not None
            if self.rng.random() < 0.7:
                self.sim.read(replica)
            for _ in range(self.rng.choice((0, 1, 3, 6))):
                self.number += 1
                replica.propose(b"\x01%d" % self.number)
            self.sim.tick(replica)

    def desert(self, leader: Replica) -> None:
        """Isolate a leader with some peers, in one direction or both, send requests, and perhaps crash it."""
        sim, rng = self.sim, self.rng
        for peer in sim.names:
            if peer == leader.name:
                continue
            kind = rng.randrange(5)
            if kind <= 1:
                sim.black |= {(leader.name, peer), (peer, leader.name)}
            elif kind == 2:
                sim.black.add((peer, leader.name))
            elif kind == 3:
                sim.black.add((leader.name, peer))
        for _ in range(rng.choice((1, 1, 3))):
            self.ask_all()
            sim.run(rng.choice((0.0, 0.003, 0.03, 0.1)))
        ending = rng.random()
        if ending < 0.3 and leader.engine is not None:
            leader.crash()
        elif ending < 0.6:
            sim.isolate(leader.name)
        sim.run(rng.choice((0.1, 0.5, 1.5)))
        if rng.random() < 0.2:
            other = sim.replicas[rng.choice(sim.names)]
            if other.engine is not None:
                other.take_snapshot(keep=rng.choice((0, 2)))

    def come_back(self) -> None:
        """Restore some of the cut links, in any order."""
        sim, rng = self.sim, self.rng
        for replica in rng.sample(list(sim.replicas.values()), len(sim.replicas)):
            if replica.engine is None and rng.random() < 0.7:
                replica.start()
        if rng.random() < 0.6:
            self.ask_all()  # two leaders may reach one replica at the same time
            sim.heal()
            self.ask_all()
            sim.run(rng.choice((0.0, 0.1)))
        else:
            for pair in sorted(sim.black | sim.cut):
                if rng.random() < 0.5:
                    sim.black.discard(pair)
                    sim.cut.discard(pair)
            sim.connect_all()


@contextmanager
def world(seed: int) -> Iterator[Simulation]:
    """Run one restless world to its end. A broken promise raises a Violation."""
    restless = Restless(seed)
    choice = restless.rng.choice
    postponed = patch.multiple(
        raft_log,
        SYNC_POSTPONED_BYTES=choice((0, 0, raft_log.SYNC_POSTPONED_BYTES)),
        SYNC_POSTPONED_S=choice((0.03, raft_log.SYNC_POSTPONED_S)),
    )
    slices = patch.object(log_replication, "APPEND_ENTRIES", choice((1, 3, log_replication.APPEND_ENTRIES)))
    with postponed, slices, restless.sim as sim:
        restless.run()
        yield sim
