"""Lost majority in simulated clusters: the power fails everywhere at a random time, and one disk is recovered.

The disk forgets what was not synced, tears what was being written, and dies once more while the new incarnation is
written. What was agreed is the oracle's; what the recovery says of it is held against that.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

from forebay.cluster.server import storage as storage_module
from forebay.cluster.server.recovery import RecoveryPlan, new_incarnation, plan_recovery, recover
from forebay.cluster.server.storage import Storage, open_storage
from forebay.cluster.system.clock import SystemClock
from forebay.wal import Entry, EntryKind, Incarnation, kind_of
from tests.simulation.replicas import SimReplica
from tests.simulation.world import World

PROFILES = ("net", "crash", "disk", "membership")
RUN_S = (0.3, 2.0)
"""When the power fails, virtual seconds."""

BEHIND = 0.6
"""Share of the rounds in which who is left was down before."""

OPERATIONS_MAX = 40
"""Operations of its disk after which the recovering process may die: some more than it has."""


class Died(BaseException):
    """The process is gone."""


class Loss(NamedTuple):
    """Result of one seed."""

    agreed: int
    """Entries that the cluster had agreed on."""
    kept: int
    lost: int
    uncertain: int
    deaths: int
    """How often the recovery died on the way."""


async def nobody(*given: object, **more: object) -> dict[str, Any]:
    """Stand in for asking the other replicas: none answers."""
    return {}


def lose_majority(seed: int) -> Loss | None:
    """Play one seed; AssertionError where a promise is broken, None where what is left has no history yet."""
    chance = random.Random(f"lost majority {seed}")
    with World(seed, profile=chance.choice(PROFILES)) as world:
        world.begin()
        world.faults.begin()
        world.operator.begin()
        world.run(chance.uniform(*RUN_S))
        # Some rounds, one is down for a while before: what the others do meanwhile is lost with them.
        up = [one for one in world.replicas.values() if one.up and world.may_lose(one.identity)]
        behind = chance.choice(up) if up and chance.random() < BEHIND else None
        if behind is not None:
            behind.crash()
            behind.lost = "it is down"
            world.run(chance.uniform(*RUN_S))
            behind.lost = ""
        assert world.violations == []
        for replica in world.replicas.values():
            if replica.up:
                replica.crash()
        members = world.oracle.members.newest
        left = [
            one
            for one in world.replicas.values()
            if not one.lost and not one.removed and not one.is_damaged and members is not None
            if members.votes(one.identity)
        ]
        if not left or not world.oracle.state.revision:
            return None
        return _recovered(world, behind if behind in left else chance.choice(left), chance)


def _recovered(world: World, survivor: SimReplica, chance: random.Random) -> Loss | None:
    points, name, deaths = world.oracle.points, survivor.called, 0
    with _opening(world, survivor):
        storage = open_storage(survivor.config, name)
        held = _entries(storage)
        first = storage.journal.first_index
        began = storage.state.revision > 0 or any(kind_of(entry.data) is EntryKind.BATCH for entry in held)
        storage.close()
        if not began:
            return None
        plan = asyncio.run(plan_recovery(survivor.config, name, clock=SystemClock()))
    last = plan.kept_index
    assert last == (first + len(held) - 1 if held else first - 1)

    # What the plan says is lost is what the oracle knows to be lost, and no more than it says.
    agreed = range(1, len(points))
    here = {entry.index: (entry.term, entry.data) for entry in held}
    lost = {
        index
        for index in agreed
        if index > last or (index in here and here[index] != (points[index].term, points[index].data))
    }
    assert all(index > plan.known_index for index in lost), (plan, sorted(lost))
    if plan.known_index < len(points):
        assert plan.known_revision == points[plan.known_index].revision
        assert plan.known_at == points[plan.known_index].state.at

    def die(where: str) -> NoReturn:
        survivor.disk.dead = True
        raise Died(where)

    while True:
        with _opening(world, survivor, die):
            survivor.disk.operations_left = chance.randrange(1, OPERATIONS_MAX) if chance.random() < 0.7 else None
            try:
                done = asyncio.run(recover(survivor.config, name, plan.id, by="ops", clock=SystemClock()))
            except Died:
                survivor.disk.lose_power()
                deaths += 1
            else:
                survivor.disk.operations_left = None
                assert done.recovery.incarnation == 2
        with _opening(world, survivor):
            storage = open_storage(survivor.config, name)
            incarnation, after = storage.environment.incarnation, _entries(storage)
            term = storage.journal.term
            storage.close()
        kept = {entry.index: entry for entry in after if entry.index <= last}
        assert all(kept[entry.index] == entry for entry in held if entry.index in kept)
        if incarnation.number == 2:
            break
        assert [entry for entry in after if entry.index >= first] == held, "it is the one or the other as a whole"
    _check_new(world, survivor, plan, incarnation, after, term)
    return Loss(len(points) - 1, len(points) - 1 - len(lost), len(lost), plan.uncertain_entries, deaths)


def _check_new(
    world: World, survivor: SimReplica, plan: RecoveryPlan, incarnation: Incarnation, after: list[Entry], term: int
) -> None:
    assert [entry.index for entry in after[-2:]] == [plan.kept_index + 1, plan.kept_index + 2]
    assert {entry.term for entry in after[-2:]} == {term}
    with _opening(world, survivor):
        storage = open_storage(survivor.config, survivor.called)
        found = new_incarnation._kept(storage)
        storage.close()
    state = found.state
    assert state.revision == plan.kept_revision + 1
    begun = state.recoveries[2]
    assert (begun.mark, begun.kept_index, begun.known_index) == (incarnation.mark, plan.kept_index, plan.known_index)
    assert state.next_job == begun.first_job > begun.last_job == plan.last_job
    assert found.placed.configuration.voter_ids == (plan.member,) and not found.placed.configuration.learners
    points = world.oracle.points
    if plan.kept_index < len(points) and plan.kept_revision == points[plan.kept_index].revision:
        before = points[plan.kept_index].state
        assert {job: one.state for job, one in state.jobs.items()} == {
            job: one.state for job, one in before.jobs.items()
        }


def _entries(storage: Storage) -> list[Entry]:
    journal = storage.journal
    if journal.last_index < journal.first_index:
        return []
    return journal.entries(journal.first_index, max_bytes=1 << 30, max_entries=1 << 20)


@contextmanager
def _opening(world: World, replica: SimReplica, die: Any = None) -> Iterator[None]:
    """Let `open_storage` find the simulated disk, and nobody answer."""

    def no_death(where: str) -> NoReturn:
        raise AssertionError(f"the process dies: {where}")

    replica.disk.start(die or no_death, lambda duration_s: None)
    with (
        patch.object(storage_module, "Environment", world.environments),
        patch.object(storage_module, "SnapshotStore", replica.make_store),
        patch.object(new_incarnation, "ask_replicas", nobody),
        patch.object(new_incarnation, "seals_of", lambda config, name, member: world.seals_of(member.id)),
    ):
        yield
