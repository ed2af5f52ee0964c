"""Deep worlds: a whole cluster for half an hour and more of virtual time, with all limits reached.

Other profiles are short and dense: their journals are short, no replica lags far, and nothing expires. Here, quiet
minutes alternate with storms; a replica is absent for hundreds of entries and catches up by entries or a snapshot;
windows, requests, slices and chunks are small, so that they are full. Everything that waits is PACE times as slow as
elsewhere, or half an hour would be as many heartbeats as a hundred other seeds have.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from forebay.cluster.consensus.progress import Phase
from forebay.replica.messages import commands as c
from forebay.wal.journal import RECENT_MAX_BYTES
from tests.cluster.consensus.deep import limits
from tests.simulation.clients import SimClient

if TYPE_CHECKING:
    from tests.simulation.replicas import SimReplica
    from tests.simulation.world import World

PROFILE: Final = "deep"
PACE: Final = 20.0
"""Factor by which timers, agents and faults are slower than in the other profiles."""

DURATION_S: Final = 1800.0
CALM_S: Final = (200.0, 400.0)
STORM_S: Final = (10.0, 30.0)
AWAY_S: Final = (40.0, 90.0)
LULL: Final = 400.0
"""How much longer clients think where nobody does much."""

HASTE: Final = 80.0
"""And elsewhere: half an hour of what other profiles have for seconds would make tens of thousands of entries."""

BURST: Final = (3, 10, 40)
"""Commands that are sent at one moment, count."""

DECIDE_S: Final = (0.000_02, 0.001, 0.004)
"""What applying one entry takes, seconds: enough that a slice of applying ends before the entries do."""

RECENT_BYTES: Final = (0, 8_000, RECENT_MAX_BYTES)
"""What of its journal a replica keeps in memory: the rest is read from the disk, which elsewhere never happens."""

ANSWERS_KEPT_S: Final = (2, 40)
"""How long answers are kept, seconds: all of them are compared at every entry, so ten minutes would cost too much."""

LOOK_EVERY_S: Final = 1.0
"""How often it is counted what is full."""

SNAPSHOT_EVERY: Final = (100, 1000, 5000)
"""After how many entries snapshots are taken unasked, and journals compacted behind them, count."""


class Deep:
    """The course of one deep world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.fork()
        self._number = 0
        self._away: SimReplica | None = None
        world.decide_s = self.rng.choice(DECIDE_S)
        world.recent_bytes = self.rng.choice(RECENT_BYTES)

    def run(self) -> None:
        """Alternate calm, storm, and an absent replica, for half an hour."""
        world, rng = self.world, self.rng
        world.timeline.after(LOOK_EVERY_S, self._look)
        while world.timeline.now_s < DURATION_S and not world.violations:
            self._calm(rng.uniform(*CALM_S))
            self._storm(rng.uniform(*STORM_S))
            if rng.random() < 0.7:
                self._leave_one_behind(rng.uniform(*AWAY_S))
        world.lull = 1.0

    def _calm(self, duration_s: float) -> None:
        """Inject no new faults, and send few requests."""
        world = self.world
        world.faults.on = False
        world.lull = LULL
        self._run(duration_s, 10.0, (0, 1, BURST[0]))

    def _storm(self, duration_s: float) -> None:
        """Faults and bursts at once."""
        world = self.world
        world.lull = HASTE
        world.faults.begin()
        self._run(duration_s, 2.0, BURST)
        world.faults.on = False

    def _leave_one_behind(self, duration_s: float) -> None:
        """Isolate or stop one replica for long while many entries are committed; then let it return."""
        world, rng = self.world, self.rng
        away = world.replicas[rng.choice(world.names)]
        world.note("away", away.name)
        self._away = away
        world.lull = HASTE
        pairs = [pair for pair in world.network.links if away.name in pair]
        world.faults.cut_off(pairs, duration_s)
        if rng.random() < 0.4 and away.up:
            away.crash()
            world.restart_later(away)
        self._run(duration_s, 4.0, BURST[1:])
        if rng.random() < 0.5:  # and it is met by a storm before it has caught up
            self._storm(rng.uniform(*STORM_S))
        self._away = None

    def _run(self, duration_s: float, pause_s: float, burst: tuple[int, ...]) -> None:
        world, rng = self.world, self.rng
        end_s = world.timeline.now_s + duration_s
        while world.timeline.now_s < end_s and not world.violations:
            world.run(rng.uniform(0.2, 2.0) * pause_s)
            self._burst(rng.choice(burst))
            if rng.random() < 0.2:
                world.faults.snapshot()

    def _burst(self, count: int) -> None:
        """Send many requests at once; most are rejected, and rejections are in the history as well."""
        for _ in range(count):
            self._number += 1
            user = SimClient(self.world, 10_000 + self._number)
            user.stopped = True
            job = self.rng.randrange(1, 1 + max(self.world.oracle.state.jobs, default=1))
            command: c.Command = self.rng.choice((c.HoldJob(job), c.CancelJob(job, hurry=True)))
            if self.rng.random() < 0.05:
                command = user.submission()
            self.world.timeline.after(self.rng.uniform(0.0, 0.02), user.begin, user.request(command))

    def _look(self) -> None:
        """Count what is full."""
        world = self.world
        if world.ending:
            return
        world.timeline.after(LOOK_EVERY_S, self._look)
        counts, leader = world.counts, world.leader()
        if leader is None:
            return
        raft = leader.engine._engine.raft
        for known in raft.progress.values():
            waits = known.next <= raft.journal.last_index
            counts["window_full"] += waits and known.phase is Phase.REPLICATE and not known.may_send
            counts["snapshot_under_way"] += known.phase is Phase.SNAPSHOT
        counts["journal_most"] = max(counts["journal_most"], raft.journal.last_index - raft.journal.base_index)
        for replica in world.replicas.values():
            if replica.up:
                counts["slice_full"] += replica.engine.commit_index > replica.engine.applied_index
                counts["lag_most"] = max(counts["lag_most"], raft.journal.last_index - replica.engine.last_index)


def small_bounds(seed: int) -> AbstractContextManager[None]:
    """Have windows, requests, slices and chunks that are reached, as the seed says."""
    return limits(seed)
