"""Items that need attention: unexported results, failed removals, nodes, replicas, pools and the ledger.

Each is a condition of the current state or of a replica's status, with a remedy. Nothing is stored; an item disappears
when its condition does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forebay.cluster.api.privacy import may_see
from forebay.cluster.api.render import job_words
from forebay.cluster.api.service import ApiCall
from forebay.cluster.api.sinks import EventSinks, SinkState
from forebay.cluster.schemas import EXPIRY_NOTICE_DAYS, MemberView, NeedKind, NeedView, PoolView, StatusView, days_left
from forebay.cluster.system import SLOW_SYNC_S, format_instant, start_command
from forebay.cluster.system.eventloop import SlicedWork, iterate_paced
from forebay.replica.model import Buffer, BufferState, Job, PoolUnit, format_amount, parse_unit
from forebay.replica.operations import ExternalJobPhase, external_job_phase
from forebay.replica.state import State
from forebay.replica.values import Instant

NEEDS_SHOWN_MAX = 100
"""Items in one response, count; the others are only counted."""

JOURNAL_FILL_NOTICE = 0.8
"""Used share of a journal that needs attention."""

ROOM_NOTICE_BYTES = 2 * 1024**3
"""Free disk space of a replica that needs attention, bytes: some snapshots of a large site."""

UNWITNESSED_NOTICE_S = 60.0
"""Time without cosignatures that needs attention, seconds: longer than a witness's restart."""

SINK_NOTICE_S = 180.0
"""Time without an accepted request after which a failing event sink needs attention, seconds: longer than a receiver's
restart.
"""

_SINK_REMEDIES = {
    SinkState.REFUSED: ("its receiver rejects the events", "forebay sink list, then correct the receiver or [[sink]]"),
    SinkState.GONE: ("its receiver wants no more events", "remove its [[sink]], or correct the URL"),
}

_OF_A_RUN = (BufferState.PRE_RUN, BufferState.RUNNING, BufferState.SUSPENDED)


class AttentionItems:
    """The first items, and their total number."""

    def __init__(self) -> None:
        self.rows: list[NeedView] = []
        self.count = 0

    def add(self, kind: NeedKind, subject: str, sentence: str, remedy: str = "", **more: Any) -> None:
        """Add an item."""
        self.append(NeedView(kind=kind, subject=subject, sentence=sentence, remedy=remedy, **more))

    def append(self, need: NeedView) -> None:
        """Append an item."""
        self.count += 1
        if len(self.rows) < NEEDS_SHOWN_MAX:
            self.rows.append(need)


async def find_jobs(call: ApiCall[Any], state: State, needs: AttentionItems, work: SlicedWork) -> None:
    """Find visible jobs that need attention."""
    async for job_id in iterate_paced(state.unfinished, work, parts=1):
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        found = _of_job(job, buffer) if buffer is not None else None
        if found is None or not may_see(call, state, job_id):
            continue
        kind, sentence, remedy = found
        name = job_words(state, job_id)
        assert buffer is not None  # every item found concerns one
        more = {"job_id": job_id, "user": job.request.user, "since": format_instant(buffer.changed_at)}
        needs.add(
            kind,
            f"job {name}" if job.external_job is None else job.display_name,
            sentence,
            remedy.format(job=name),
            **more,
        )


def _of_job(job: Job, buffer: Buffer) -> tuple[NeedKind, str, str] | None:
    said = job.message
    if job.external_job is not None and external_job_phase(job, buffer) is ExternalJobPhase.RETAINED:
        return "retained", said or "it was torn down with results that are not exported", "forebay buffer export {job}"
    if buffer.state is BufferState.TEARDOWN_FAIL:
        return "teardown_failed", said or "its buffer could not be removed", "forebay buffer clear {job}"
    if not job.stuck:
        return None
    if buffer.state in (BufferState.POST_RUN, BufferState.STAGING_OUT):
        sentence = said or "its results could not be exported"
        return "not_exported", sentence, "forebay job release {job}; --partial gives up missing results"
    if buffer.state in (BufferState.TEARDOWN, *_OF_A_RUN):
        return "operation_failed", said or "an operation of its buffer failed", "forebay job why {job}"
    return "operation_failed", said or "staging in failed", "forebay job release {job}, or cancel it"


async def find_nodes(state: State, needs: AttentionItems, work: SlicedWork) -> None:
    """Find nodes that are down."""
    for name in await work.sort(state.nodes):
        node = state.nodes[name]
        if node.down:
            busy = len(state.on_node.get(name, ()))
            jobs = f"; {busy} jobs have data or a script on it" if busy else ""
            sentence = f"down: {node.reason or 'its agent does not respond'}{jobs}"
            remedy = f"start its agent: {start_command('agent', name)}"
            if busy and not node.lost and not node.is_mover:
                remedy += f"; or give up its data: forebay node lost {name}"
            needs.add("node_down", f"node {name}", sentence, remedy)


def find_replicas(members: tuple[MemberView, ...], needs: AttentionItems, now: Instant) -> None:
    """Find replicas that are unreachable, rejected, have a wrong clock, a slow disk, or too little of a resource."""
    for member in members:
        name = f"replica {member.name}"
        if member.forgot:
            needs.add(
                "replica", name, "it lacks entries that it acknowledged, and is rejected",
                f"forebay cluster replace {member.name}",
            )  # fmt: skip
        elif not member.reachable:
            needs.add("replica", name, "it cannot be reached", start_command("replica", member.name))
        if member.clock_off:
            needs.add(
                "clock", name, "its wall clock differs from those of a majority", "set its clock; is NTP running?"
            )
        for what, until, remedy in (
            (
                "its certificate",
                member.certificate_until,
                f"forebay cert issue {member.name} --role replica --replace",
            ),
            ("its certificate authority", member.authority_until, "forebay cert renew-authority"),
        ):
            days = days_left(until, now)
            if days is not None and days < EXPIRY_NOTICE_DAYS:
                needs.add("certificate", name, f"{what} expires in {days} days", remedy)
        if member.journal_fill is not None and member.journal_fill >= JOURNAL_FILL_NOTICE:
            sentence = f"its journal is {member.journal_fill:.0%} full"
            needs.add("storage", name, sentence, "raise map_size in [storage], or forebay audit prune")
        if member.room_bytes is not None and member.room_bytes < ROOM_NOTICE_BYTES:
            free = format_amount(member.room_bytes, PoolUnit.BYTES)
            needs.add("storage", name, f"only {free} are free on its disk", "free space on that disk")
        if member.sync_s is not None and member.sync_s >= SLOW_SYNC_S:
            sentence = f"its disk takes {1000 * member.sync_s:.0f} ms for a sync"
            needs.add("storage", name, sentence, "check the disk, and which other programs write to it")


def find_ledger(status: StatusView, needs: AttentionItems) -> None:
    """Find problems of this replica's ledger and of its checkpoints."""
    name = f"replica {status.replica}"
    if status.not_ready:
        needs.add("consensus", name, status.not_ready, "forebay cluster members")
    if status.damaged_entries:
        sentence = f"{status.damaged_entries} entries of its ledger are damaged, and no peer has supplied them yet"
        needs.add("ledger", name, sentence, "see its log")
    for witness, sentence in sorted(status.witness_disputes.items()):
        needs.add("witness", f"witness {witness}", sentence, "forebay audit verify")
    if status.unwitnessed_s is not None and status.unwitnessed_s > UNWITNESSED_NOTICE_S:
        sentence = f"checkpoints have lacked the required cosignatures for {status.unwitnessed_s:.0f} s"
        needs.add("witness", "checkpoints", sentence, "forebay cluster probe")


def find_sinks(sinks: EventSinks, now: Instant) -> Iterator[NeedView]:
    """Yield event sinks that have accepted nothing for a while, or reject events. Only the leader knows of any."""
    for name, delivery in sorted(sinks.deliveries.items()):
        failing_s = delivery.failing_for_s(now)
        sentence, remedy = _SINK_REMEDIES.get(delivery.state, ("", "forebay sink list"))
        if delivery.state is SinkState.ACTIVE or (not sentence and failing_s < SINK_NOTICE_S):
            continue
        sentence = sentence or f"no events could be delivered for {failing_s / 60:.0f} minutes"
        since = format_instant(delivery.failing_since)
        yield NeedView(kind="sink", subject=f"sink {name}", sentence=sentence, remedy=remedy, since=since)


def find_pools(pools: Iterator[PoolView], needs: AttentionItems) -> None:
    """Find overcommitted pools."""
    for pool in pools:
        if pool.overcommitted_bytes:
            over = format_amount(pool.overcommitted_bytes, parse_unit(pool.unit) or PoolUnit.BYTES)
            sentence = f"{over} more is held than is in service, since the pool shrank"
            needs.add("pool", f"pool {pool.name}", sentence, f"forebay pool show {pool.name}")
