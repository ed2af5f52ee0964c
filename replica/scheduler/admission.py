"""What a candidate is told when its turn comes in a scheduling pass: one function for what is done and what is shown.

Both passes, the walk (`scheduling`) and the one over an index (`agenda_pass`), ask here, and so does whoever explains
why a job waits: what keeps it back and what is said of it cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple, Protocol

from replica.messages import events as e
from replica.model import AnyNode, Buffer, Job, Stage, Standing, is_in, place_name, standing_of
from replica.operations import Turns
from replica.scheduler.backfill import Head, expected_end
from replica.scheduler.priority import order_of
from replica.scheduler.quotas import Headroom
from replica.state import Facts, State
from replica.values import CANDIDATES_BEHIND_MAX, NEVER, TURNED_AWAY_MAX, Instant, Reason, Verdict, format_size

Place = tuple[int, int]
"""Where a candidate stands in a pass: what it is sorted by, and the job."""


def place_of(state: State, job: Job) -> Place:
    """Return where the job stands: active reservations first, then by effective priority, then by number."""
    return order_of(state, job, state.buffers.get(job.id)), job.id


class Turn(Protocol):
    """A pass as far as it has come: what was given away before the candidate's turn."""

    state: State
    at: Instant
    heads: dict[str, Head]
    turns: Turns
    """Stage -> the operations of it that are under way."""
    any_node: AnyNode
    """Who waits for CPUs of any node."""
    headroom: Headroom
    """What limits, licences and reservations still allow."""
    turned_away: dict[tuple[str, int, Standing | None], int]
    """(pool, CPUs, standing) -> candidates of that queue that a limit or a coming reservation turned away."""

    @property
    def is_full(self) -> bool:
        """Whether the pass may not have more events."""

    def free_in(self, pool: str) -> int:
        """Return what is free of a pool now, bytes; 0 for a pool that is not there."""

    def free_at(self, pool: str, instant: Instant) -> int:
        """Return what of a pool is free at a later instant if everybody gives back in time, bytes."""

    def head_of(self, job: Job, pool: str, size_bytes: int, free: int) -> Head:
        """Return the job as the first in line for a pool."""

    def node_use(self, node: str) -> tuple[int, int] | None:
        """Return the CPUs of a node and how many of them are free; None if it is not up."""

    def waits_for_node(self, node: str, place: Place) -> int:
        """Return the job before `place` that waits for CPUs of the node, 0 for none."""

    def cpus_max_in(self, partition: str) -> int:
        """Return the CPUs of the largest node of a partition (`place_name`) that is up; 0 if none is."""

    def has_node_for(self, cpus: int, place: Place, partition: str) -> bool:
        """Whether a node of the partition that nobody before `place` waits for has so many free CPUs."""

    def free_cpus(self) -> Iterable[tuple[str, int]]:
        """Yield each node that is up, by name, with its free CPUs."""


# Space ---------------------------------------------------------------------------------------------------------------


class SpaceAnswer(Enum):
    """What a candidate for space is told."""

    GIVEN = auto()
    NEXT_PASS = auto()
    STAGES_FULL = auto()
    NO_NODE = auto()
    NOT_ENOUGH = auto()
    TOO_FAR_BEHIND = auto()
    MUST_NOT_PASS = auto()
    LIMITED = auto()
    TURNED_AWAY = auto()
    RESERVED = auto()
    TOO_LARGE = auto()


NOT_IN_LINE = frozenset(
    {
        SpaceAnswer.NO_NODE,
        SpaceAnswer.LIMITED,
        SpaceAnswer.TURNED_AWAY,
        SpaceAnswer.RESERVED,
        SpaceAnswer.TOO_LARGE,
    }
)
"""Answers of gates: who gets one does not stand in the line for the pool."""

GATED = frozenset({SpaceAnswer.LIMITED, SpaceAnswer.RESERVED})
"""Answers of which only so many are given in one queue of one pass."""


class Wish(NamedTuple):
    """What a candidate for space asks for, and on whose behalf."""

    job: Job
    pool: str
    size_bytes: int
    standing: Standing | None

    @property
    def reservation(self) -> str:
        """The reservation that it is of, or empty."""
        return "" if self.standing is None else self.standing.reservation

    @property
    def partition(self) -> str:
        """The partition that it is of, or empty."""
        return "" if self.standing is None else self.standing.partition

    @property
    def queue(self) -> tuple[str, int, Standing | None]:
        """What it shares with those that gates treat alike."""
        return self.pool, self.job.request.cpus, self.standing


def wish_of(state: State, job: Job, buffer: Buffer) -> Wish:
    """Return what a job that waits for space asks for."""
    size_bytes = buffer.granted_bytes
    return Wish(job, buffer.pool if size_bytes else "", size_bytes, standing_of(job.request))


def available(turn: Turn, wish: Wish) -> int:
    """Return what of the pool the candidate may have now: what is free, less what is set aside for others, bytes."""
    return free_for(turn, wish.pool, wish.reservation)


def usable_in(state: State, pool: str) -> int:
    """Return the most that one request could get of a pool as it is now, bytes; 0 for one that is not there."""
    known = state.pools.get(pool)
    return 0 if known is None else known.usable_bytes


def free_for(turn: Turn, pool: str, reservation: str) -> int:
    """Return what of a pool is free for jobs of a reservation (or of none, if it is empty), bytes."""
    free = turn.free_in(pool)
    return max(0, free - turn.headroom.set_aside_bytes(pool, reservation)) if turn.state.reservations else free


def given_of(turn: Turn, events: Iterable[e.Event], pool: str) -> list[tuple[int, int]]:
    """Return when those whom a pass gave something of a pool should give it back, and how much, in ascending order."""
    state = turn.state
    return sorted(
        (expected_end(state, state.jobs[event.job], pool, turn.at), state.buffers[event.job].granted_bytes)
        for event in events
        if isinstance(event, e.BufferAllocated) and state.buffers[event.job].pool == pool
    )


def head_before(turn: Turn, wish: Wish) -> Head | None:
    """Return the first in line whom the candidate would pass; None for one who takes what is his reservation's own."""
    if not wish.size_bytes or wish.size_bytes <= turn.headroom.own_bytes(wish.pool, wish.reservation):
        return None
    return turn.heads.get(wish.pool)


def limits_verdict(turn: Turn, wish: Wish) -> Verdict | None:
    """Return which limit, or licence, keeps the candidate from staging, or None."""
    job, standing, headroom = wish.job, wish.standing, turn.headroom
    if standing is None:
        return None
    return (
        headroom.run_gate(standing, job.request.cpus)
        or headroom.space_gate(standing, wish.pool, wish.size_bytes, job.request.time_limit_s)
        or headroom.license_gate(standing)
    )


def run_verdict(turn: Turn, standing: Standing | None, cpus: int) -> Verdict | None:
    """Return which limit, or licence, keeps everybody of this standing who needs so many CPUs from running, or None."""
    return turn.headroom.run_gate(standing, cpus) or turn.headroom.license_gate(standing)


def coming_verdict(turn: Turn, wish: Wish) -> Verdict | None:
    """Return which reservation begins before the candidate would have given back what it then needs, or None."""
    if not turn.state.reservations:
        return None
    pool, until = wish.pool, end_of(turn, wish)
    return turn.headroom.coming_gate(
        pool, wish.reservation, wish.size_bytes, until, lambda instant: turn.free_at(pool, instant)
    )


def end_of(turn: Turn, wish: Wish) -> int:
    """Return when a candidate that gets its space now should have given it back."""
    return expected_end(turn.state, wish.job, wish.pool, turn.at)


def space_answer(turn: Turn, wish: Wish) -> SpaceAnswer:
    """Return what the candidate is told. It changes nothing but what the first in line knows of its own start."""
    policy = turn.state.policy
    if limits_verdict(turn, wish) is not None:
        return SpaceAnswer.LIMITED
    if turn.turns.get(Stage.STAGE_IN, 0) >= policy.operations_per_stage_max:
        return SpaceAnswer.STAGES_FULL
    if wish.job.request.cpus > turn.cpus_max_in(place_name(turn.state.partitions, wish.partition)):
        # Before it can become the first in line: who cannot be placed must not keep others from the pool.
        return SpaceAnswer.NO_NODE
    if wish.size_bytes > usable_in(turn.state, wish.pool):
        # Nor must who cannot have his space whoever gives back, since his pool has shrunk or was never that large.
        return SpaceAnswer.TOO_LARGE
    fits = wish.size_bytes <= available(turn, wish)
    if not fits and wish.pool in turn.heads:
        return SpaceAnswer.NOT_ENOUGH
    head = head_before(turn, wish)
    if head is not None and head.behind >= CANDIDATES_BEHIND_MAX:
        return SpaceAnswer.TOO_FAR_BEHIND
    if turn.turned_away.get(wish.queue, 0) >= TURNED_AWAY_MAX:
        return SpaceAnswer.TURNED_AWAY
    if not fits:
        return SpaceAnswer.NOT_ENOUGH
    if coming_verdict(turn, wish) is not None:
        return SpaceAnswer.RESERVED
    if head is not None and not head.may_be_passed(wish.size_bytes, end_of(turn, wish), turn.at, policy.max_passes):
        return SpaceAnswer.MUST_NOT_PASS
    return SpaceAnswer.NEXT_PASS if turn.is_full else SpaceAnswer.GIVEN


def take_note(turn: Turn, wish: Wish, answer: SpaceAnswer) -> Head | None:
    """Note the answer that a candidate got; return whom it would pass."""
    head = head_before(turn, wish)
    if head is not None and answer not in NOT_IN_LINE:
        head.behind += 1
    if answer in GATED and wish.size_bytes <= usable_in(turn.state, wish.pool):
        # Those who ask for more than their pool ever has are not looked at one by one (`agenda_parts`).
        turn.turned_away[wish.queue] = turn.turned_away.get(wish.queue, 0) + 1
    elif answer is SpaceAnswer.NOT_ENOUGH and wish.pool not in turn.heads:
        turn.heads[wish.pool] = turn.head_of(wish.job, wish.pool, wish.size_bytes, available(turn, wish))
    elif answer is SpaceAnswer.GIVEN:
        turn.headroom.give_space(wish.standing, wish.pool, wish.size_bytes, wish.job.request.time_limit_s)
    return head


def space_verdict(turn: Turn, job: Job, buffer: Buffer) -> Verdict:
    """Return what is said of a candidate for space at its turn."""
    wish = wish_of(turn.state, job, buffer)
    answer = space_answer(turn, wish)
    gated = {SpaceAnswer.LIMITED: limits_verdict, SpaceAnswer.RESERVED: coming_verdict}.get(answer)
    if gated is not None and (verdict := gated(turn, wish)) is not None:
        return verdict
    free, raw, head = available(turn, wish), turn.free_in(wish.pool), head_before(turn, wish)
    figures = [("asked", format_size(wish.size_bytes)), ("pool", wish.pool or "-"), ("free", format_size(raw))]
    if free != raw:
        figures.append(("set_aside", format_size(raw - free)))
    if head is not None:
        figures.append(("first_in_line", str(head.job)))
    elif answer is SpaceAnswer.NOT_ENOUGH:
        start_at = turn.head_of(job, wish.pool, wish.size_bytes, free).start_at
        if start_at != NEVER:
            figures.append(("expected_start_us", str(start_at)))
    under_way = turn.turns.get(Stage.STAGE_IN, 0)
    first = head.job if head is not None else 0
    passed = head.passed if head is not None else 0
    sentence = {
        SpaceAnswer.GIVEN: "the job may have its space now",
        SpaceAnswer.NEXT_PASS: "the job may have its space in the next pass",
        SpaceAnswer.STAGES_FULL: f"{under_way} stage-ins are under way, and no more may be",
        SpaceAnswer.NO_NODE: "no node that is up could hold the job"
        + (f" in partition {wish.partition}" if place_name(turn.state.partitions, wish.partition) else ""),
        SpaceAnswer.TOO_LARGE: (
            f"it asks for more than its pool has in service now, {format_size(usable_in(turn.state, wish.pool))}"
        ),
        SpaceAnswer.NOT_ENOUGH: "its pool has not enough free space",
        SpaceAnswer.TOO_FAR_BEHIND: (
            f"at least {CANDIDATES_BEHIND_MAX} jobs are between it and job {first}, which is first in line for the pool"
        ),
        SpaceAnswer.LIMITED: "a limit keeps the job back",
        SpaceAnswer.RESERVED: "a reservation keeps the job back",
        SpaceAnswer.TURNED_AWAY: f"at least {TURNED_AWAY_MAX} jobs of the same limits are before it and have to wait",
        SpaceAnswer.MUST_NOT_PASS: f"job {first} is first in line for the pool and has been passed {passed} times",
    }[answer]
    return Verdict(Reason.BURST_BUFFER_RESOURCES, sentence, tuple(figures))


# CPUs ----------------------------------------------------------------------------------------------------------------


class PlaceAnswer(Enum):
    """What a candidate for CPUs is told."""

    RUNS = auto()
    NEXT_PASS = auto()
    PRE_RUNS_FULL = auto()
    NODE_DOWN = auto()
    NO_NODE = auto()
    AFTER_OTHERS = auto()
    NOT_ENOUGH = auto()
    LIMITED = auto()


def nodes_of(state: Facts, job_id: int) -> str:
    """Return the nodes that a job may run on, as the `place_name` of its partition."""
    options = state.jobs[job_id].request.options
    return "" if options is None else place_name(state.partitions, options.partition)


def place_answer(turn: Turn, job: Job, buffer: Buffer | None) -> PlaceAnswer:
    """Return what the candidate is told: a job runs where its data is, or anywhere in its partition if it has none."""
    state, cpus, place = turn.state, job.request.cpus, place_of(turn.state, job)
    if run_verdict(turn, standing_of(job.request), cpus) is not None:
        return PlaceAnswer.LIMITED
    if buffer is None:
        nodes = nodes_of(state, job.id)
        could, first = cpus <= turn.cpus_max_in(nodes), turn.any_node.first_in(nodes)
        fits = not first and turn.has_node_for(cpus, place, nodes)
    else:
        node = state.nodes.get(job.node)
        if node is not None and node.down:
            return PlaceAnswer.NODE_DOWN
        use = turn.node_use(job.node)
        could = use is not None and use[0] >= cpus
        first = turn.any_node.first_for(job.node) or turn.waits_for_node(job.node, place)
        fits = not first and use is not None and use[1] >= cpus
    if fits:
        full = turn.turns.get(Stage.RUN, 0) >= state.policy.operations_per_stage_max
        if buffer is not None and full:
            return PlaceAnswer.PRE_RUNS_FULL
        return PlaceAnswer.NEXT_PASS if turn.is_full else PlaceAnswer.RUNS
    if not could:
        # It waits for a node to come, not for CPUs to become free: nobody is kept back for it.
        return PlaceAnswer.NO_NODE
    return PlaceAnswer.AFTER_OTHERS if first else PlaceAnswer.NOT_ENOUGH


WAITS: frozenset[PlaceAnswer] = frozenset({PlaceAnswer.NOT_ENOUGH, PlaceAnswer.PRE_RUNS_FULL})
"""Answers after which those behind must leave the candidate the CPUs that it waits for."""


def place_verdict(turn: Turn, job: Job, buffer: Buffer | None) -> Verdict:
    """Return what is said of a candidate for CPUs at its turn."""
    answer, cpus = place_answer(turn, job, buffer), job.request.cpus
    match answer:
        case PlaceAnswer.LIMITED:
            verdict = run_verdict(turn, standing_of(job.request), cpus)
            return verdict or Verdict(Reason.NONE, "nothing holds the job back")
        case PlaceAnswer.RUNS:
            return Verdict(Reason.NONE, "nothing holds the job back")
        case PlaceAnswer.NEXT_PASS:
            return Verdict(Reason.NONE, "the job runs in the next pass")
        case PlaceAnswer.PRE_RUNS_FULL:
            under_way = turn.turns.get(Stage.RUN, 0)
            return Verdict(Reason.BURST_BUFFER_OPERATION, f"{under_way} pre-runs are under way, and no more may be", ())
        case PlaceAnswer.NODE_DOWN:
            sentence = f"the job's data is on node {job.node}, which is down"
            return Verdict(Reason.NODE_DOWN, sentence, (("node", job.node),))
        case PlaceAnswer.NO_NODE:
            figures: tuple[tuple[str, str], ...] = (("cpus", str(cpus)), *_partition_figure(turn, job))
            return Verdict(Reason.REQ_NODE_NOT_AVAIL, "no node that is up has so many CPUs", figures)
        case PlaceAnswer.AFTER_OTHERS:
            if buffer is None:
                first = turn.any_node.first_in(nodes_of(turn.state, job.id))
            else:
                first = turn.any_node.first_for(job.node) or turn.waits_for_node(job.node, place_of(turn.state, job))
            return Verdict(Reason.PRIORITY, f"job {first} has priority", (("first_in_line", str(first)),))
        case PlaceAnswer.NOT_ENOUGH:
            partitions, nodes = turn.state.partitions, nodes_of(turn.state, job.id)
            free = ",".join(f"{name}:{free}" for name, free in turn.free_cpus() if is_in(partitions, nodes, name))
            figures = (("cpus", str(cpus)), ("free_cpus", free), *_partition_figure(turn, job))
            return Verdict(Reason.RESOURCES, "no node has enough free CPUs for the job", figures)


def _partition_figure(turn: Turn, job: Job) -> tuple[tuple[str, str], ...]:
    nodes = nodes_of(turn.state, job.id)
    return (("partition", nodes),) if nodes else ()
