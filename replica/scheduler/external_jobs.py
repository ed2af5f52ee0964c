"""Space for external jobs in a scheduling cycle, and lingering data that is removed to free space.

An external job is not in the queue: its scheduler has decided its order, and its setup waits for seconds only. External
jobs therefore get free space before native candidates, in order of arrival. Native jobs are protected from starvation
by the limit that bounds backfill: each external job that gets space of a pool before the first job in the pool's queue
counts as having passed it, and while a job waiting for the pool has been passed `MaxPasses` times, no external job gets
space. The same limit protects external jobs: the next job in the queue starts with a count of zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from forebay.replica.messages import events as e
from forebay.replica.model import Buffer, Job
from forebay.replica.operations import filesystem_of_pool, persistent_obstacle
from forebay.replica.scheduler.admission import (
    NOT_QUEUED,
    CycleState,
    SpaceRequest,
    free_bytes_for,
    space_decision,
    space_request_of,
)
from forebay.replica.scheduler.backfill import BEING_REMOVED, UNKNOWN_END
from forebay.replica.scheduler.gates import external_job_verdict
from forebay.replica.state import Facts
from forebay.replica.values import CANDIDATES_BEHIND_MAX, SKIPPED_MAX, Verdict

LINGERING_SCANNED_MAX = 1_000
"""Maximum number of lingering external jobs scanned in one pool for space to free, count: one millisecond. If they are
not enough, the request waits.
"""


class ExternalJobGrants(NamedTuple):
    """External jobs of one pool that get space now, and the first that does not fit, 0 for none."""

    given: tuple[int, ...]
    first: int = 0
    closed: bool = True
    """A later request would get nothing, however small."""


def grant_external_jobs(
    current: CycleState, pool: str, waiting: Iterable[int], pass_limit_reached: Iterable[int], room: int
) -> ExternalJobGrants:
    """Return the waiting external jobs of a pool that get space now, at most `room`.

    The caller must count their space as held. `pass_limit_reached` are native jobs that wait for the pool's space and
    have been passed as often as allowed.
    """
    state = current.state
    if any(_waits_for_space(current, job_id) for job_id in islice(pass_limit_reached, CANDIDATES_BEHIND_MAX)):
        return ExternalJobGrants(())
    free = free_bytes_for(current, pool, "")
    given: list[int] = []
    # The first job in the queue is not known before the cycle reaches it. This bound limits how often it is passed.
    room = min(room, max(1, state.site.max_passes))
    for job_id in islice(waiting, SKIPPED_MAX):
        if persistent_obstacle(state, state.jobs[job_id]):
            continue
        request = space_request_of(state, state.jobs[job_id], state.buffers[job_id])
        size_bytes, of_class = request.size_bytes, request.scheduling_class
        over = current.quotas.space_gate(of_class, pool, size_bytes, 0)
        if over is not None or _upcoming_reservation(current, request) is not None:
            continue  # this may not apply to the next external job
        if size_bytes > free:
            return ExternalJobGrants(tuple(given), job_id)
        if len(given) >= room:
            break
        free -= size_bytes
        current.quotas.give_space(of_class, pool, size_bytes, 0)
        given.append(job_id)
    return ExternalJobGrants(tuple(given), closed=False)


def space_for_setup(
    current: CycleState, pool: str, waiting: Iterable[int], pass_limit_reached: Iterable[int], lingering: Iterable[int]
) -> int:
    """Return the most that another setup would get of a pool, units of the pool, including lingering data's space.

    Limits of accounts and QOS are not considered. `waiting` and `pass_limit_reached` are those of
    `grant_external_jobs`.
    """
    state = current.state
    served = grant_external_jobs(current, pool, waiting, pass_limit_reached, SKIPPED_MAX)
    if served.closed:
        return 0
    taken = sum(state.buffers[job_id].granted_bytes for job_id in served.given)
    kept = sum(state.buffers[job_id].held_bytes for job_id in islice(lingering, LINGERING_SCANNED_MAX))
    room = free_bytes_for(current, pool, "") + kept
    if state.reservations:
        room = min(room, current.quotas.upcoming_space(pool, room, lambda instant: current.free_at(pool, instant)))
    return max(0, room - taken)


def space_event(state: Facts, job_id: int) -> e.ExternalJobSpaceAllocated:
    """Return the event that allocates the space of an external job, with the shared filesystems that it needs."""
    asked, filesystems = state.jobs[job_id].request.buffer, dict[str, None]()
    if asked is not None and asked.uses:
        own = filesystem_of_pool(state, state.buffers[job_id].pool)
        if own is not None:
            filesystems[own.name] = None
        filesystems.update(dict.fromkeys(state.persistent[name].filesystem for name in asked.uses))
    return e.ExternalJobSpaceAllocated(job_id, filesystems=tuple(filesystems))


def explain_setup_failures(current: CycleState, events: tuple[e.Event, ...]) -> tuple[e.Event, ...]:
    """Return the events, with the reason of each failed setup replaced by the limit that blocked it, if any."""
    return tuple(
        replace(event, reason=_limit_sentence(current, event.job) or event.reason)
        if isinstance(event, e.ExternalJobSetupFailed)
        else event
        for event in events
    )


def _limit_sentence(current: CycleState, job_id: int) -> str:
    """Return a sentence about the limit that blocks an external job, and for how long; empty if none does."""
    over = _limit_verdict(current, job_id)
    if over is None:
        return ""
    figures = ", ".join(f"{name} {value}" for name, value in over.figures)
    return f"{over.reason} for {current.state.site.external_job_setup_wait_s} s: {over.sentence} ({figures})"


def _limit_verdict(current: CycleState, job_id: int) -> Verdict | None:
    state = current.state
    request = space_request_of(state, state.jobs[job_id], state.buffers[job_id])
    return current.quotas.space_gate(request.scheduling_class, request.pool, request.size_bytes, 0)


def waiting_verdict(current: CycleState, job_id: int) -> Verdict:
    """Return the verdict on an external job whose setup waits, after its pool was served in the cycle."""
    state = current.state
    job, buffer = state.jobs[job_id], state.buffers[job_id]
    if persistent_obstacle(state, job):
        return external_job_verdict(state, job, buffer)
    coming = _upcoming_reservation(current, space_request_of(state, job, buffer))
    return _limit_verdict(current, job_id) or coming or external_job_verdict(state, job, buffer)


def _waits_for_space(current: CycleState, job_id: int) -> bool:
    """Return whether a job waits for space, and not for a limit, a node or a reservation."""
    state = current.state
    request = space_request_of(state, state.jobs[job_id], state.buffers[job_id])
    return space_decision(current, request) not in NOT_QUEUED


def _upcoming_reservation(current: CycleState, request: SpaceRequest) -> Verdict | None:
    """Return the coming reservation that needs the space, or None. The end of an external job is unknown."""
    if not current.state.reservations:
        return None
    return current.quotas.upcoming_reservation_gate(
        request.pool, "", request.size_bytes, UNKNOWN_END, lambda instant: current.free_at(request.pool, instant)
    )


def choose_lingering(
    current: CycleState,
    request: SpaceRequest,
    lingering: Iterable[int],
    coming_bytes: int,
    room: int,
) -> tuple[int, ...]:
    """Return the lingering external jobs whose data is removed for a request that does not fit, oldest first.

    Return none if that would not free enough. `coming_bytes` are being released already (`counts_for`); `room` is the
    maximum number.
    """
    reservation = request.reservation
    wanted = request.size_bytes - free_bytes_for(current, request.pool, reservation) - coming_bytes
    if wanted <= 0:
        return ()
    taken, got = [], 0
    for job_id in islice(lingering, LINGERING_SCANNED_MAX):
        taken.append(job_id)
        got += current.state.buffers[job_id].held_bytes
        if got >= wanted:
            return tuple(taken[:room])
    return ()


def counts_for(request: SpaceRequest, buffer: Buffer) -> bool:
    """Return whether the space of a draining buffer comes soon enough for a request.

    A setup of an external job waits for seconds only: long enough for a removal, but not for a stage-out.
    """
    return request.job.external_job is None or buffer.state in BEING_REMOVED


def needed_by_reason(job: Job) -> str:
    """Return the reason of a teardown of lingering data for a job."""
    return f"{f'job {job.id}' if job.external_job is None else job.external_job.name} needs the space"


def count_overtaking(current: CycleState, events: list[e.Event], given: dict[int, str]) -> None:
    """Count each external job in `events` that got space before the head of its pool's queue.

    `given` maps positions in `events` to pools.
    """
    for position, pool in given.items():
        head, event = current.reservation_heads.get(pool), events[position]
        if head is not None and isinstance(event, e.ExternalJobSpaceAllocated):
            events[position] = replace(event, passed=head.job)
