"""What agents must do: a query over the state, pulled and level-triggered (law 7).

An order stands in the answer for as long as it is to be done or going on; when it is gone, the agent ends the
operation. (job, attempt) names an order for ever.
"""

from __future__ import annotations

from typing import NamedTuple

from replica.model import (
    NATIVE,
    NO_EXTRA,
    NOTHING_SPECIAL,
    TRANSFERS,
    Access,
    Buffer,
    BufferState,
    CreatePersistent,
    DestroyPersistent,
    Job,
    JobOptions,
    JobState,
    Order,
    PoolUnit,
    Provision,
    SpecialTransfers,
    Stage,
    Transfer,
    TransferRules,
    choices_of,
    expand_roots,
    provider_facts,
    provision_of,
    stage_of,
    waits_for_slot,
)
from replica.operations import cap_s, node_bytes_s, rules_in_force, shares_of
from replica.state import State


def orders_for(state: State, node: str) -> tuple[Order, ...]:
    """Return what the node's agent has to do at this state, by job id."""
    orders = []
    governed = _governed(state, node)
    for job_id in sorted(state.on_node.get(node, ())):
        job = state.jobs[job_id]
        buffer = state.buffers.get(job_id)
        if job.stuck or job.retry_at or waits_for_slot(job, buffer) is not None:
            continue
        stage = stage_of(job, buffer)
        if stage is not None:
            orders.append(_order(state, job, buffer, stage, governed if stage in TRANSFERS else None))
    return tuple(orders)


class _Governed(NamedTuple):
    """By what a node's transfers are governed."""

    rules: TransferRules
    node_bytes_s: int | None


def _governed(state: State, node: str) -> _Governed | None:
    rules = rules_in_force(state)
    return None if rules is None else _Governed(rules, node_bytes_s(state, rules, node))


def _order(state: State, job: Job, buffer: Buffer | None, stage: Stage, governed: _Governed | None) -> Order:
    policy, spec = state.policy, job.spec
    transfers: tuple[Transfer, ...] = ()
    roots: tuple[str, ...] = ()
    timeout_s = policy.other_timeout_s
    access: tuple[Access, ...] = ()
    if buffer is not None:
        access = buffer.request.access
        if stage is Stage.STAGE_IN:
            transfers, timeout_s = buffer.request.stage_in, policy.stage_in_timeout_s
            roots = expand_roots(policy.sources, spec.user)
        elif stage is Stage.STAGE_OUT:
            transfers, timeout_s = buffer.request.stage_out, policy.stage_out_timeout_s
            roots = expand_roots(policy.destinations, spec.user)
        timeout_s = cap_s(state, stage) or timeout_s
    running = stage is Stage.RUN
    options = state.options.get(job.id)
    provision = None if buffer is None else provision_of(state)
    extra = state.extras.get(job.id, NO_EXTRA)
    works = stage in (Stage.STAGE_IN, Stage.TEARDOWN)
    creates, destroys = persistent_work(state, job.id, options) if works else ((), ())
    return Order(
        job=job.id,
        attempt=job.attempt,
        stage=stage.word,
        user=spec.user,
        name=spec.name,
        workdir=spec.workdir,
        capacity_bytes=0 if buffer is None else buffer.granted_bytes,
        has_buffer=buffer is not None,
        access=tuple(way.name.lower() for way in access),
        transfers=transfers,
        roots=expand_roots(policy.destinations, spec.user) if running else roots,
        timeout_s=0 if running else timeout_s,
        script=spec.script if running or provision is not None else "",
        output=spec.output if running else "",
        environment=spec.environment if running else (),
        time_limit_s=spec.time_limit_s if running or provision is not None else 0,
        cpus=spec.cpus,
        cancel=running and (job.cancelled or extra.requeueing),
        started=running and job.state in (JobState.RUNNING, JobState.SUSPENDED),
        suspend=running and job.state is JobState.SUSPENDED,
        hurry=job.hurry,
        creates=creates,
        destroys=destroys,
        uses=() if options is None or options.buffer is None else options.buffer.uses,
        provision=provision,
        directives="" if buffer is None or provision is None else buffer.request.text,
        pool="" if buffer is None or provision is None else buffer.pool or _default_pool(state, provision),
        pool_is_bytes=buffer is None or state.pool_units.get(buffer.pool, PoolUnit.BYTES) is PoolUnit.BYTES,
        gid=0 if options is None else options.gid,
        options=None if provision is None else options,
        special=special_transfers(state, job, buffer, stage),
        rules=None if governed is None else governed.rules,
        shares=None
        if governed is None
        else shares_of(state, governed.rules, spec.user, job.node, governed.node_bytes_s),
    )


def persistent_work(
    state: State, job: int, options: JobOptions | None
) -> tuple[tuple[CreatePersistent, ...], tuple[DestroyPersistent, ...]]:
    """Return the persistent buffers that the job still has to make, and those that it has to remove: one that it had
    not finished making is removed by its teardown.
    """
    creates: list[CreatePersistent] = []
    destroys: list[DestroyPersistent] = []
    if options is None or options.buffer is None:
        return (), ()
    for wanted in options.buffer.creates:
        made = state.persistent.get(wanted.name)
        if made is not None and made.job == job and made.state is BufferState.ALLOCATING:
            creates.append(
                CreatePersistent(made.name, made.granted_bytes, made.pool, made.access, made.type, wanted.place)
            )
    for unwanted in options.buffer.destroys:
        made = state.persistent.get(unwanted.name)
        if made is not None and made.job == job and made.state is BufferState.DELETING:
            destroys.append(DestroyPersistent(made.name, made.hurry or unwanted.hurry, unwanted.place))
    for wanted in options.buffer.creates:
        made = state.persistent.get(wanted.name)
        if made is not None and made.job == job and made.state is BufferState.DELETING:
            destroys.append(DestroyPersistent(made.name, True, wanted.place))
    return tuple(creates), tuple(destroys)


def _default_pool(state: State, provision: Provision) -> str:
    """Return the pool that a request without one is for: some are told the default even where nothing is reserved."""
    if not provider_facts(provision.provider).needs_pool:
        return ""
    return next((name for name in sorted(state.pools) if state.pools[name].is_default), "")


def special_transfers(state: State, job: Job, buffer: Buffer | None, stage: Stage) -> SpecialTransfers | None:
    """Return what the order of this stage has beside its transfers; None for most."""
    options = state.options.get(job.id)
    asked = None if options is None else options.buffer
    moving = stage in (Stage.STAGE_IN, Stage.STAGE_OUT)
    if asked is None or buffer is None or not moving or state.site.provider != NATIVE:
        return None
    outgoing = stage is Stage.STAGE_OUT
    lists = tuple(transfer for transfer in asked.lists if transfer.outgoing == outgoing)
    commands = tuple((asked.stage_out_command if outgoing else asked.stage_in_command).splitlines())
    transfers = buffer.request.stage_out if outgoing else buffer.request.stage_in
    known = ((name, state.persistent.get(name)) for name in asked.uses)
    special = SpecialTransfers(
        lists=lists,
        list_roots=_expanded(state.policy.sources, job) if lists else (),
        commands=commands,
        environment=job.spec.environment if commands else (),
        workdir_roots=_expanded(state.policy.destinations, job) if commands else (),
        choices=choices_of(asked, stage.word, len(transfers), listed=False),
        list_choices=choices_of(asked, stage.word, len(lists), listed=True),
        granted=tuple(
            (name, found.granted_bytes)
            for name, found in known
            if found is not None and state.pool_units.get(found.pool, PoolUnit.BYTES) is PoolUnit.BYTES
        ),
    )
    return None if special == NOTHING_SPECIAL else special


def _expanded(roots: tuple[str, ...], job: Job) -> tuple[str, ...]:
    return tuple(root.replace("%u", job.spec.user) for root in roots)
