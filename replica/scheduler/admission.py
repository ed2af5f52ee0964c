"""Admission of candidates in a scheduling cycle. The same functions decide and explain.

The cycle over the index, the reference implementation of the tests, and the explanation of why a job waits all call
these functions, so the reason shown cannot differ from the decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple, Protocol

from forebay.replica.messages import events as e
from forebay.replica.model import (
    Buffer,
    Job,
    NodeSetWaiters,
    SchedulingClass,
    Stage,
    is_node_in,
    node_set_name,
    scheduling_class_of,
)
from forebay.replica.operations import OperationSlots, choose_mover, filesystem_of_pool
from forebay.replica.scheduler.backfill import ReservationHead, expected_end
from forebay.replica.scheduler.priority import order_of
from forebay.replica.scheduler.quotas import QuotaCheck
from forebay.replica.state import Facts, State
from forebay.replica.values import CANDIDATES_BEHIND_MAX, NEVER, SKIPPED_MAX, Instant, Reason, Verdict, format_size

QueuePosition = tuple[int, int]
"""Position of a candidate in a scheduling cycle: sort key and job ID."""


def queue_position_of(state: State, job: Job) -> QueuePosition:
    """Return the job's position: active reservations first, then effective priority, then job ID."""
    return order_of(state, job, state.buffers.get(job.id)), job.id


class CycleState(Protocol):
    """State of a scheduling cycle when it reaches a candidate, including what the cycle has granted before."""

    state: State
    at: Instant
    reservation_heads: dict[str, ReservationHead]
    slots: OperationSlots
    """Stage -> number of its operations under way."""
    any_node: NodeSetWaiters
    """Jobs that wait for CPUs of any node of their partition."""
    quotas: QuotaCheck
    """Remaining limits, licences and reservations."""
    skipped: dict[tuple[str, int, SchedulingClass | None], int]
    """(pool, CPUs, class) -> number of candidates blocked by a limit or an upcoming reservation."""

    @property
    def is_full(self) -> bool:
        """Return whether the cycle has reached its limit of events."""

    def free_in(self, pool: str) -> int:
        """Return the free bytes of a pool; 0 if the pool does not exist."""

    def free_at(self, pool: str, instant: Instant) -> int:
        """Return the free bytes of a pool at a later instant, if all holders release their space in time."""

    def head_of(self, job: Job, pool: str, size_bytes: int, free: int) -> ReservationHead:
        """Return the reservation head that the job becomes in the queue for a pool."""

    def node_use(self, node: str) -> tuple[int, int] | None:
        """Return the CPUs of a node and how many of them are free; None if it is not up."""

    def waits_for_node(self, node: str, position: QueuePosition) -> int:
        """Return the job before `position` that waits for CPUs of the node; 0 if none does."""

    def cpus_max_in(self, partition: str) -> int:
        """Return the CPUs of the largest node of a partition (`node_set_name`) that is up; 0 if none is."""

    def has_node_for(self, cpus: int, position: QueuePosition, partition: str) -> bool:
        """Return whether a node of the partition has enough free CPUs and no job before `position` waits for it."""

    def free_cpus(self) -> Iterable[tuple[str, int]]:
        """Yield each node that is up, by name, with its free CPUs."""


# Space ---------------------------------------------------------------------------------------------------------------


class SpaceDecision(Enum):
    """Decision on a candidate for space."""

    GIVEN = auto()
    NEXT_CYCLE = auto()
    STAGES_FULL = auto()
    NO_NODE = auto()
    NO_MOVER = auto()
    NOT_ENOUGH = auto()
    TOO_FAR_BEHIND = auto()
    MUST_NOT_PASS = auto()
    LIMITED = auto()
    SKIPPED = auto()
    RESERVED = auto()
    TOO_LARGE = auto()


NOT_QUEUED = frozenset(
    {
        SpaceDecision.NO_NODE,
        SpaceDecision.NO_MOVER,
        SpaceDecision.LIMITED,
        SpaceDecision.SKIPPED,
        SpaceDecision.RESERVED,
        SpaceDecision.TOO_LARGE,
    }
)
"""Decisions of gates. A candidate with one of them does not count as waiting in the queue of the pool."""

GATED = frozenset({SpaceDecision.LIMITED, SpaceDecision.RESERVED})
"""Decisions that are made at most SKIPPED_MAX times per queue and cycle."""


class SpaceRequest(NamedTuple):
    """A candidate's request for space, with its scheduling class."""

    job: Job
    pool: str
    size_bytes: int
    scheduling_class: SchedulingClass | None

    @property
    def reservation(self) -> str:
        """Reservation of the job, or empty."""
        return "" if self.scheduling_class is None else self.scheduling_class.reservation

    @property
    def partition(self) -> str:
        """Partition of the job, or empty."""
        return "" if self.scheduling_class is None else self.scheduling_class.partition

    @property
    def queue(self) -> tuple[str, int, SchedulingClass | None]:
        """Key that candidates share if the gates treat them alike: pool, CPUs and scheduling class."""
        return self.pool, self.job.request.cpus, self.scheduling_class


def space_request_of(state: State, job: Job, buffer: Buffer) -> SpaceRequest:
    """Return the space request of a job that waits for space."""
    size_bytes = buffer.granted_bytes
    return SpaceRequest(job, buffer.pool if size_bytes else "", size_bytes, scheduling_class_of(job.request))


def available_bytes(current: CycleState, request: SpaceRequest) -> int:
    """Return the free bytes of the pool that the candidate may use: all but those set aside for other reservations."""
    return free_bytes_for(current, request.pool, request.reservation)


def usable_bytes(state: State, pool: str) -> int:
    """Return the bytes of a pool that are in service, the most a request can get; 0 if the pool does not exist."""
    known = state.pools.get(pool)
    return 0 if known is None else known.usable_bytes


def free_bytes_for(current: CycleState, pool: str, reservation: str) -> int:
    """Return the free bytes of a pool for jobs of a reservation; `reservation` empty: for jobs of none."""
    free = current.free_in(pool)
    return max(0, free - current.quotas.set_aside_bytes(pool, reservation)) if current.state.reservations else free


def releases_of_cycle(current: CycleState, events: Iterable[e.Event], pool: str) -> list[tuple[int, int]]:
    """Return (release time, bytes) of the space of a pool that the cycle's events allocate, in ascending order."""
    state = current.state
    return sorted(
        (expected_end(state, state.jobs[event.job], pool, current.at), state.buffers[event.job].granted_bytes)
        for event in events
        if isinstance(event, e.BufferAllocated) and state.buffers[event.job].pool == pool
    )


def head_before(current: CycleState, request: SpaceRequest) -> ReservationHead | None:
    """Return the reservation head that the candidate would be backfilled past.

    None if it uses its own reservation's space.
    """
    if not request.size_bytes or request.size_bytes <= current.quotas.own_bytes(request.pool, request.reservation):
        return None
    return current.reservation_heads.get(request.pool)


def limits_verdict(current: CycleState, request: SpaceRequest) -> Verdict | None:
    """Return the verdict of the limit or licence that blocks the candidate's stage-in, or None."""
    job, scheduling_class, quotas = request.job, request.scheduling_class, current.quotas
    if scheduling_class is None:
        return None
    return (
        quotas.run_gate(scheduling_class, job.request.cpus)
        or quotas.space_gate(scheduling_class, request.pool, request.size_bytes, job.request.time_limit_s)
        or quotas.license_gate(scheduling_class)
    )


def run_verdict(current: CycleState, scheduling_class: SchedulingClass | None, cpus: int) -> Verdict | None:
    """Return the verdict of the limit or licence that blocks runs of this class with this many CPUs, or None."""
    return current.quotas.run_gate(scheduling_class, cpus) or current.quotas.license_gate(scheduling_class)


def upcoming_reservation_verdict(current: CycleState, request: SpaceRequest) -> Verdict | None:
    """Return the verdict of a reservation that needs the candidate's space before its expected release, or None."""
    if not current.state.reservations:
        return None
    pool, until = request.pool, release_time(current, request)
    return current.quotas.upcoming_reservation_gate(
        pool, request.reservation, request.size_bytes, until, lambda instant: current.free_at(pool, instant)
    )


def release_time(current: CycleState, request: SpaceRequest) -> int:
    """Return the expected release time of the space if the candidate gets it now."""
    return expected_end(current.state, request.job, request.pool, current.at)


def space_decision(current: CycleState, request: SpaceRequest) -> SpaceDecision:
    """Return the decision on the candidate. This changes nothing except the cached estimate of the reservation head."""
    site = current.state.site
    if limits_verdict(current, request) is not None:
        return SpaceDecision.LIMITED
    if current.slots.get(Stage.STAGE_IN, 0) >= site.operations_per_stage_max:
        return SpaceDecision.STAGES_FULL
    if request.job.request.cpus > current.cpus_max_in(node_set_name(current.state.partitions, request.partition)):
        # Checked before the job can become the reservation head: a job that fits no node must not block the pool.
        return SpaceDecision.NO_NODE
    filesystem = filesystem_of_pool(current.state, request.pool)
    if filesystem is not None and not choose_mover(current.state, filesystem):
        return SpaceDecision.NO_MOVER
    if request.size_bytes > usable_bytes(current.state, request.pool):
        # Likewise, a job that exceeds its pool must not block it: no release of space would help.
        return SpaceDecision.TOO_LARGE
    fits = request.size_bytes <= available_bytes(current, request)
    if not fits and request.pool in current.reservation_heads:
        return SpaceDecision.NOT_ENOUGH
    head = head_before(current, request)
    if head is not None and head.behind >= CANDIDATES_BEHIND_MAX:
        return SpaceDecision.TOO_FAR_BEHIND
    if current.skipped.get(request.queue, 0) >= SKIPPED_MAX:
        return SpaceDecision.SKIPPED
    if not fits:
        return SpaceDecision.NOT_ENOUGH
    if upcoming_reservation_verdict(current, request) is not None:
        return SpaceDecision.RESERVED
    if head is not None and not head.may_be_backfilled(
        request.size_bytes, release_time(current, request), current.at, site.max_passes
    ):
        return SpaceDecision.MUST_NOT_PASS
    return SpaceDecision.NEXT_CYCLE if current.is_full else SpaceDecision.GIVEN


def note_decision(current: CycleState, request: SpaceRequest, decision: SpaceDecision) -> ReservationHead | None:
    """Note the decision on a candidate; return the reservation head that it would be backfilled past."""
    head = head_before(current, request)
    if head is not None and decision not in NOT_QUEUED:
        head.behind += 1
    if decision in GATED and request.size_bytes <= usable_bytes(current.state, request.pool):
        # Requests that exceed their pool are not counted, because the index keeps them in no queue (`index_row`).
        current.skipped[request.queue] = current.skipped.get(request.queue, 0) + 1
    elif decision is SpaceDecision.NOT_ENOUGH and request.pool not in current.reservation_heads:
        current.reservation_heads[request.pool] = current.head_of(
            request.job, request.pool, request.size_bytes, available_bytes(current, request)
        )
    elif decision is SpaceDecision.GIVEN:
        current.quotas.give_space(
            request.scheduling_class, request.pool, request.size_bytes, request.job.request.time_limit_s
        )
    return head


def space_verdict(current: CycleState, job: Job, buffer: Buffer) -> Verdict:
    """Return the verdict on a candidate for space when the cycle reaches it."""
    request = space_request_of(current.state, job, buffer)
    decision = space_decision(current, request)
    gated = {SpaceDecision.LIMITED: limits_verdict, SpaceDecision.RESERVED: upcoming_reservation_verdict}.get(decision)
    if gated is not None and (verdict := gated(current, request)) is not None:
        return verdict
    free, raw, head = available_bytes(current, request), current.free_in(request.pool), head_before(current, request)
    figures = [("asked", format_size(request.size_bytes)), ("pool", request.pool or "-"), ("free", format_size(raw))]
    if free != raw:
        figures.append(("set_aside", format_size(raw - free)))
    if head is not None:
        figures.append(("first_in_line", str(head.job)))
    elif decision is SpaceDecision.NOT_ENOUGH:
        start_at = current.head_of(job, request.pool, request.size_bytes, free).start_at
        if start_at != NEVER:
            figures.append(("expected_start_us", str(start_at)))
    under_way = current.slots.get(Stage.STAGE_IN, 0)
    first = head.job if head is not None else 0
    passed = head.passed if head is not None else 0
    in_service = usable_bytes(current.state, request.pool)
    sentence = {
        SpaceDecision.GIVEN: "the job can get its space now",
        SpaceDecision.NEXT_CYCLE: "the job gets its space in the next scheduling cycle",
        SpaceDecision.STAGES_FULL: f"{under_way} stage-ins are under way, which is the limit",
        SpaceDecision.NO_NODE: "no node that is up has enough CPUs for the job"
        + (f" in partition {request.partition}" if node_set_name(current.state.partitions, request.partition) else ""),
        SpaceDecision.NO_MOVER: f"no mover of the shared filesystem of pool {request.pool} is up",
        SpaceDecision.TOO_LARGE: (
            f"the request exceeds the {format_size(in_service)} that pool {request.pool} has in service"
        ),
        SpaceDecision.NOT_ENOUGH: "the pool does not have enough free space",
        SpaceDecision.TOO_FAR_BEHIND: (
            f"at least {CANDIDATES_BEHIND_MAX} jobs are between this job and job {first}, the first in the queue"
        ),
        SpaceDecision.LIMITED: "a limit blocks the job",
        SpaceDecision.RESERVED: "a reservation blocks the job",
        SpaceDecision.SKIPPED: f"at least {SKIPPED_MAX} jobs with the same limits are ahead and blocked",
        SpaceDecision.MUST_NOT_PASS: f"job {first} is first in the queue, and has been passed {passed} times",
    }[decision]
    return Verdict(Reason.BURST_BUFFER_RESOURCES, sentence, tuple(figures))


# CPUs ----------------------------------------------------------------------------------------------------------------


class PlaceDecision(Enum):
    """Decision on a candidate for CPUs."""

    RUNS = auto()
    NEXT_CYCLE = auto()
    PRE_RUNS_FULL = auto()
    NODE_DOWN = auto()
    NO_NODE = auto()
    AFTER_OTHERS = auto()
    NOT_ENOUGH = auto()
    LIMITED = auto()


def nodes_of(state: Facts, job_id: int) -> str:
    """Return the nodes that a job may run on, as the `node_set_name` of its partition."""
    options = state.jobs[job_id].request.options
    return "" if options is None else node_set_name(state.partitions, options.partition)


def runs_anywhere(job: Job, buffer: Buffer | None) -> bool:
    """Return whether a job may run on any node of its partition: it has no data, or its data lies in a shared
    filesystem.
    """
    return buffer is None or bool(job.mover)


def place_decision(current: CycleState, job: Job, buffer: Buffer | None) -> PlaceDecision:
    """Return the decision on a candidate for CPUs: on its data's node, or on any node (`runs_anywhere`)."""
    state, cpus, position = current.state, job.request.cpus, queue_position_of(current.state, job)
    if run_verdict(current, scheduling_class_of(job.request), cpus) is not None:
        return PlaceDecision.LIMITED
    if runs_anywhere(job, buffer):
        nodes = nodes_of(state, job.id)
        could, first = cpus <= current.cpus_max_in(nodes), current.any_node.first_in(nodes)
        fits = not first and current.has_node_for(cpus, position, nodes)
    else:
        node = state.nodes.get(job.node)
        if node is not None and node.down:
            return PlaceDecision.NODE_DOWN
        use = current.node_use(job.node)
        could = use is not None and use[0] >= cpus
        first = current.any_node.first_for(job.node) or current.waits_for_node(job.node, position)
        fits = not first and use is not None and use[1] >= cpus
    if fits:
        full = current.slots.get(Stage.RUN, 0) >= state.site.operations_per_stage_max
        if buffer is not None and full:
            return PlaceDecision.PRE_RUNS_FULL
        return PlaceDecision.NEXT_CYCLE if current.is_full else PlaceDecision.RUNS
    if not could:
        # The job waits for a node to appear, not for CPUs, so it delays no other job.
        return PlaceDecision.NO_NODE
    return PlaceDecision.AFTER_OTHERS if first else PlaceDecision.NOT_ENOUGH


KEEPS_CPUS: frozenset[PlaceDecision] = frozenset({PlaceDecision.NOT_ENOUGH, PlaceDecision.PRE_RUNS_FULL})
"""Decisions after which later candidates may not take the CPUs that the candidate waits for."""


def place_verdict(current: CycleState, job: Job, buffer: Buffer | None) -> Verdict:
    """Return the verdict on a candidate for CPUs when the cycle reaches it."""
    decision, cpus = place_decision(current, job, buffer), job.request.cpus
    match decision:
        case PlaceDecision.LIMITED:
            verdict = run_verdict(current, scheduling_class_of(job.request), cpus)
            return verdict or Verdict(Reason.NONE, "nothing blocks the job")
        case PlaceDecision.RUNS:
            return Verdict(Reason.NONE, "nothing blocks the job")
        case PlaceDecision.NEXT_CYCLE:
            return Verdict(Reason.NONE, "the job runs in the next scheduling cycle")
        case PlaceDecision.PRE_RUNS_FULL:
            under_way = current.slots.get(Stage.RUN, 0)
            return Verdict(Reason.BURST_BUFFER_OPERATION, f"{under_way} pre-runs are under way, which is the limit", ())
        case PlaceDecision.NODE_DOWN:
            sentence = f"the job's data is on node {job.node}, which is down"
            return Verdict(Reason.NODE_DOWN, sentence, (("node", job.node),))
        case PlaceDecision.NO_NODE:
            figures: tuple[tuple[str, str], ...] = (("cpus", str(cpus)), *_partition_figure(current, job))
            return Verdict(Reason.REQ_NODE_NOT_AVAIL, "no node that is up has {cpus} CPUs", figures)
        case PlaceDecision.AFTER_OTHERS:
            if runs_anywhere(job, buffer):
                first = current.any_node.first_in(nodes_of(current.state, job.id))
            else:
                first = current.any_node.first_for(job.node) or current.waits_for_node(
                    job.node, queue_position_of(current.state, job)
                )
            return Verdict(Reason.PRIORITY, f"job {first} has priority", (("first_in_line", str(first)),))
        case PlaceDecision.NOT_ENOUGH:
            partitions, nodes = current.state.partitions, nodes_of(current.state, job.id)
            free = ",".join(
                f"{name}:{free}" for name, free in current.free_cpus() if is_node_in(partitions, nodes, name)
            )
            figures = (("cpus", str(cpus)), ("free_cpus", free), *_partition_figure(current, job))
            return Verdict(Reason.RESOURCES, "no node has enough free CPUs for the job", figures)


def _partition_figure(current: CycleState, job: Job) -> tuple[tuple[str, str], ...]:
    nodes = nodes_of(current.state, job.id)
    return (("partition", nodes),) if nodes else ()
