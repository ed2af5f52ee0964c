"""Orders for agents: a query over the state, pulled and level-triggered (law 7).

An order is in the result as long as it is pending or running. When it disappears, the agent ends the operation.
(job, attempt) identifies an order permanently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from forebay.replica.model import (
    NATIVE,
    NO_SPECIAL_TRANSFERS,
    TRANSFERS,
    AbandonedBuffer,
    AbandonedBuffers,
    Access,
    Buffer,
    BufferState,
    CreatePersistent,
    DestroyPersistent,
    Job,
    JobState,
    JobStatus,
    Order,
    OrderFilesystem,
    PoolUnit,
    Provision,
    SharedFilesystem,
    SpecialTransfers,
    Stage,
    Transfer,
    TransferRules,
    agent_of,
    awaited_slot,
    error_path,
    expand_roots,
    format_dependencies,
    input_path,
    output_path,
    persistent_names,
    pool_unit,
    provider_facts,
    provision_of,
    stage_of,
    transfer_choices,
)
from forebay.replica.operations import (
    active_rules,
    directory_in_filesystem,
    filesystems_of,
    longest_transfer_s,
    node_bytes_s,
    rate_shares,
)
from forebay.replica.scheduler import is_dependency_met
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant
from forebay.replica.views.burst import job_tres


def orders_for(state: State, node: str) -> tuple[Order, ...]:
    """Return the orders for a node's agent at this state, by job ID."""
    given_up = state.abandoned.get(node)
    orders = [] if given_up is None else _removals(state, given_up)
    removed_first = {order.job for order in orders}
    governed = _governed(state, node)
    for job_id in sorted(state.on_node.get(node, ())):
        if job_id in removed_first:
            continue
        job = state.jobs[job_id]
        buffer = state.buffers.get(job_id)
        if job.stuck or job.retry_at or awaited_slot(job, buffer) is not None:
            continue
        stage = stage_of(job, buffer)
        if stage is not None and agent_of(job, buffer) == node:
            orders.append(_order(state, job, buffer, stage, governed if stage in TRANSFERS else None))
    return tuple(orders)


def _removals(state: State, given_up: AbandonedBuffers) -> list[Order]:
    """Return teardown orders for the abandoned buffers of a node, the oldest one of each job."""
    oldest: dict[int, AbandonedBuffer] = {}
    for one in given_up.buffers:
        oldest.setdefault(one.job, one)
    return [
        Order(
            job=one.job,
            attempt=one.attempt,
            stage=Stage.TEARDOWN.word,
            user=one.user,
            name="",
            workdir="",
            has_buffer=True,
            timeout_s=state.site.other_timeout_s,
            hurry=True,
            # A buffer created under the same name since then is a different buffer.
            destroys=tuple(DestroyPersistent(name, True) for name in one.persistent if name not in state.persistent),
        )
        for one in oldest.values()
    ]


class _Governed(NamedTuple):
    """Limits that govern the transfers of a node."""

    rules: TransferRules
    node_bytes_s: int | None


def _governed(state: State, node: str) -> _Governed | None:
    rules = active_rules(state)
    return None if rules is None else _Governed(rules, node_bytes_s(state, rules, node))


def _order(state: State, job: Job, buffer: Buffer | None, stage: Stage, governed: _Governed | None) -> Order:
    site, request = state.site, job.request
    transfers: tuple[Transfer, ...] = ()
    roots: tuple[str, ...] = ()
    timeout_s = site.other_timeout_s
    access: tuple[Access, ...] = ()
    if request.buffer is not None:
        access = request.buffer.access
        if stage is Stage.STAGE_IN:
            transfers, timeout_s = request.buffer.stage_in, site.stage_in_timeout_s
            roots = expand_roots(site.sources, request.user)
        elif stage is Stage.STAGE_OUT:
            transfers, timeout_s = request.buffer.stage_out, site.stage_out_timeout_s
            roots = expand_roots(site.destinations, request.user)
        timeout_s = longest_transfer_s(state, stage) or timeout_s
    running = stage is Stage.RUN
    provision = None if buffer is None else provision_of(state)
    works = stage in (Stage.STAGE_IN, Stage.TEARDOWN)
    creates, destroys = persistent_work(state, job) if works else ((), ())
    return Order(
        job=job.id,
        attempt=job.attempt,
        stage=stage.word,
        user=request.user,
        name=request.name,
        workdir=request.workdir,
        capacity_bytes=0 if buffer is None else buffer.granted_bytes,
        has_buffer=buffer is not None,
        access=tuple(way.name.lower() for way in access),
        transfers=transfers,
        roots=roots,
        timeout_s=0 if running else timeout_s,
        script=request.script if running or provision is not None else "",
        output=output_path(request, job.node) if running else "",
        error=error_path(request, job.id, job.node) if running else "",
        input=input_path(request, job.id, job.node) if running else "",
        environment=request.environment if running else (),
        time_limit_s=request.time_limit_s if running or provision is not None else 0,
        cpus=request.cpus,
        cancel=running and (job.cancelled or job.effective_interruptions.requeueing),
        started=running and job.state in (JobState.RUNNING, JobState.SUSPENDED),
        suspend=running and job.state is JobState.SUSPENDED,
        # A job that never ran has no results to keep (SLURM-OBSERVED.md, Cancel).
        hurry=stage is Stage.TEARDOWN and buffer is not None and (buffer.hurry or job.started_at == NEVER),
        creates=creates,
        destroys=destroys,
        uses=() if request.buffer is None else request.buffer.uses,
        names=() if request.buffer is None else request.buffer.names,
        provision=provision,
        directives="" if request.buffer is None or provision is None else request.buffer.text,
        pool="" if buffer is None or provision is None else buffer.pool or _default_pool(state, provision),
        pool_is_bytes=buffer is None or pool_unit(state.pools, buffer.pool) is PoolUnit.BYTES,
        gid=request.effective_options.gid,
        options=request.options,
        array=request.array,
        special=special_transfers(state, job, stage),
        rules=None if governed is None else governed.rules,
        # Results that a failed script has not created are not waited for.
        filesystem=None if buffer is None or not job.mover else _placed(state, buffer),
        persistent=tuple(_persistent_placed(state, job)),
        partial=stage is Stage.STAGE_OUT
        and (job.result is not JobState.COMPLETED or job.effective_interruptions.partial),
        shares=None
        if governed is None
        else rate_shares(state, governed.rules, request.user, job.staged_by, governed.node_bytes_s),
        status=None if buffer is None or provision is None else _status(state, job, buffer),
    )


def _status(state: State, job: Job, buffer: Buffer) -> JobStatus:
    request, before = job.request, job.effective_interruptions
    return JobStatus(
        state=job.state.name,
        result=job.result.name,
        buffer_state=buffer.state.word,
        priority=request.priority,
        restarts=before.requeues,
        dependency=_unmet(state, job),
        output=output_path(request, job.node),
        error=error_path(request, job.id, job.node),
        comment=job.comment,
        tres=job_tres(state, job.id),
        exit_code=job.exit_code,
        signal=job.signal,
        submitted_at=job.submitted_at,
        eligible_at=Instant(max(job.submitted_at, request.begin_at)),
        started_at=job.started_at,
        ended_at=job.ended_at,
        deadline=request.deadline,
        suspended_at=before.suspended_at,
        suspended_s=before.suspended_us // MICROSECONDS_PER_SECOND,
    )


def _unmet(state: State, job: Job) -> str:
    """Return the unmet dependencies of a pending job; empty for a started job."""
    if job.state is not JobState.PENDING:
        return ""
    request, has_buffer = job.request, job.request.buffer is not None
    return format_dependencies(
        request, (one for one in request.dependencies if not is_dependency_met(state, one, has_buffer))
    )


def _placed(state: State, buffer: Buffer) -> OrderFilesystem | None:
    filesystems = filesystems_of(state, buffer)
    return _order_filesystem(filesystems[0], directory_in_filesystem(state, buffer)) if filesystems else None


def _order_filesystem(filesystem: SharedFilesystem, directory: str) -> OrderFilesystem:
    return OrderFilesystem(
        filesystem.name, filesystem.path, filesystem.identity, directory, filesystem.quota, filesystem.layout
    )


def _persistent_placed(state: State, job: Job) -> Iterator[tuple[str, OrderFilesystem]]:
    """Yield name and location of each persistent buffer in a shared filesystem that the job creates, destroys or
    uses.
    """
    for name in sorted(persistent_names(job.request.buffer)):
        known = state.persistent.get(name)
        filesystem = None if known is None else state.filesystems.get(known.filesystem)
        if known is not None and filesystem is not None:
            yield name, _order_filesystem(filesystem, known.directory)


def persistent_work(state: State, job: Job) -> tuple[tuple[CreatePersistent, ...], tuple[DestroyPersistent, ...]]:
    """Return the persistent buffers that the job still has to create, and those it has to destroy.

    The job's teardown destroys a buffer whose creation it had not finished.
    """
    creates: list[CreatePersistent] = []
    destroys: list[DestroyPersistent] = []
    asked = job.request.buffer
    if asked is None:
        return (), ()
    for wanted in asked.creates:
        made = state.persistent.get(wanted.name)
        if made is not None and made.job == job.id and made.state is BufferState.ALLOCATING:
            creates.append(
                CreatePersistent(
                    made.name,
                    made.granted_bytes,
                    made.pool,
                    made.access,
                    made.type,
                    wanted.place,
                    pool_unit(state.pools, made.pool).word,
                    access_text=wanted.access_text,
                )
            )
    for unwanted in asked.destroys:
        made = state.persistent.get(unwanted.name)
        if made is not None and made.job == job.id and made.state is BufferState.DELETING:
            destroys.append(DestroyPersistent(made.name, made.hurry or unwanted.hurry, unwanted.place))
    for wanted in asked.creates:
        made = state.persistent.get(wanted.name)
        if made is not None and made.job == job.id and made.state is BufferState.DELETING:
            destroys.append(DestroyPersistent(made.name, True, wanted.place))
    return tuple(creates), tuple(destroys)


def _default_pool(state: State, provision: Provision) -> str:
    """Return the pool of a request without one. Some providers receive the default even where nothing is reserved."""
    if not provider_facts(provision.provider).needs_pool:
        return ""
    return next((name for name in sorted(state.pools) if state.pools[name].is_default), "")


def special_transfers(state: State, job: Job, stage: Stage) -> SpecialTransfers | None:
    """Return the additional fields of this stage's order; None for most orders."""
    asked = job.request.buffer
    moving = stage in (Stage.STAGE_IN, Stage.STAGE_OUT)
    if asked is None or not moving or state.site.provider != NATIVE:
        return None
    outgoing = stage is Stage.STAGE_OUT
    lists = tuple(transfer for transfer in asked.lists if transfer.outgoing == outgoing)
    commands = tuple((asked.stage_out_command if outgoing else asked.stage_in_command).splitlines())
    transfers = asked.stage_out if outgoing else asked.stage_in
    known = ((name, state.persistent.get(name)) for name in asked.uses)
    special = SpecialTransfers(
        lists=lists,
        list_roots=_expanded(state.site.sources, job) if lists else (),
        commands=commands,
        environment=job.request.environment if commands else (),
        choices=transfer_choices(asked, stage.word, len(transfers), listed=False),
        list_choices=transfer_choices(asked, stage.word, len(lists), listed=True),
        granted=tuple(
            (name, found.granted_bytes)
            for name, found in known
            if found is not None and pool_unit(state.pools, found.pool) is PoolUnit.BYTES
        ),
    )
    return None if special == NO_SPECIAL_TRANSFERS else special


def _expanded(roots: tuple[str, ...], job: Job) -> tuple[str, ...]:
    return tuple(root.replace("%u", job.request.user) for root in roots)
