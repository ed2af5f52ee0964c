"""Random faults with many seeds: Raft's promises hold, and the cluster recovers."""

import random

import pytest

from tests.cluster.consensus.simulator import Simulation

SEEDS = 200
GROUPS = 10
FAULTY_S = 4.0


def fault(sim: Simulation, rng: random.Random) -> None:
    """Cause one fault, or end one."""
    name = rng.choice(sim.names)
    peer = rng.choice([other for other in sim.names if other != name])
    replica = sim.replicas[name]
    kind = rng.randrange(8)
    if kind == 0 and replica.engine is not None:
        replica.crash()
    elif kind <= 2 and replica.engine is None:
        replica.start()
        sim.connect_all()
    elif kind == 3:
        sim.break_link(name, peer)
    elif kind == 4:
        sim.isolate(name)
    elif kind == 5:
        sim.black.add((name, peer))
    elif kind == 6:
        sim.heal()
    elif replica.engine is not None:
        replica.take_snapshot(keep=rng.choice([0, 0, 3]))


def scenario(seed: int, replicas: int) -> Simulation:
    sim = Simulation(seed, replicas=replicas, latency_s=0.004)
    rng = sim.random
    sim.duplicates = rng.choice([0.0, 0.02, 0.1])
    sim.losses = rng.choice([0.0, 0.0, 0.02])
    number = 0
    end_s = FAULTY_S
    next_fault_s = rng.expovariate(4.0)
    while sim.clock.now_s < end_s:
        sim.run(0.02)
        for replica in sim.replicas.values():
            if replica.engine is not None and rng.random() < 0.2:
                sim.read(replica)
                sim.schedule_tick(replica)
            if replica.engine is not None and rng.random() < 0.5:
                number += 1
                if replica.propose(b"\x01%d" % number):
                    sim.tick(replica)
                else:
                    number -= 1
        if sim.clock.now_s >= next_fault_s:
            fault(sim, rng)
            next_fault_s = sim.clock.now_s + rng.expovariate(4.0)
    sim.check_log_matching()
    sim.converge()
    sim.check_log_matching()
    return sim


@pytest.mark.campaign(4)
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_acknowledged_entry_is_lost_and_all_replicas_converge_under_faults(group: int) -> None:
    acknowledged = 0
    for seed in range(group * (SEEDS // GROUPS), (group + 1) * (SEEDS // GROUPS)):
        try:
            with scenario(seed, replicas=5 if seed % 5 == 4 else 3) as sim:
                acknowledged += len(sim.acknowledged)
        except BaseException as failure:
            failure.add_note(f"seed {seed}")
            raise
    assert acknowledged > 20 * (SEEDS // GROUPS)


def test_h24_a_seed_always_gives_the_same_run() -> None:
    with scenario(7, replicas=5) as one, scenario(7, replicas=5) as two:
        assert one.leaders == two.leaders
        assert one.applied == two.applied
        assert one.clock.now_s == two.clock.now_s
