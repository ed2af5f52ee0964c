"""Tables for each kind of view."""

from collections.abc import Iterable
from typing import Final

from forebay.cluster.cli.text.output import NOTHING, Listing, StyledText, size, table, text_of
from forebay.cluster.cli.text.times import format_elapsed
from forebay.cluster.schemas import BufferView, JobView, MemberView, NodeView, PoolView, SnapshotView
from forebay.cluster.system import SLOW_SYNC_S, parse_instant, readable_size
from forebay.replica.model import JobState, PoolUnit, format_amount, format_reference, parse_unit
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, plain

NAME_CHARACTERS_SHOWN: Final = 24
"""Longest job name in the listing, characters; `job show` prints all of it."""

_STATE_STYLES: Final = {
    "PD": "yellow",
    "CF": "cyan",
    "R": "green",
    "S": "magenta",
    "SO": "cyan",
    "CD": "dim",
    "F": "red",
    "CA": "dim red",
    "TO": "red",
    "NF": "red",
}


def state_code(state: str) -> str:
    """Return squeue's code for a job state, or the name of a state that only a later release knows."""
    return JobState[state].code if state in JobState.__members__ else state


def run_time_s(job: JobView, now: Instant) -> int:
    """Return the job's run time so far, whole seconds; 0 before its start. `now` is the wall clock, µs."""
    if job.start_time is None:
        return 0
    end = now if job.end_time is None else parse_instant(job.end_time)
    return max(0, end - parse_instant(job.start_time)) // MICROSECONDS_PER_SECOND


def shorten_name(name: str) -> str:
    """Return a job name shortened to NAME_CHARACTERS_SHOWN."""
    return name if len(name) <= NAME_CHARACTERS_SHOWN else name[: NAME_CHARACTERS_SHOWN - 1] + "…"


def job_label(job: JobView) -> str:
    """Return a job's ID for lists: `12`, or `10_3` for task 3 of array 10."""
    more = job.details
    if more is None or more.array_job_id is None:
        return str(job.job_id)
    return f"{more.array_job_id}_{more.array_task_id}"


_FAILURES: Final = frozenset({JobState.FAILED.name, JobState.TIMEOUT.name, JobState.NODE_FAIL.name})


def failures_first(jobs: Iterable[JobView]) -> list[JobView]:
    """Return the jobs with failed ones first, otherwise in their order."""
    return sorted(jobs, key=lambda job: job.state not in _FAILURES)


def collapse_arrays(jobs: Iterable[JobView]) -> list[tuple[str, JobView]]:
    """Return (label, job) pairs; pending array tasks with the same reason share one row, `17_[3-9]`."""
    groups: dict[tuple[object, ...], list[JobView]] = {}
    for at, job in enumerate(jobs):
        more = job.details
        if more is None or more.array_job_id is None or job.state != JobState.PENDING.name:
            key: tuple[object, ...] = (at,)
        else:
            key = (more.array_job_id, job.reason, job.burst_buffer_state, job.pool, job.capacity_bytes, job.node)
        groups.setdefault(key, []).append(job)
    return [(_group_label(group), group[0]) for group in groups.values()]


def _group_label(group: list[JobView]) -> str:
    if len(group) == 1:
        return job_label(group[0])
    tasks = sorted(job.details.array_task_id or 0 for job in group if job.details is not None)
    first = group[0].details
    assert first is not None and first.array_job_id is not None
    return format_reference(first.array_job_id, tuple(tasks))


def jobs_table(jobs: Iterable[JobView], now: Instant) -> Listing:
    """Return the table of jobs, with columns similar to squeue's."""
    return table(
        ("JOBID", "NAME", "USER", "ST", "TIME", "NODE", "BUFFER", "POOL", "CAPACITY", "REASON"),
        (
            (
                number,
                shorten_name(job.name),
                job.user,
                _styled(state_code(job.state)),
                format_elapsed(run_time_s(job, now)),
                job.node,
                job.burst_buffer_state,
                job.pool,
                size(job.capacity_bytes) if job.capacity_bytes else NOTHING,
                job.reason,
            )
            for number, job in collapse_arrays(jobs)
        ),
        right=frozenset({"JOBID", "TIME", "CAPACITY"}),
        flexible=frozenset({"REASON"}),
    )


def _styled(code: str) -> StyledText:
    return StyledText(plain(code), _STATE_STYLES.get(code, ""))


def unit_in(pool: PoolView) -> PoolUnit:
    """Return the unit of a pool; bytes for a unit that only a later release knows."""
    return parse_unit(pool.unit) or PoolUnit.BYTES


def pools_table(pools: Iterable[PoolView]) -> Listing:
    """Return the table of pools, with the controller's figure for free space."""
    return table(
        (
            "POOL",
            "DEFAULT",
            "TOTAL",
            "USED",
            "FREE",
            "OUT-OF-SERVICE",
            "GRANULARITY",
            "BUFFERS",
            "QUOTA-METHOD",
            "FILESYSTEM",
        ),
        (
            (
                pool.name,
                "yes" if pool.is_default else "no",
                format_amount(pool.quantity_bytes, unit_in(pool)),
                format_amount(pool.held_bytes, unit_in(pool)),
                format_amount(pool.free_bytes, unit_in(pool)),
                format_amount(pool.out_of_service_bytes, unit_in(pool)),
                format_amount(pool.granularity_bytes, unit_in(pool)),
                pool.buffers,
                ",".join(pool.capacity_control),
                pool.filesystem,
            )
            for pool in pools
        ),
        right=frozenset({"TOTAL", "USED", "FREE", "OUT-OF-SERVICE", "GRANULARITY", "BUFFERS"}),
    )


_BESIDES = ("lingering", "retained")
"""Phases of an external job that are shown beside its buffer's state."""


def external_jobs_table(jobs: Iterable[JobView], now: Instant) -> Listing:
    """Return the table of external jobs."""
    return table(
        ("EXTERNAL-JOB", "JOBID", "EPOCH", "NAME", "USER", "PHASE", "TIME", "MOVER", "POOL", "CAPACITY", "REASON"),
        (
            (
                job.external_job,
                job.job_id,
                job.epoch,
                shorten_name(job.name),
                job.user,
                job.phase,
                format_elapsed(run_time_s(job, now)),
                job.mover,
                job.pool,
                size(job.capacity_bytes) if job.capacity_bytes else NOTHING,
                job.reason,
            )
            for job in jobs
        ),
        right=frozenset({"JOBID", "EPOCH", "TIME", "CAPACITY"}),
        flexible=frozenset({"REASON"}),
    )


def buffers_table(buffers: Iterable[BufferView]) -> Listing:
    """Return the table of buffers."""
    return table(
        ("JOBID/NAME", "USER", "STATE", "POOL", "SIZE", "HELD", "NODE", "ACCESS", "IN", "OUT", "CREATED", "PATH"),
        (
            (
                buffer.name if buffer.job_id is None else buffer.external_job or buffer.task or buffer.job_id,
                buffer.user,
                buffer.state if buffer.phase not in _BESIDES else f"{buffer.state} ({buffer.phase})",
                buffer.pool,
                format_amount(buffer.capacity_bytes, parse_unit(buffer.unit) or PoolUnit.BYTES),
                format_amount(buffer.held_bytes, parse_unit(buffer.unit) or PoolUnit.BYTES),
                buffer.node,
                ",".join(buffer.access),
                readable_size(buffer.staged_in_bytes),
                readable_size(buffer.staged_out_bytes),
                format_time(buffer.create_time),
                buffer.path,
            )
            for buffer in buffers
        ),
        right=frozenset({"SIZE", "HELD", "IN", "OUT"}),
    )


def nodes_table(nodes: Iterable[NodeView]) -> Listing:
    """Return the table of nodes."""
    return table(
        ("NODE", "STATE", "CPUS", "JOBS", "LAST-CONTACT", "KILL-METHOD", "QUOTA-METHOD", "REASON"),
        (
            (
                node.name,
                node.state,
                f"{node.cpus_in_use}/{node.cpus}",
                ",".join(node.tasks.get(job, str(job)) for job in node.jobs),
                format_age(node.last_contact_s),
                node.process_control,
                node.capacity_control,
                node.reason,
            )
            for node in nodes
        ),
        right=frozenset({"CPUS", "LAST-CONTACT"}),
        flexible=frozenset({"JOBS", "REASON"}),
    )


def members_table(members: Iterable[MemberView]) -> Listing:
    """Return the table of replicas."""
    return table(
        (
            "REPLICA",
            "ROLE",
            "REACHABLE",
            "TERM",
            "COMMIT",
            "APPLIED",
            "LAG",
            "REVISION",
            "LAST-CONTACT",
            "CLOCK",
            "API",
            "PEER",
        ),
        (
            (
                member.name,
                StyledText(plain(member.role), "bold green" if member.role == "leader" else ""),
                _reachable(member),
                member.term,
                member.commit_index,
                member.applied_index,
                member.lag_entries,
                member.revision,
                format_age(member.last_contact_s),
                _offset(member.clock_offset_s),
                member.api,
                member.peer,
            )
            for member in members
        ),
        right=frozenset({"TERM", "COMMIT", "APPLIED", "LAG", "REVISION", "LAST-CONTACT", "CLOCK"}),
    )


def _offset(seconds: float | None) -> str | None:
    """Format a clock offset in ms or s."""
    if seconds is None:
        return None
    return f"{seconds * 1000:+.0f} ms" if abs(seconds) < 1 else f"{seconds:+.1f} s"


def _reachable(member: MemberView) -> str:
    word = "yes" if member.reachable else "no"
    if member.forgot:
        return f"{word} (data lost: cluster replace {member.name})"
    if member.clock_off:
        return f"{word} (clock is off: set it)"
    if member.sync_s is not None and member.sync_s >= SLOW_SYNC_S:
        return f"{word} (slow disk: {1000 * member.sync_s:.0f} ms per fsync)"
    return f"{word} (sending snapshot)" if member.sending_snapshot else word


def snapshot_fields(snapshot: SnapshotView) -> list[tuple[str, str | int | None]]:
    """Return the fields of a snapshot."""
    fields: list[tuple[str, str | int | None]] = [
        ("Path", snapshot.path),
        ("Index", snapshot.index),
        ("Term", snapshot.term),
        ("Revision", snapshot.revision),
        ("At", format_time(snapshot.at)),
        ("SizeBytes", snapshot.size_bytes),
        ("LedgerDigest", snapshot.ledger_digest),
        ("Jobs", snapshot.jobs),
        ("Buffers", snapshot.buffers),
    ]
    fields += [
        (f"Pool {pool.name}", f"free {size(pool.free_bytes)} of {size(pool.quantity_bytes)}") for pool in snapshot.pools
    ]
    return fields


def format_time(iso: str | None) -> str:
    """Format a time to the second, in UTC with Z; `-` for None."""
    if iso is None:
        return NOTHING
    whole, dot, _ = iso.partition(".")
    return f"{whole}Z" if dot else text_of(iso)


def format_age(duration_s: float | None) -> str:
    """Format the time since the last contact; `-` for None."""
    return NOTHING if duration_s is None else f"{duration_s:.1f} s"
