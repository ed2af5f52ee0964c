"""Cluster in memory: the state machine of a replica, simulated agents, and a clock that moves only when told to."""

from __future__ import annotations

from typing import Final, NamedTuple

from forebay.cluster.api.web.problems import rejection_problem
from forebay.cluster.testing.agents import JobPlan, SimulatedAgents
from forebay.replica.decide import decide
from forebay.replica.fold import apply_batch, find_reply, look_up_reply
from forebay.replica.messages import CONTROLLER, Batch, CachedReply, Command, Entry, Request, command_digest, features
from forebay.replica.messages import commands as c
from forebay.replica.model import Pool, Site
from forebay.replica.scheduler import SchedulingIndex, run_cycle
from forebay.replica.state import EMPTY, State
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, Rejection, Revision, parse_size

START: Final = Instant(1_767_225_600 * MICROSECONDS_PER_SECOND)
"""Time at which every simulation begins: 2026-01-01T00:00:00Z."""

CLUSTER_ID: Final = "0" * 32
CLUSTER_NAME: Final = "testing"

DISCLOSURE_KEY: Final = bytes(32)
"""Salt of ledger proofs, which this cluster does not give."""

STEPS_MAX: Final = 100_000
"""Happenings of one call of `advance`, count; more mean that jobs are retried without end."""

_JOBS_PER_STEP: Final = 1_000


class SettledCommand(NamedTuple):
    """Settled command: the batch it was settled in, and the state after it."""

    batch: Batch
    state: State

    @property
    def entry(self) -> Entry:
        """The command's entry, the only one of its batch."""
        return self.batch.entries[0]


class SimulatedClock:
    """Clock of the simulation, as clients need it."""

    def __init__(self, at: Instant) -> None:
        self.at = at

    def now(self) -> Instant:
        """Return the simulated time, µs since the epoch."""
        return self.at

    def monotonic_s(self) -> float:
        """Return the simulated time since the start, seconds."""
        return (self.at - START) / MICROSECONDS_PER_SECOND


class Simulation:
    """Settles one command a batch, followed by a scheduling cycle, as a leader without load does."""

    def __init__(self, pools: dict[str, str], granularity: str, nodes: int, cpus: int, site: Site) -> None:
        """Found a cluster; the first pool is the default."""
        self.clock = SimulatedClock(START)
        self.state: State = EMPTY
        self.settled: list[SettledCommand] = []
        """All commands; the one that settled revision n is at index n - 1."""
        self.agents = SimulatedAgents(self)
        self._index = SchedulingIndex(self.state)
        self._own_ids = 0
        founded = tuple(
            Pool(name, parse_size(size), parse_size(granularity), is_default=number == 0)
            for number, (name, size) in enumerate(pools.items())
        )
        names = tuple(f"n{number}" for number in range(1, nodes + 1))
        found = c.FoundCluster(CLUSTER_ID, CLUSTER_NAME, site, founded, names, disclosure_key=DISCLOSURE_KEY)
        self.settle(found, CONTROLLER)
        while self.state.feature_level < features.FEATURE_LEVEL_KNOWN:
            level = self.state.feature_level + 1
            self.settle(c.RaiseFeatureLevel(level, (("r1", level),)), CONTROLLER)
        for name in names:
            self.settle(c.RegisterNode(name, cpus, "1", name), c.Actor(c.ActorRole.AGENT, name))

    def plan(self, name: str, plan: JobPlan) -> None:
        """Set what happens to jobs of this name."""
        self.agents.plans[name] = plan

    def settle(self, command: Command, actor: c.Actor, command_id: bytes | None = None) -> CachedReply:
        """Settle a command and return its reply; a known ID gets its first reply.

        Raises:
            Problem: The command is rejected.
        """
        if command_id is None:
            self._own_ids += 1
            # The bits of a UUIDv7 at the simulated time; a client's IDs are random.
            command_id = (self.clock.at // 1_000).to_bytes(6, "big") + self._own_ids.to_bytes(10, "big")
        request = Request(command_id, actor, command)
        known = look_up_reply(self.state, request)
        if isinstance(known, Rejection):
            raise rejection_problem(known)
        if known is None:
            decision = decide(self.state, request, self.clock.at)
            events, rejection = ((), decision) if isinstance(decision, Rejection) else (decision.events, None)
            self._commit(Entry(command_id, actor, c.kind_of(command), events, rejection, command_digest(request)))
            self._run_cycles()
            known = find_reply(self.state, command_id)
            assert known is not None
        if known.rejection is not None:
            raise rejection_problem(known.rejection)
        return known

    def advance(self, duration_s: float) -> None:
        """Move the clock, and let everything happen that is due until then.

        Raises:
            RuntimeError: More happened than STEPS_MAX.
        """
        until = Instant(self.clock.at + round(duration_s * MICROSECONDS_PER_SECOND))
        for _ in range(STEPS_MAX):
            due = self.next_due()
            if due is None or due > until:
                self._move_to(until)
                return
            self._move_to(due)
            self.agents.perform_due()
        raise RuntimeError(f"more than {STEPS_MAX} things happened within {duration_s:g} s")

    def next_due(self) -> Instant | None:
        """Return the time of the next happening that needs no command, or None."""
        while not self._index.prepare(_JOBS_PER_STEP):
            pass
        own, agents = self._index.next_due(self.clock.at), self.agents.next_due()
        due = [at for at in (own, agents) if at is not None]
        return min(due) if due else None

    def _move_to(self, at: Instant) -> None:
        self.clock.at = Instant(max(self.clock.at, at))
        self._run_cycles()

    def _run_cycles(self) -> None:
        while events := run_cycle(self._index, self.clock.at):
            self._commit(Entry(b"", CONTROLLER, "run_scheduling_cycle", events))

    def _commit(self, entry: Entry) -> None:
        batch = Batch(Revision(self.state.revision), self.clock.at, (entry,))
        following = apply_batch(self.state, batch)
        assert following is not None
        self.state = following
        self._index.advance(following, entry.events)
        self.settled.append(SettledCommand(batch, following))
