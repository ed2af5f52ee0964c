"""Faults of a simulation, drawn from the seed by profile, at random times until the world is healed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from forebay.cluster.consensus import ChangeRefused, NotLeader
from forebay.replica.decide.decide import decide
from forebay.replica.messages.commands import kind_of
from forebay.replica.messages.entries import Acceptance, Batch, Entry
from forebay.replica.values.units import Instant, Revision
from forebay.wal.codec import encode_batch
from tests.simulation import deep
from tests.simulation.clients import SimClient
from tests.simulation.replicas import SimReplica

if TYPE_CHECKING:
    from tests.simulation.world import World

PROFILES: Final[dict[str, tuple[str, ...]]] = {
    "net": (
        "break_link", "cut", "one_way_cut", "isolate", "partial_partition", "clog", "black_hole", "slow_link", "pause",
        "rogue_batch", "clock_jump", "agent_silent", "snapshot", "transfer",
    ),
    "crash": (
        "kill", "kill_leader", "power_cut", "die_at_operation", "die_at_operation", "die_at_operation", "tear", "tear",
        "stop", "break_link", "rogue_batch", "agent_restart", "snapshot", "transfer",
    ),
    "disk": (
        "failing_sync", "tear", "full_disk", "stall", "full_snapshots", "flip", "flip", "flip_snapshot",
        "flip_snapshot", "kill", "die_at_operation", "snapshot", "break_link",
    ),
    "membership": (
        "break_link", "cut", "one_way_cut", "isolate", "partial_partition", "black_hole", "pause", "kill",
        "kill_leader", "power_cut", "die_at_operation", "die_at_operation", "stop", "snapshot", "transfer", "lose_disk",
    ),
    "external_jobs": (
        "break_link", "isolate", "slow_link", "pause", "kill", "kill_leader", "power_cut", "agent_restart",
        "agent_restart", "agent_silent", "agent_silent", "snapshot", "transfer",
    ),
}  # fmt: skip
"""The kinds of faults of each profile; one that stands twice is drawn twice as often."""

DEEP_KINDS: Final = tuple(dict.fromkeys((*PROFILES["net"], *PROFILES["crash"], "stall", "full_snapshots")))
"""What goes wrong in the storms of `deep`: everything from which a replica comes back by itself."""

PROFILE_NAMES: Final = (*PROFILES, "all", deep.PROFILE)


class Faults:
    """Faults of one seed: a subset of its profile's kinds, at a random rate."""

    def __init__(self, world: World, profile: str) -> None:
        self.world = world
        self.rng = rng = world.fork()
        kinds = [kind for name in PROFILES if profile in (name, "all") for kind in PROFILES[name]] or list(DEEP_KINDS)
        # A part of them only: what goes wrong all the time hides what goes wrong seldom.
        self.kinds = [kind for kind in kinds if rng.random() < 0.7] or kinds
        self.period_s = rng.choice((0.1, 0.2, 0.4, 0.8)) * world.pace
        self.on = False
        self._begun = 0
        self.client = SimClient(world, 99)
        """Whose commands are in the batches of a would-be leader."""
        network = world.network
        if profile in ("net", "membership", "external_jobs", "all", deep.PROFILE):
            network.latency_s = rng.choice((0.000_3, 0.001, 0.01, 0.04))
            network.losses = rng.choice((0.0, 0.0, 0.01, 0.1))
            network.repeats = rng.choice((0.0, 0.5))
            network.breaks = rng.choice((0.0, 0.0, 0.002))
            world.request_losses = rng.choice((0.0, 0.02, 0.15))
            world.request_copies = rng.choice((0.0, 0.1))
        if profile != "net":
            for replica in world.replicas.values():
                replica.disk.sync_s = rng.choice((0.000_2, 0.001, 0.005))

    def begin(self) -> None:
        """Start to inject faults."""
        self.on = True
        self._begun += 1
        self._plan(self._begun)

    def _plan(self, begun: int) -> None:
        self.world.timeline.after(self.rng.expovariate(1 / self.period_s), self._strike, begun)

    def _strike(self, begun: int) -> None:
        if not self.on or begun != self._begun:
            return
        kind = self.rng.choice(self.kinds)
        strike: Callable[[], object] = getattr(self, kind)
        self.world.note("fault", kind)
        self.world.counts["faults"] += 1
        strike()
        self._plan(begun)

    # Drawing

    def _some(self) -> SimReplica:
        return self.world.replicas[self.rng.choice(self.world.names)]

    def _some_up(self) -> SimReplica | None:
        up = [replica for replica in self.world.replicas.values() if replica.up]
        return self.rng.choice(up) if up else None

    def _leader(self) -> SimReplica | None:
        return self.world.leader() or self._some_up()

    def _pair(self) -> tuple[str, str]:
        first, second = self.rng.sample(self.world.names, 2)
        return first, second

    def _while_s(self) -> float:
        return self.rng.choice((0.05, 0.3, 0.7, 1.5)) * self.rng.uniform(0.5, 1.5) * self.world.pace

    # Network

    def break_link(self) -> None:
        self.world.network.drop(*self._pair(), silently=self.rng.random() < 0.3)

    def cut(self) -> None:
        first, second = self._pair()
        self.cut_off([(first, second), (second, first)])

    def one_way_cut(self) -> None:
        self.cut_off([self._pair()])

    def isolate(self) -> None:
        leader = self._leader()
        name = leader.name if leader is not None and self.rng.random() < 0.6 else self._some().name
        self.cut_off([pair for pair in self.world.network.links if name in pair])

    def partial_partition(self) -> None:
        some = self.rng.sample(self.world.names, self.rng.randrange(1, len(self.world.names)))
        one_way = self.rng.random() < 0.3
        self.cut_off([
            (sender, receiver)
            for sender, receiver in self.world.network.links
            if (sender in some and receiver not in some) or (not one_way and sender not in some and receiver in some)
        ])  # fmt: skip

    def cut_off(self, pairs: list[tuple[str, str]], duration_s: float | None = None) -> None:
        """Let these links carry nothing for a while."""
        black = self.rng.random() < 0.5
        for pair in pairs:
            if black:
                self.world.network.links[pair].black = True
            else:
                self.world.network.links[pair].cut = True
                self.world.network.drop(*pair, silently=self.rng.random() < 0.5)
        self.world.timeline.after(self._while_s() if duration_s is None else duration_s, self._mend, pairs)

    def _mend(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            link = self.world.network.links[pair]
            if link.black:
                link.black = False
                self.world.network.drop(*pair)  # a stream that lost bytes is of no use any more
            link.cut = False

    def clog(self) -> None:
        self.world.network.links[self._pair()].clogged_s = self.world.timeline.now_s + self._while_s()

    def black_hole(self) -> None:
        pair = self._pair()
        self.world.network.links[pair].black = True
        self.world.timeline.after(self._while_s(), self._mend, [pair])

    def slow_link(self) -> None:
        link = self.world.network.links[self._pair()]
        link.slow_s = self.rng.choice((0.02, 0.1, 0.25))
        self.world.timeline.after(self._while_s() * 2, setattr, link, "slow_s", 0.0)

    # Processes

    def pause(self) -> None:
        replica = self._some_up()
        if replica is not None:
            replica.loop.hold(self.world.timeline.now_s + self._while_s())

    def kill(self) -> None:
        replica = self._some_up()
        if replica is not None:
            self._kill(replica)

    def kill_leader(self) -> None:
        replica = self._leader()
        if replica is not None:
            self._kill(replica)

    def power_cut(self) -> None:
        for replica in self.world.replicas.values():
            if replica.up:
                self._kill(replica, silently=True)

    def _kill(self, replica: SimReplica, *, silently: bool = False) -> None:
        self.world.note("kill", replica.name)
        replica.crash(silently=silently or self.rng.random() < 0.3)
        self.world.restart_later(replica)

    def die_at_operation(self) -> None:
        replica = self._some_up()
        if replica is not None:
            replica.disk.operations_left = self.rng.randrange(1, 30)

    def tear(self) -> None:
        """Die with a record of the sync log written and not synced."""
        replica = self._some_up()
        if replica is not None:
            replica.disk.log.dies = True

    def stop(self) -> None:
        replica = self._some_up()
        if replica is not None:
            replica.stop()

    def clock_jump(self) -> None:
        clock, far_s = self._some().clock, self.rng.choice((0.2, 8, 3600))
        clock.set(clock.offset_us + round(self.rng.uniform(-far_s, far_s) * 1_000_000))

    def rogue_batch(self) -> None:
        """A batch that a would-be leader decided on an older revision gets into the leader's journal (law 4)."""
        leader = self.world.leader()
        if leader is None or leader.controller is None:
            return
        now = leader.controller.state.revision
        older = [point.state for point in self.world.oracle.points[-12:] if 0 < point.revision < now]
        if not older:
            return
        state = self.rng.choice(older)
        request = self.client.request(self.client.submission())
        outcome = decide(state, request, state.at)
        if isinstance(outcome, Acceptance):
            entry = Entry(request.id, request.actor, kind_of(request.command), outcome.events)
            batch = Batch(Revision(state.revision), Instant(state.at), (entry,))
            leader.loop.call_soon(self._propose, leader, leader.generation, encode_batch(batch))

    def _propose(self, replica: SimReplica, generation: int, data: bytes) -> None:
        if replica.generation == generation and replica.serves and replica.leads:
            replica.guarded(replica.engine.propose, data)

    def transfer(self) -> None:
        """An operator transfers the leadership to the best follower, or to one that may lag."""
        leader = self.world.leader()
        if leader is not None:
            others = [replica.called for replica in self.world.replicas.values() if replica is not leader]
            target = self.rng.choice([None, *others])
            leader.loop.call_soon(self._hand_over, leader, leader.generation, target)

    def _hand_over(self, replica: SimReplica, generation: int, target: str | None) -> None:
        if replica.generation == generation and replica.serves and replica.leads:
            replica.loop.create_task(self._handing_over(replica, target))

    async def _handing_over(self, replica: SimReplica, target: str | None) -> None:
        with suppress(NotLeader, ChangeRefused):
            await replica.engine.transfer(target)
            self.world.counts["transfers"] += 1

    def snapshot(self) -> None:
        replica = self._some_up()
        if replica is not None:
            replica.loop.call_soon(self._save, replica, replica.generation)

    def _save(self, replica: SimReplica, generation: int) -> None:
        if replica.generation == generation and replica.serves and replica.controller is not None:
            if replica.controller.applied_index:
                replica.guarded(replica.controller.save_snapshot)

    # Disks

    def failing_sync(self) -> None:
        self._some().disk.next_sync_fails = True

    def full_disk(self) -> None:
        disk = self._some().disk
        disk.full = True
        self.world.timeline.after(self._while_s(), setattr, disk, "full", False)

    def full_snapshots(self) -> None:
        disk = self._some().disk
        disk.files_full = True
        self.world.timeline.after(self._while_s(), setattr, disk, "files_full", False)

    def stall(self) -> None:
        self._some().disk.stall_s = self._while_s()

    def flip(self) -> None:
        """Damage a value of a victim's journal; it is read when the replica starts again."""
        replica = self._victim()
        where = None if replica is None else replica.disk.flip_a_bit()
        if replica is not None and where is not None:
            replica.disk.damaged = where
            self.world.tell("flip", replica.name, where)
        if replica is not None:
            self.world.restart_later(replica)

    def flip_snapshot(self) -> None:
        """Damage a snapshot of a victim: an older one, or the ledger, has to do."""
        replica = self._victim()
        where = None if replica is None else replica.disk.files.flip_a_bit()
        if replica is not None and where is not None:
            self.world.tell("flip", replica.name, where)
        if replica is not None:
            self.world.restart_later(replica)

    def _victim(self) -> SimReplica | None:
        """Return a replica whose disk may be damaged permanently, because good copies exist elsewhere."""
        replica = self._some()
        if replica.lost or replica.removed or not self.world.may_lose(replica.identity):
            return None
        if replica.up:
            replica.crash()
        return replica

    def lose_disk(self) -> None:
        """A disk breaks for good, and an operator will have to replace its replica."""
        replica = self._some()
        if self.world.operator.active and replica.identity and not replica.lost and not replica.removed:
            if self.world.may_lose(replica.identity):
                self.world.lose_disk(replica)

    # Agents

    def agent_restart(self) -> None:
        self.rng.choice(self.world.agents).start()

    def agent_silent(self) -> None:
        self.rng.choice(self.world.agents).silent_s = self.world.timeline.now_s + self.rng.uniform(1, 4)
