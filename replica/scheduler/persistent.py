"""Admission of jobs that create, destroy or use persistent buffers.

Such jobs are few, and request several resources at once. They have their own queue, which the cycle merges with the
others by priority. A job that does not fit becomes the reservation head of the pool, like any other. It is never
backfilled past another head, because the buffers that it creates may never be released.

For a buffer that already exists, owner and state decide (SEMANTICS.md): creating a buffer that the user owns has no
effect, creating another user's name fails the job, a buffer being created or destroyed is waited for, and a buffer in
use is not destroyed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from forebay.replica.messages import events as e
from forebay.replica.model import (
    CREATE_ERROR,
    NATIVE,
    Buffer,
    BufferRequest,
    BufferState,
    CreatePersistent,
    Hold,
    Job,
    PersistentBuffer,
    Pool,
    Stage,
    delete_denied_reason,
    different_buffer_comment,
    duplicate_name_comment,
    format_amount,
    is_node_in,
    persistent_names,
)
from forebay.replica.operations import assign_slots, choose_mover, filesystem_of_pool, persistent_directory
from forebay.replica.scheduler.admission import (
    CycleState,
    free_bytes_for,
    limits_verdict,
    nodes_of,
    release_time,
    space_request_of,
    usable_bytes,
)
from forebay.replica.state import Facts
from forebay.replica.values import CANDIDATES_BEHIND_MAX, PERSISTENT_BUFFERS_MAX, Reason, Verdict, round_up

NEVER_RELEASED = 2**62
"""Release time of the space of a persistent buffer."""


class PersistentCycleState(CycleState, Protocol):
    """State of a scheduling cycle, with the fields that jobs with persistent buffers need in addition."""

    events: list[e.Event]
    held: dict[str, int]
    """Pool -> bytes that this cycle has allocated."""
    persistent_checked: int
    """Number of jobs with persistent buffers that this cycle has checked."""

    def fewest_jobs(self, cpus: int, partition: str) -> str:
        """Return the node of the partition (`node_set_name`) with the fewest jobs among those with enough CPUs.

        There must be one.
        """


class PersistentDecision(msgspec.Struct, frozen=True):
    """Decision on a job with persistent buffers."""

    verdict: Verdict
    events: tuple[e.Event, ...] = ()
    """Events that start the job's stage-in if `given`, else the event that holds the job; empty: the job waits."""
    given: bool = False
    node: str = ""
    """Node whose agent does the work, if no mover does."""
    needs: tuple[tuple[str, int], ...] = ()
    """(pool, bytes) that the job takes."""
    head_of: tuple[str, int] | None = None
    """Pool whose reservation head the job becomes, and the bytes it requests."""


def persistent_request(job: Job) -> BufferRequest | None:
    """Return the buffer request of a job that creates, destroys or uses persistent buffers; None for other jobs."""
    asked = job.request.buffer
    return asked if asked is not None and (asked.creates or asked.destroys or asked.uses) else None


def serve_persistent(
    current: PersistentCycleState, job: Job, buffer: Buffer, asked: BufferRequest
) -> PersistentDecision:
    """Decide on the job, and record the effects in the cycle, except the use of the node, which the caller records."""
    decision = persistent_decision(current, job, buffer, asked)
    current.persistent_checked += 1
    current.events.extend(assign_slots(current.state, current.slots, decision.events))
    if decision.head_of is not None:
        pool, size_bytes = decision.head_of
        current.reservation_heads[pool] = current.head_of(job, pool, size_bytes, current.free_in(pool))
    if decision.given:
        request = space_request_of(current.state, job, buffer)
        current.quotas.give_space(request.scheduling_class, request.pool, request.size_bytes, job.request.time_limit_s)
        for pool, size_bytes in decision.needs:
            current.held[pool] = current.held.get(pool, 0) + size_bytes
    return decision


def persistent_decision(
    current: PersistentCycleState, job: Job, buffer: Buffer, asked: BufferRequest
) -> PersistentDecision:
    """Return the decision on the job when the cycle reaches it. This changes nothing."""
    state = current.state
    request = space_request_of(state, job, buffer)
    limited = limits_verdict(current, request)
    if limited is not None:
        return PersistentDecision(limited)
    if current.persistent_checked >= CANDIDATES_BEHIND_MAX:
        return _wait_decision(f"at least {CANDIDATES_BEHIND_MAX} jobs with persistent buffers are ahead")
    under_way = current.slots.get(Stage.STAGE_IN, 0)
    if under_way >= state.site.operations_per_stage_max:
        return _wait_decision(f"{under_way} stage-ins are under way, which is the limit")
    if current.is_full:
        return _wait_decision("the job gets its space in the next scheduling cycle")
    refused = _permanent_failure(state, job, asked)
    if refused is not None:
        return PersistentDecision(Verdict(refused.reason, refused.comment), (refused,))
    sentence = _missing_name(current, job, asked)
    if sentence:
        return _wait_decision(sentence)
    creates = [
        _reservation_event(state, job, create) for create in asked.creates if create.name not in state.persistent
    ]
    needs: dict[str, int] = {buffer.pool: buffer.granted_bytes} if buffer.granted_bytes else {}
    if len(state.persistent) + len(creates) + _reserved_in_cycle(current) > PERSISTENT_BUFFERS_MAX:
        return _wait_decision(f"there are {len(state.persistent)} persistent buffers, which is the limit")
    for reserved in creates:
        if reserved is None:
            return _wait_decision("the pool of a persistent buffer that the job creates does not exist")
        needs[reserved.pool] = needs.get(reserved.pool, 0) + reserved.granted_bytes
    where = _find_agent(current, job, buffer, asked, [reserved for reserved in creates if reserved is not None])
    if isinstance(where, Verdict):
        return PersistentDecision(where)
    for pool, needed in sorted(needs.items()):
        head, free = current.reservation_heads.get(pool), free_bytes_for(current, pool, request.reservation)
        if head is not None:
            return _wait_decision(f"job {head.job} is first in the queue of pool {pool}")
        if needed > usable_bytes(state, pool):
            return _wait_decision(f"the request exceeds what pool {pool} has in service")
        if needed > free:
            verdict = _wait_decision("the pool does not have enough free space").verdict
            return PersistentDecision(verdict, head_of=(pool, needed))
        until = NEVER_RELEASED if creates else release_time(current, request)
        coming = current.quotas.upcoming_reservation_gate(
            pool, request.reservation, needed, until, partial(current.free_at, pool)
        )
        if coming is not None:
            return PersistentDecision(coming)
    attempt = job.attempt + 1
    events: list[e.Event] = [
        e.BufferAllocated(job.id, where.node, attempt, mover=where.mover, filesystems=where.filesystems),
        *(_with_location(state, reserved, where, attempt) for reserved in creates if reserved is not None),
    ]
    events.extend(
        e.PersistentDeletionStarted(destroy.name, job.id, destroy.hurry)
        for destroy in asked.destroys
        if destroy.name in state.persistent
    )
    verdict = _wait_decision("the job can get its space now").verdict
    return PersistentDecision(verdict, tuple(events), True, where.node, tuple(sorted(needs.items())))


def _wait_decision(sentence: str) -> PersistentDecision:
    return PersistentDecision(Verdict(Reason.BURST_BUFFER_RESOURCES, sentence))


def _permanent_failure(state: Facts, job: Job, asked: BufferRequest) -> e.JobHeld | None:
    """Return the event that holds a job which can never succeed, or None.

    Such a job creates a buffer with a name that is taken, or destroys another user's buffer.
    """
    for create in asked.creates:
        known = state.persistent.get(create.name)
        if known is not None and known.user != job.request.user:
            return e.JobHeld(job.id, Hold.SYSTEM, CREATE_ERROR, duplicate_name_comment(state.site.provider))
        difference = "" if known is None else _difference(state, known, create)
        if difference:
            comment = different_buffer_comment(state.site.provider, create.name, difference)
            return e.JobHeld(job.id, Hold.SYSTEM, CREATE_ERROR, comment)
    by_operator = job.request.effective_options.by_operator
    for destroy in asked.destroys:
        known = state.persistent.get(destroy.name)
        if known is not None and known.user != job.request.user and not by_operator:
            denied = delete_denied_reason(state.site.provider, destroy.name)
            return e.JobHeld(job.id, Hold.SYSTEM, denied, denied)
    return None


def _difference(state: Facts, known: PersistentBuffer, create: CreatePersistent) -> str:
    """Return how an existing buffer differs from the one that a job of its owner creates; empty if it does not."""
    pool = _pool(state, create.pool)
    if known.state is not BufferState.ALLOCATED or pool is None:
        return ""
    if pool.name != known.pool:
        return f"it is in pool {known.pool}, not {pool.name}"
    if known.granted_bytes not in (create.capacity_bytes, round_up(create.capacity_bytes, pool.granularity_bytes)):
        has, wanted = (format_amount(size, pool.unit) for size in (known.granted_bytes, create.capacity_bytes))
        return f"it has {has}, not {wanted}"
    if create.access and known.access and create.access != known.access:
        return "it has another access mode"
    return ""


def _reserved_in_cycle(current: PersistentCycleState) -> int:
    return sum(isinstance(event, e.PersistentReserved) for event in current.events)


def _changed_in_cycle(current: PersistentCycleState) -> Iterator[str]:
    for event in current.events:
        if isinstance(event, e.PersistentReserved | e.PersistentDeletionStarted):
            yield event.name


def _missing_name(current: PersistentCycleState, job: Job, asked: BufferRequest) -> str:
    """Return a sentence about the persistent buffer that the job waits for; empty if it waits for none."""
    state, moving = current.state, set(_changed_in_cycle(current))
    own = {create.name for create in asked.creates}
    for name in (*own, *(destroy.name for destroy in asked.destroys), *asked.uses):
        known = state.persistent.get(name)
        if name in moving or (known is not None and known.state is not BufferState.ALLOCATED):
            word = "being created or destroyed" if known is None or name in moving else known.state.word
            return f"persistent buffer {name} is {word}"
    for name in asked.uses:
        if name not in own and name not in state.persistent:
            return f"persistent buffer {name} does not exist yet"
    for destroy in asked.destroys:
        using = len(state.using.get(destroy.name, ()))
        starting = sum(
            isinstance(event, e.BufferAllocated | e.ExternalJobSpaceAllocated) and _uses(state, event.job, destroy.name)
            for event in current.events
        )
        if using + starting:
            return f"persistent buffer {destroy.name} is in use by {using + starting} jobs"
    return ""


def _uses(state: Facts, job_id: int, name: str) -> bool:
    asked = persistent_request(state.jobs[job_id])
    return asked is not None and name in asked.uses


def _reservation_event(state: Facts, job: Job, create: CreatePersistent) -> e.PersistentReserved | None:
    pool = _pool(state, create.pool)
    if pool is None:
        return None
    return e.PersistentReserved(
        name=create.name,
        job=job.id,
        user=job.request.user,
        gid=job.request.effective_options.gid,
        pool=pool.name,
        granted_bytes=round_up(create.capacity_bytes, pool.granularity_bytes),
        access=create.access,
        kind=create.type,
        node="",
    )


def _pool(state: Facts, name: str) -> Pool | None:
    if name:
        return state.pools.get(name)
    return next((pool for pool in state.pools.values() if pool.is_default), None)


class _AgentChoice(NamedTuple):
    """Agent that does a job's work: its node, or a mover of all shared filesystems it needs."""

    node: str
    mover: str = ""
    filesystems: tuple[str, ...] = ()


def _with_location(
    state: Facts, reserved: e.PersistentReserved, where: _AgentChoice, attempt: int
) -> e.PersistentReserved:
    """Return the event with the node, or the shared filesystem and directory, of the persistent buffer."""
    filesystem = filesystem_of_pool(state, reserved.pool)
    if filesystem is None:
        return msgspec.structs.replace(reserved, node=where.node)
    directory = persistent_directory(state, reserved.name, reserved.job, attempt)
    return msgspec.structs.replace(reserved, filesystem=filesystem.name, directory=directory)


def _find_agent(
    current: PersistentCycleState,
    job: Job,
    buffer: Buffer,
    asked: BufferRequest,
    creates: Sequence[e.PersistentReserved],
) -> _AgentChoice | Verdict:
    """Return the agent for a job's work, or the reason there is none.

    Work in shared filesystems needs a mover of all of them.
    """
    state = current.state
    names: dict[str, str] = {}
    """Shared filesystem, empty for a node -> description of a buffer in it."""
    if state.site.provider == NATIVE:
        if buffer.granted_bytes:
            own = filesystem_of_pool(state, buffer.pool)
            names["" if own is None else own.name] = f"pool {buffer.pool} has its buffers"
        for reserved in creates:
            filesystem = filesystem_of_pool(state, reserved.pool)
            names.setdefault("" if filesystem is None else filesystem.name, f"pool {reserved.pool} has its buffers")
        for name in sorted(persistent_names(asked)):
            known = state.persistent.get(name)
            if known is not None:
                names.setdefault(known.filesystem, f"persistent buffer {name} is")
    filesystems = tuple(state.filesystems[name] for name in names if name)
    if not filesystems:
        node = _find_node(current, job, asked)
        return node if isinstance(node, Verdict) else _AgentChoice(node)
    if "" in names:
        on_node, elsewhere = names[""], names[filesystems[0].name]
        sentence = (
            f"{on_node} on one node, and {elsewhere} in shared filesystem {filesystems[0].name}: no job can use both"
        )
        return Verdict(Reason.REQ_NODE_NOT_AVAIL, sentence, (("filesystem", filesystems[0].name),))
    mover = choose_mover(state, filesystems[0], current.slots.begun, filesystems[1:])
    if not mover:
        shown = ", ".join(filesystem.name for filesystem in filesystems)
        what = f"shared filesystem {shown}" if len(filesystems) == 1 else f"all of the shared filesystems {shown}"
        return Verdict(
            Reason.BURST_BUFFER_RESOURCES, f"no mover of {what} is up", (("filesystem", filesystems[0].name),)
        )
    nodes, cpus = nodes_of(state, job.id), job.request.cpus
    if job.request.effective_options.nodes and cpus > current.cpus_max_in(nodes):
        within = f" in partition {nodes}" if nodes else ""
        return Verdict(Reason.BURST_BUFFER_RESOURCES, f"no node that is up has enough CPUs for the job{within}")
    return _AgentChoice("", mover, tuple(filesystem.name for filesystem in filesystems))


def _find_node(current: PersistentCycleState, job: Job, asked: BufferRequest) -> str | Verdict:
    """Return the node whose agent does the work, or a verdict if there is none.

    With the provider native, a job's persistent buffers must be on one node.
    """
    state, cpus = current.state, job.request.cpus
    places: dict[str, str] = {}
    if state.site.provider == NATIVE:
        for name in (*asked.uses, *(destroy.name for destroy in asked.destroys)):
            known = state.persistent.get(name)
            if known is not None:
                places.setdefault(known.node, name)
    if len(places) > 1:
        where = ", ".join(f"{name} on {node}" for node, name in sorted(places.items()))
        return Verdict(Reason.REQ_NODE_NOT_AVAIL, f"the job's persistent buffers are on different nodes: {where}")
    nodes = nodes_of(state, job.id)
    if not places:
        if cpus > current.cpus_max_in(nodes):
            where = f" in partition {nodes}" if nodes else ""
            return Verdict(Reason.BURST_BUFFER_RESOURCES, f"no node that is up has enough CPUs for the job{where}")
        return current.fewest_jobs(cpus, nodes)
    node, name = next(iter(places.items()))
    if not is_node_in(state.partitions, nodes, node):
        sentence = f"persistent buffer {name} is on node {node}, which is not in partition {nodes}"
        return Verdict(Reason.PARTITION_CONFIG, sentence, (("partition", nodes), ("node", node)))
    use = current.node_use(node)
    if use is None or use[0] < cpus:
        lacks = "is not up" if use is None else f"has only {use[0]} CPUs"
        sentence = f"persistent buffer {name} is on node {node}, which {lacks}"
        return Verdict(Reason.REQ_NODE_NOT_AVAIL, sentence, (("node", node),))
    return node
