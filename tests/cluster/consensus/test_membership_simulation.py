"""Random membership changes under random faults: one leader per term, one history, no acknowledged entry lost."""

import random

import pytest

from forebay.cluster.consensus.interface import ChangeRefused, NotLeader, RemovedFromCluster, Role
from forebay.wal.configuration import ChangeKind
from tests.cluster.consensus.simulator import Replica, Simulation

SEEDS = 80
GROUPS = 8
FAULTY_S = 5.0
VOTERS_LEAST = 3
MEMBERS_MOST = 6


class Schedule:
    """Random membership changes and random faults."""

    def __init__(self, seed: int) -> None:
        self.sim = Simulation(seed, replicas=3, latency_s=0.004, membership=True)
        self.rng: random.Random = self.sim.random
        self.sim.duplicates = self.rng.choice([0.0, 0.02, 0.1])
        self.sim.losses = self.rng.choice([0.0, 0.0, 0.02])
        self.number = self.added = self.changes = self.transfers = 0
        self.lost: str | None = None
        """Replica whose disk is lost; it never returns under this ID."""

    def run(self) -> Simulation:
        sim, rng = self.sim, self.rng
        next_fault_s, next_change_s = rng.expovariate(4.0), rng.expovariate(4.0)
        while sim.clock.now_s < FAULTY_S:
            sim.run(0.02)
            self.work()
            if sim.clock.now_s >= next_fault_s:
                self.fault()
                next_fault_s = sim.clock.now_s + rng.expovariate(3.0)
            if sim.clock.now_s >= next_change_s:
                self.change()
                next_change_s = sim.clock.now_s + rng.expovariate(4.0)
            self.drive()
        sim.check_log_matching()
        self.settle()
        return sim

    def settle(self) -> None:
        """Heal all faults: every change ends, every added replica votes, and new entries commit."""
        sim = self.sim
        sim.duplicates = sim.losses = 0.0
        sim.heal()
        end_s = sim.clock.now_s + 40.0
        while sim.clock.now_s < end_s:
            for name in list(sim.names):
                self.start(sim.replicas[name])
            sim.connect_all()
            sim.run(0.05)
            self.drive()
            leader = sim.leader()
            if leader is not None and leader.engine is not None and self.lost is None:
                configuration = leader.engine.configuration
                if not configuration.learners and leader.engine.applied_index == leader.journal.last_index:
                    break
        else:
            raise AssertionError(f"the changes did not end: {sim.describe()}")
        sim.commit(b"\x01the end")
        sim.converge()
        sim.check_log_matching()

    def start(self, replica: Replica) -> None:
        if replica.engine is None and replica.removed is None and replica.name != self.lost:
            replica.start()

    def leaders(self) -> list[Replica]:
        return [r for r in self.sim.replicas.values() if r.engine is not None and r.engine.role is Role.LEADER]

    def work(self) -> None:
        for replica in list(self.sim.replicas.values()):
            if replica.engine is not None and self.rng.random() < 0.5:
                if replica.propose(b"\x01%d" % self.number):
                    self.sim.tick(replica)
                self.number += 1

    def drive(self) -> None:
        """Act like controllers and operators: promote learners, start added replicas, replace lost ones."""
        sim = self.sim
        for leader in self.leaders():
            assert leader.engine is not None
            learner = leader.engine.promotable()
            if learner is not None:
                self.changes += leader.change(ChangeKind.PROMOTE, learner)
                sim.tick(leader)
            elif self.lost is not None and leader.engine.configuration.holds(self.lost):
                if leader.change(ChangeKind.REPLACE, self.lost):
                    self.changes += 1
                    sim.tick(leader)
            placed = leader.placed()  # applied, hence committed
            if placed is None:
                continue
            for member in placed.configuration.members():
                if member.id not in sim.replicas:
                    sim.join(member.id)
            if self.lost is not None and not placed.configuration.holds(self.lost):
                sim.replicas[self.lost].removed = RemovedFromCluster(self.lost, 0)
                self.lost = None

    def change(self) -> None:
        """Request a random change from a replica that believes that it leads; many requests are rejected."""
        for leader in self.leaders():
            assert leader.engine is not None
            configuration = leader.engine.configuration
            members = list(configuration.members())
            kind = self.rng.randrange(5)
            if kind == 0 and len(members) < MEMBERS_MOST:
                done = leader.change(ChangeKind.ADD, f"n{self.added}")
                self.added += 1
            elif kind == 1 and len(configuration.voters) > VOTERS_LEAST:
                done = leader.change(ChangeKind.REMOVE, self.rng.choice(members).id)
            elif kind == 2:
                done = leader.change(ChangeKind.REPLACE, self.rng.choice(members).id)
            else:
                target = None if kind == 3 else self.rng.choice(members).id
                try:
                    leader.engine.transfer(target)
                    self.transfers += 1
                except (NotLeader, ChangeRefused):
                    pass
                done = False
            self.changes += done
            self.sim.tick(leader)

    def fault(self) -> None:
        sim, rng = self.sim, self.rng
        name = rng.choice(sim.names)
        peer = rng.choice([other for other in sim.names if other != name])
        replica = sim.replicas[name]
        kind = rng.randrange(9)
        if kind == 0 and replica.engine is not None:
            replica.crash()
        elif kind <= 2:
            self.start(replica)
            sim.connect_all()
        elif kind == 3:
            sim.break_link(name, peer)
        elif kind == 4:
            sim.isolate(name)
        elif kind == 5:
            sim.black.add((name, peer))
        elif kind == 6:
            sim.heal()
        elif kind == 7 and self.lost is None and self.may_be_lost(replica):
            self.lost = name
            if replica.engine is not None:
                replica.crash()
        elif replica.engine is not None:
            replica.take_snapshot(keep=rng.choice([0, 0, 3]))

    def may_be_lost(self, replica: Replica) -> bool:
        """Return whether a majority of disks remains without this one; otherwise no promise can hold."""
        leader = self.sim.leader()
        if leader is None or leader is replica or leader.engine is None:
            return False
        configuration = leader.engine.configuration
        return configuration.votes(replica.name) and len(configuration.voters) >= VOTERS_LEAST


@pytest.mark.campaign(4)
@pytest.mark.parametrize("group", range(GROUPS))
def test_h12_random_changes_under_random_faults_lose_nothing_and_end(group: int) -> None:
    acknowledged = changes = transfers = 0
    for seed in range(group * (SEEDS // GROUPS), (group + 1) * (SEEDS // GROUPS)):
        schedule = Schedule(seed)
        try:
            with schedule.run() as sim:
                acknowledged += len(sim.acknowledged)
        except BaseException as failure:
            failure.add_note(f"seed {seed}")
            raise
        changes += schedule.changes
        transfers += schedule.transfers
    assert acknowledged > 10 * (SEEDS // GROUPS)
    assert changes > 2 * (SEEDS // GROUPS)
    assert transfers > SEEDS // GROUPS
