"""From the state to what clients see: one function per view, the same for now and for any moment in the past."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cluster.client.views import BufferView, JobView, NodeView, PoolView, TransferView
from cluster.clock import format_instant
from cluster.liveness import Liveness, Transfer
from replica.buffers import BufferState
from replica.jobs import Hold, JobState
from replica.nodes import NodeState
from replica.pending import Verdict, buffer_gate, early_gate, later_reason
from replica.queries import pool_use, verdicts
from replica.state import State
from replica.units import Instant

STATES_KEPT = 4
"""States whose verdicts are kept: one scheduling pass serves all answers about a state, and many ask about the same."""


_HOLDS: dict[Hold, Literal["user", "admin", "system"] | None] = {
    Hold.NONE: None,
    Hold.USER: "user",
    Hold.ADMIN: "admin",
    Hold.SYSTEM: "system",
}


class Verdicts:
    """What holds back each job, worked out once per state."""

    def __init__(self) -> None:
        self._kept: list[tuple[State, Mapping[int, Verdict]]] = []

    def reason(self, state: State, job_id: int) -> str:
        """Return what `replica.queries.reason_of` returns; without a scheduling pass where the gates alone say it."""
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        if job.state is JobState.PENDING:
            gate = early_gate(state, job) or buffer_gate(buffer, job)
            if gate is not None:
                return str(gate.reason)
        return str(self.of(state, job_id).reason)

    def of(self, state: State, job_id: int) -> Verdict:
        """Return what `replica.queries.verdict_of` returns; KeyError for a job that is not in the state."""
        job = state.jobs[job_id]
        if job.state is not JobState.PENDING:
            return later_reason(job, state.buffers.get(job_id))
        for kept, found in self._kept:
            if kept is state:
                return found[job_id]
        found = verdicts(state)
        self._kept.append((state, found))
        del self._kept[:-STATES_KEPT]
        return found[job_id]


def job_view(state: State, job_id: int, known: Verdicts, *, warnings: tuple[str, ...] = ()) -> JobView:
    """Return one job at `state`; KeyError if it is not there."""
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    spec = job.spec
    return JobView(
        job_id=job.id,
        name=spec.name,
        user=spec.user,
        state=job.state.name,
        reason=known.reason(state, job_id),
        burst_buffer=None if buffer is None else buffer.request.text,
        burst_buffer_state=None if buffer is None else buffer.state.word,
        pool=None if buffer is None or not buffer.pool else buffer.pool,
        capacity_bytes=0 if buffer is None else buffer.granted_bytes,
        node=job.node or None,
        priority=job.priority,
        attempt=job.attempt,
        cpus=spec.cpus,
        time_limit_s=spec.time_limit_s,
        submit_time=format_instant(job.submitted_at),
        eligible_time=format_instant(Instant(max(job.submitted_at, spec.begin_at))),
        start_time=format_instant(job.started_at),
        end_time=format_instant(job.ended_at),
        exit_code=job.exit_code,
        signal=job.signal,
        hold=_HOLDS[job.hold],
        system_comment=job.comment,
        workdir=spec.workdir,
        output=spec.output,
        dependencies=tuple(f"{dependency.kind.word}:{dependency.job}" for dependency in spec.dependencies),
        cancelled=job.cancelled,
        warnings=warnings,
        revision=state.revision,
    )


def pool_view(state: State, name: str, buffers: int) -> PoolView:
    """Return one pool at `state`; `buffers` is how many hold something of it. KeyError if it is not there."""
    use = pool_use(state, name)
    return PoolView(
        name=name,
        quantity_bytes=use.pool.quantity_bytes,
        granularity_bytes=use.pool.granularity_bytes,
        held_bytes=use.held_bytes,
        free_bytes=use.free_bytes,
        out_of_service_bytes=use.pool.out_of_service_bytes,
        is_default=use.pool.is_default,
        buffers=buffers,
        revision=state.revision,
    )


def holders(state: State) -> dict[str, int]:
    """Return how many buffers hold something of each pool."""
    counts = dict.fromkeys(state.pools, 0)
    for job_id in state.unfinished:
        buffer = state.buffers.get(job_id)
        if buffer is not None and buffer.held_bytes:
            counts[buffer.pool] = counts.get(buffer.pool, 0) + 1
    return counts


def buffer_view(state: State, job_id: int) -> BufferView:
    """Return the buffer of one job at `state`; KeyError if it has none."""
    buffer = state.buffers[job_id]
    return BufferView(
        job_id=buffer.job,
        user=buffer.user,
        state=buffer.state.word,
        pool=buffer.pool or None,
        capacity_bytes=buffer.granted_bytes,
        requested_bytes=buffer.request.capacity_bytes,
        held_bytes=buffer.held_bytes,
        node=buffer.node or None,
        access=tuple(way.name.lower() for way in buffer.request.access),
        type=buffer.request.type,
        create_time=format_instant(buffer.created_at),
        change_time=format_instant(buffer.changed_at),
        staged_in_bytes=buffer.staged_in_bytes,
        staged_in_files=buffer.staged_in_files,
        staged_out_bytes=buffer.staged_out_bytes,
        staged_out_files=buffer.staged_out_files,
        request=buffer.request.text,
        hurry=buffer.hurry,
        revision=state.revision,
    )


def node_jobs(state: State) -> dict[str, list[int]]:
    """Return the jobs that have something on each node, by id."""
    found: dict[str, list[int]] = {name: [] for name in state.nodes}
    for job_id in sorted(state.unfinished):
        node = state.jobs[job_id].node
        if node in found:
            found[node].append(job_id)
    return found


def node_view(state: State, name: str, jobs: list[int], liveness: Liveness | None) -> NodeView:
    """Return one node at `state`; KeyError if it is not there. `liveness`: None on a replica that does not lead."""
    node = state.nodes[name]
    # Slurm's word for a node that gets nothing new while it finishes what it has.
    draining = node.state is NodeState.DRAINED and bool(jobs)
    return NodeView(
        name=name,
        state="DRAINING" if draining else node.state.name,
        reason=node.reason,
        cpus=node.cpus,
        cpus_in_use=sum(state.jobs[job].spec.cpus for job in jobs if _on_cpus(state, job)),
        instance=node.instance,
        storage_id=node.storage_id,
        registered_time=format_instant(node.registered_at),
        drained=node.drained,
        jobs=tuple(jobs),
        last_contact_s=None if liveness is None else liveness.last_contact_s(name),
        revision=state.revision,
    )


def transfer_view(transfer: Transfer) -> TransferView:
    """Return what an agent said of one operation."""
    return TransferView(
        job_id=transfer.job,
        attempt=transfer.attempt,
        node=transfer.node,
        stage=transfer.stage,
        files_done=transfer.files_done,
        files_total=transfer.files_total,
        bytes_done=transfer.bytes_done,
        bytes_total=transfer.bytes_total,
        rate_bytes_s=transfer.rate_bytes_s,
        updated_time=format_instant(transfer.updated_at),
    )


def _on_cpus(state: State, job_id: int) -> bool:
    buffer = state.buffers.get(job_id)
    if buffer is not None and buffer.state is BufferState.POST_RUN:
        return True
    return state.jobs[job_id].state in (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED)
