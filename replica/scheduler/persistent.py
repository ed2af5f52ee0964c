"""Jobs that create, destroy or use persistent buffers, at their turn in a scheduling pass: what each is told.

They are few, and ask for several things at once, so they stand in a line of their own, merged with the others by
priority. One that does not find its space becomes the first in line for that pool like any other. It never passes
another that is first in line, since what it creates may never be given back.

What already exists is judged by its owner and state: the same owner's buffer is simply there, another's name fails the
job, one that is coming or going is waited for, and one that others work with is not destroyed (SEMANTICS.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import msgspec

from replica.messages import events as e
from replica.model import (
    CREATE_ERROR,
    Buffer,
    BufferRequest,
    BufferState,
    CreatePersistent,
    Hold,
    Job,
    Pool,
    Stage,
    delete_denied,
    duplicate_name,
    is_in,
)
from replica.operations import with_turns
from replica.scheduler.admission import Turn, end_of, free_for, limits_verdict, nodes_of, usable_in, wish_of
from replica.state import Facts
from replica.values import CANDIDATES_BEHIND_MAX, PERSISTENT_BUFFERS_MAX, Reason, Verdict, round_up

NEVER_GIVEN_BACK = 2**62
"""In place of when space is given back that a persistent buffer takes."""


class NamedTurn(Turn, Protocol):
    """A pass, as far as such jobs need more of it."""

    events: list[e.Event]
    held: dict[str, int]
    """Pool -> bytes; what this pass gives is added."""
    named: int
    """Such jobs that had their turn in this pass."""

    def fewest_jobs(self, cpus: int, partition: str) -> str:
        """Return the node of the partition (`place_name`) that is up, has so many CPUs, and has the fewest jobs; there
        must be one.
        """


class NamedAnswer(msgspec.Struct, frozen=True):
    """What such a job is told. With `events` it goes ahead (or is held, where `node` is empty)."""

    verdict: Verdict
    events: tuple[e.Event, ...] = ()
    node: str = ""
    needs: tuple[tuple[str, int], ...] = ()
    """Pool -> what the job takes of it, bytes."""
    first_for: tuple[str, int] | None = None
    """The pool that it becomes the first in line for, and what it asks of it."""


def names_of(job: Job) -> BufferRequest | None:
    """Return what a job asks of buffers that creates, destroys or uses persistent ones, None for any other."""
    asked = job.request.buffer
    return asked if asked is not None and (asked.creates or asked.destroys or asked.uses) else None


def serve_named(turn: NamedTurn, job: Job, buffer: Buffer, asked: BufferRequest) -> NamedAnswer:
    """Judge the job at its turn, and note in the pass what follows; its node's use is for the caller to note."""
    answer = judge_named(turn, job, buffer, asked)
    turn.named += 1
    turn.events.extend(with_turns(turn.state, turn.turns, answer.events))
    if answer.first_for is not None:
        pool, size_bytes = answer.first_for
        turn.heads[pool] = turn.head_of(job, pool, size_bytes, turn.free_in(pool))
    if answer.node:
        wish = wish_of(turn.state, job, buffer)
        turn.headroom.give_space(wish.standing, wish.pool, wish.size_bytes, job.request.time_limit_s)
        for pool, size_bytes in answer.needs:
            turn.held[pool] = turn.held.get(pool, 0) + size_bytes
    return answer


def judge_named(turn: NamedTurn, job: Job, buffer: Buffer, asked: BufferRequest) -> NamedAnswer:
    """Return what the job is told at its turn. It changes nothing."""
    state = turn.state
    wish = wish_of(state, job, buffer)
    limited = limits_verdict(turn, wish)
    if limited is not None:
        return NamedAnswer(limited)
    if turn.named >= CANDIDATES_BEHIND_MAX:
        return _waits(f"at least {CANDIDATES_BEHIND_MAX} jobs with persistent buffers are before it")
    under_way = turn.turns.get(Stage.STAGE_IN, 0)
    if under_way >= state.policy.operations_per_stage_max:
        return _waits(f"{under_way} stage-ins are under way, and no more may be")
    if turn.is_full:
        return _waits("the job may have its space in the next pass")
    refused = _refused(state, job, asked)
    if refused is not None:
        return NamedAnswer(Verdict(refused.reason, refused.comment), (refused,))
    sentence = _waits_for_names(turn, job, asked)
    if sentence:
        return _waits(sentence)
    creates = [_reserved(state, job, create) for create in asked.creates if create.name not in state.persistent]
    needs: dict[str, int] = {buffer.pool: buffer.granted_bytes} if buffer.granted_bytes else {}
    if len(state.persistent) + len(creates) + _reserved_in_this_pass(turn) > PERSISTENT_BUFFERS_MAX:
        return _waits(f"there are {len(state.persistent)} persistent buffers, and no more may be")
    for reserved in creates:
        if reserved is None:
            return _waits("there is no such pool for a persistent buffer that the job creates")
        needs[reserved.pool] = needs.get(reserved.pool, 0) + reserved.granted_bytes
    node = _node(turn, job, asked)
    if isinstance(node, Verdict):
        return NamedAnswer(node)
    for pool, needed in sorted(needs.items()):
        head, free = turn.heads.get(pool), free_for(turn, pool, wish.reservation)
        if head is not None:
            return _waits(f"job {head.job} is first in line for the pool {pool}")
        if needed > usable_in(state, pool):
            return _waits(f"it asks for more than the pool {pool} has in service now")
        if needed > free:
            verdict = _waits("its pool has not enough free space").verdict
            return NamedAnswer(verdict, first_for=(pool, needed))
        until = NEVER_GIVEN_BACK if creates else end_of(turn, wish)
        coming = turn.headroom.coming_gate(pool, wish.reservation, needed, until, partial(turn.free_at, pool))
        if coming is not None:
            return NamedAnswer(coming)
    events: list[e.Event] = [e.BufferAllocated(job.id, node, job.attempt + 1)]
    events.extend(msgspec.structs.replace(reserved, node=node) for reserved in creates if reserved is not None)
    events.extend(
        e.PersistentDeletionStarted(destroy.name, job.id, destroy.hurry)
        for destroy in asked.destroys
        if destroy.name in state.persistent
    )
    verdict = _waits("the job may have its space now").verdict
    return NamedAnswer(verdict, tuple(events), node, tuple(sorted(needs.items())))


def _waits(sentence: str) -> NamedAnswer:
    return NamedAnswer(Verdict(Reason.BURST_BUFFER_RESOURCES, sentence))


def _refused(state: Facts, job: Job, asked: BufferRequest) -> e.JobHeld | None:
    """Return the failure that no waiting can cure: another user's name, or another user's buffer to destroy."""
    for create in asked.creates:
        known = state.persistent.get(create.name)
        if known is not None and known.user != job.request.user:
            return e.JobHeld(job.id, Hold.SYSTEM, CREATE_ERROR, duplicate_name(state.site.provider))
    by_operator = job.request.asked.by_operator
    for destroy in asked.destroys:
        known = state.persistent.get(destroy.name)
        if known is not None and known.user != job.request.user and not by_operator:
            denied = delete_denied(state.site.provider, destroy.name)
            return e.JobHeld(job.id, Hold.SYSTEM, denied, denied)
    return None


def _reserved_in_this_pass(turn: NamedTurn) -> int:
    return sum(isinstance(event, e.PersistentReserved) for event in turn.events)


def _given_in_this_pass(turn: NamedTurn) -> Iterator[str]:
    for event in turn.events:
        if isinstance(event, e.PersistentReserved | e.PersistentDeletionStarted):
            yield event.name


def _waits_for_names(turn: NamedTurn, job: Job, asked: BufferRequest) -> str:
    """Return why a persistent buffer keeps the job back, empty if none does."""
    state, moving = turn.state, set(_given_in_this_pass(turn))
    own = {create.name for create in asked.creates}
    for name in (*own, *(destroy.name for destroy in asked.destroys), *asked.uses):
        known = state.persistent.get(name)
        if name in moving or (known is not None and known.state is not BufferState.ALLOCATED):
            word = "coming or going" if known is None or name in moving else known.state.word
            return f"the persistent buffer {name} is {word}"
    for name in asked.uses:
        if name not in own and name not in state.persistent:
            return f"there is no persistent buffer {name} yet"
    for destroy in asked.destroys:
        using = len(state.using.get(destroy.name, ()))
        starting = sum(
            isinstance(event, e.BufferAllocated) and _uses(state, event.job, destroy.name) for event in turn.events
        )
        if using + starting:
            return f"{using + starting} jobs use the persistent buffer {destroy.name}"
    return ""


def _uses(state: Facts, job_id: int, name: str) -> bool:
    asked = names_of(state.jobs[job_id])
    return asked is not None and name in asked.uses


def _reserved(state: Facts, job: Job, create: CreatePersistent) -> e.PersistentReserved | None:
    pool = _pool(state, create.pool)
    if pool is None:
        return None
    return e.PersistentReserved(
        name=create.name,
        job=job.id,
        user=job.request.user,
        gid=job.request.asked.gid,
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


def _node(turn: NamedTurn, job: Job, asked: BufferRequest) -> str | Verdict:
    """Return the node whose agent does the work, or why there is none. Native buffers are where they were made."""
    state, cpus = turn.state, job.request.cpus
    places: dict[str, str] = {}
    if state.site.provider == "native":
        for name in (*asked.uses, *(destroy.name for destroy in asked.destroys)):
            known = state.persistent.get(name)
            if known is not None:
                places.setdefault(known.node, name)
    if len(places) > 1:
        where = ", ".join(f"{name} on {node}" for node, name in sorted(places.items()))
        return Verdict(Reason.REQ_NODE_NOT_AVAIL, f"its persistent buffers are on different nodes: {where}")
    nodes = nodes_of(state, job.id)
    if not places:
        if cpus > turn.cpus_max_in(nodes):
            where = f" in partition {nodes}" if nodes else ""
            return Verdict(Reason.BURST_BUFFER_RESOURCES, f"no node that is up could hold the job{where}")
        return turn.fewest_jobs(cpus, nodes)
    node, name = next(iter(places.items()))
    if not is_in(state.partitions, nodes, node):
        sentence = f"the persistent buffer {name} is on node {node}, which is not in partition {nodes}"
        return Verdict(Reason.PARTITION_CONFIG, sentence, (("partition", nodes), ("node", node)))
    use = turn.node_use(node)
    if use is None or use[0] < cpus:
        lacks = "is not up" if use is None else f"has only {use[0]} CPUs"
        sentence = f"the persistent buffer {name} is on node {node}, which {lacks}"
        return Verdict(Reason.REQ_NODE_NOT_AVAIL, sentence, (("node", node),))
    return node
