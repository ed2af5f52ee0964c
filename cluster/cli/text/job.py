"""Text of one job: `job show` in scontrol's format, the timeline of `job history`, the answer of `job why`.

Source of scontrol's format: transcripts of Slurm 22.05.8. Pairs without a meaning in Forebay (sockets, features, MCS
labels) are left out; the last line is Forebay's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from forebay.cluster.cli.text.output import size, table
from forebay.cluster.cli.text.tables import format_time, run_time_s
from forebay.cluster.cli.text.times import format_duration
from forebay.cluster.cli.text.transfer import transfer_lines
from forebay.cluster.schemas import (
    JOB_FIELDS,
    NO_DETAILS,
    NO_VALUE,
    HistoryAnswer,
    HistoryRow,
    JobDetailsView,
    JobView,
    WhyView,
    Zone,
    local_time,
    owner,
)
from forebay.cluster.system import format_instant, format_span, group_name, parse_instant, uid_of
from forebay.replica.model import ENDED, JobState
from forebay.replica.values import Instant, plain, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

INDENT: Final = "\n   "

_NOT_OVER: Final = frozenset({JobState.PENDING.name, JobState.RUNNING.name, JobState.SUSPENDED.name})

Uid = Callable[[str], int | None]
GroupName = Callable[[int], str | None]


def job_block(
    job: JobView, now: Instant, *, zone: Zone = None, uid: Uid = uid_of, group: GroupName = group_name
) -> str:
    """Return the job as `scontrol show job` prints it; `now` is the wall clock, µs.

    Buffer lines appear only for a job that requested a buffer. Times are in `zone`, by default this machine's.
    """
    return INDENT.join(_lines(job, job.details or NO_DETAILS, now, zone, uid, group))


def _lines(job: JobView, more: JobDetailsView, now: Instant, zone: Zone, uid: Uid, group: GroupName) -> Iterator[str]:
    held = job.hold is not None
    yield _first(job, more)
    number = job.uid if job.uid is not None else uid(job.user)
    gid = NO_VALUE if more.gid is None else owner(group(more.gid) or str(more.gid), more.gid)
    yield f"UserId={owner(job.user, number)} GroupId={gid}"
    # Slurm holds a job by giving it no priority.
    yield _pairs(Priority=0 if held else job.priority, Nice=more.nice, Account=more.account, QOS=more.qos)
    yield _pairs(JobState=job.state, Reason=reason_word(job.reason), Dependency=_dependency(job, more))
    yield _pairs(Requeue=int(more.requeue), Restarts=more.restarts, ExitCode=f"{job.exit_code}:{job.signal}")
    yield _pairs(RunTime=format_duration(run_time_s(job, now)), TimeLimit=format_duration(job.time_limit_s))
    yield f"SubmitTime={local_time(job.submit_time, zone)} EligibleTime={local_time(job.eligible_time, zone)}"
    deadline = "N/A" if more.deadline is None else local_time(more.deadline, zone)
    yield (
        f"StartTime={local_time(_start_time(job), zone)} EndTime={local_time(_end_time(job, more), zone)} "
        f"Deadline={deadline}"
    )
    suspended = "None" if more.suspend_time is None else local_time(more.suspend_time, zone)
    yield f"SuspendTime={suspended} SecsPreSuspend={more.suspended_s}"
    yield _pairs(Partition=more.partition)
    nodes = plain(slurm_node(job))
    yield f"NodeList={nodes}"
    if nodes:
        yield f"BatchHost={nodes}"
    cpus = job.cpus if more.nodes else 0
    yield _pairs(NumNodes=more.nodes, NumCPUs=cpus, NumTasks=more.nodes)
    yield _pairs(TRES=job.tres)
    yield _pairs(Licenses=",".join(more.licenses))
    if more.reservation:
        yield _pairs(Reservation=more.reservation)
    yield _pairs(WorkDir=job.workdir)
    if job.system_comment:
        yield f"SystemComment={_text(job.system_comment)}"
    for row in JOB_FIELDS:
        if row.label and getattr(more, row.field):
            yield f"{row.label}={_text(getattr(more, row.field))}"
    yield _pairs(StdErr=more.error or job.output)
    yield "StdIn=/dev/null"
    yield _pairs(StdOut=job.output)
    if job.external_job is not None:
        yield _pairs(ExternalJob=job.external_job, Epoch=job.epoch, ExternalJobPhase=job.phase)
    if job.burst_buffer is not None:
        yield f"BurstBuffer={_text(job.burst_buffer)}"
        yield f"BurstBufferState={plain(job.burst_buffer_state or NO_VALUE)}"
    if more.mail_types:
        types = ",".join(word.upper() for word in more.mail_types)
        yield _pairs(MailUser=more.mail_user or job.user, MailType=types)
    own: dict[str, str | int | None] = {"Hold": job.hold or "none"}
    if job.burst_buffer is not None:
        own["BurstBufferPool"] = job.pool
        own["BurstBufferCapacity"] = size(job.capacity_bytes) if job.capacity_bytes else "none"
        if job.burst_buffer_path is not None:
            own["BurstBufferPath"] = job.burst_buffer_path
    if job.expected_after:
        own["WaitsFor"] = ",".join(job.expected_after)
    yield _pairs(**own)
    for shared in job.stage_out_shared:
        yield f"StageOutShared={plain(shared)}"
    if job.transfers is not None:
        yield from transfer_lines(job.transfers)


def reason_word(reason: str) -> str:
    """Return a reason as scontrol prints it, with underscores instead of spaces."""
    return "".join("_" if character.isspace() else character for character in reason)


def slurm_node(job: JobView) -> str:
    """Return the job's node as Slurm shows it: empty until allocation, even if data is already staged on the node."""
    without = job.state == JobState.PENDING.name or (job.details is not None and not job.details.nodes)
    return "" if without or job.node is None else job.node


def _first(job: JobView, more: JobDetailsView) -> str:
    if more.array_job_id is None:
        return _pairs(JobId=job.job_id, JobName=job.name)
    throttle = {"ArrayTaskThrottle": more.array_throttle} if more.array_throttle else {}
    return _pairs(
        JobId=job.job_id, ArrayJobId=more.array_job_id, ArrayTaskId=more.array_task_id, **throttle, JobName=job.name
    )


def _dependency(job: JobView, more: JobDetailsView) -> str:
    words = list(job.dependencies)
    if more.singleton and "singleton" not in words:
        words.append("singleton")
    return ("?" if more.dependency_any else ",").join(words)


def _start_time(job: JobView) -> str | None:
    """Return the start time; for a pending job the expected one, as in Slurm."""
    return job.expected_start if job.state == JobState.PENDING.name else job.start_time


def _end_time(job: JobView, more: JobDetailsView) -> str | None:
    """Return the end time, or the time at which the job reaches its time limit."""
    start = _start_time(job)
    if job.end_time is None and start is not None and job.state in _NOT_OVER and not more.suspend_time:
        return format_instant(Instant(parse_instant(start) + seconds(job.time_limit_s + more.suspended_s)))
    return job.end_time


def _text(text: str) -> str:
    """Return a text of several lines as scontrol prints it, without indentation."""
    return "\n".join(plain(line) for line in text.splitlines())


def _pairs(**values: str | int | None) -> str:
    return " ".join(
        f"{key}={plain(str(value)) if value not in (None, '') else NO_VALUE}" for key, value in values.items()
    )


BAR_CELLS: Final = 32
"""Longest duration bar, characters: the rest of an 80-character line has its label."""

_ENDED_WORDS: Final = frozenset(state.name for state in ENDED)


class Span(NamedTuple):
    """Period with the same state, reason and buffer state of a job; `until` is None if it has not ended."""

    label: str
    start: Instant
    until: Instant | None


def spans(rows: tuple[HistoryRow, ...]) -> list[Span]:
    """Return the spans between the state changes of a history, oldest first; omit the state of a finished job."""
    found: list[Span] = []
    for row in rows:
        at, label = parse_instant(row.at), _label(row)
        if found and found[-1].label == label:
            continue
        if found:
            found[-1] = found[-1]._replace(until=at)
        found.append(Span(label, at, None))
    if rows and _has_finished(rows[-1]):
        found.pop()
    return found


def _label(row: HistoryRow) -> str:
    words = [row.state]
    if row.burst_buffer_state is not None:
        words.append(row.burst_buffer_state)
    if row.reason not in ("", "None"):
        words.append(f"({row.reason})")
    return plain(" ".join(words))


def _has_finished(row: HistoryRow) -> bool:
    return row.state in _ENDED_WORDS and row.burst_buffer_state in (None, "complete")


def _archived(history: HistoryAnswer) -> str:
    """Return a sentence with the location of pruned commands and the command that reads them."""
    archived = history.archived
    assert archived is not None
    commands = "1 command" if archived.commands == 1 else f"{archived.commands} commands"
    return (
        f"{commands} of revisions {archived.first_revision} to {archived.last_revision} were pruned and are archived "
        f"in {', '.join(map(plain, archived.segments))}: see `forebay audit dump --job {history.job_id} --archive DIR`."
    )


def timeline(history: HistoryAnswer, now: Instant) -> RenderableType:
    """Return the timeline of a job: each event with time, revision and actor, then the time in each state."""
    from rich.console import Group
    from rich.text import Text

    rows, called = history.rows, plain(history.task or str(history.job_id))
    parts: list[RenderableType] = []
    if not rows:
        gone = "" if history.archived is None else f". {_archived(history)}"
        return Text(f"Job {called}: the replica that answered has no history of this job{gone}")
    first, last = parse_instant(rows[0].at), parse_instant(rows[-1].at)
    events = "1 event" if len(rows) == 1 else f"{len(rows)} events"
    parts.append(
        Text(
            f"Job {called}: {events} in {format_span(last - first)}, "
            f"{format_time(rows[0].at)} to {format_time(rows[-1].at)}",
            style="bold",
        )
    )
    if history.archived is not None:
        parts.append(Text(_archived(history), style="yellow"))
    elif not history.complete:
        parts.append(
            Text(
                "The beginning is missing: the replica that answered caught up from a snapshot. Try another replica.",
                style="yellow",
            )
        )
    parts.append(Text())
    parts.append(
        table(
            ("TIME (UTC)", "AFTER", "", "REVISION", "STATE", "EVENT", "BY"),
            _event_rows(rows, first),
            right=frozenset({"AFTER", "REVISION"}),
            flexible=frozenset({"EVENT", "STATE"}),
        )
    )
    bars = list(_bars(spans(rows), now))
    if bars:
        parts += [
            Text(),
            Text("Time in each state", style="bold"),
            table(
                ("STATE", "DURATION", "SHARE", ""),
                bars,
                right=frozenset({"DURATION", "SHARE"}),
                flexible=frozenset({"STATE"}),
            ),
        ]
    return Group(*parts)


def _event_rows(rows: tuple[HistoryRow, ...], first: Instant) -> Iterator[tuple[str | int | Text, ...]]:
    from rich.text import Text

    for number, row in enumerate(rows):
        rail = "┌" if number == 0 else "└" if number == len(rows) - 1 else "├"
        state = row.state if row.burst_buffer_state is None else f"{row.state} {row.burst_buffer_state}"
        yield (
            _time_of_day(row.at),
            f"+{format_span(max(0, parse_instant(row.at) - first))}",
            Text("●" if len(rows) == 1 else f"{rail}●"),
            row.revision,
            plain(state),
            row.sentence,
            row.actor,
        )


def _time_of_day(iso: str) -> str:
    return plain(iso.partition("T")[2][:12])


def _bars(found: list[Span], now: Instant) -> Iterator[tuple[str, str, str, str]]:
    lengths = [max(0, (now if span.until is None else span.until) - span.start) for span in found]
    total, longest = sum(lengths), max(lengths, default=0)
    for span, length in zip(found, lengths, strict=True):
        cells = max(1, round(BAR_CELLS * length / longest)) if length else 0
        share = f"{100 * length / total:.0f} %" if total else "0 %"
        duration = format_span(length) + (" so far" if span.until is None else "")
        yield span.label, duration, share, "█" * cells or "▏"


def why_text(why: WhyView) -> str:
    """Format the answer of `job why`: state, cause, blocking jobs, remedy."""
    at = f"At revision {why.revision} ({format_time(why.at)})"
    buffer = f", BurstBufferState={plain(why.burst_buffer_state)}" if why.burst_buffer_state is not None else ""
    lines = [
        f"Job {plain(why.name) or why.job_id}: JobState={plain(why.state)}, Reason={plain(why.reason)}{buffer}",
        f"{at}: {plain(why.sentence)}",
    ]
    if why.blockers:
        jobs = "job" if len(why.blockers) == 1 else "jobs"
        names = [plain(name) for name in why.blocking] or map(str, why.blockers)
        lines.append(f"Waiting for {jobs} {', '.join(names)}.")
    if why.remedy:
        lines.append(f"What to do: {plain(why.remedy)}")
    return "\n".join(lines)
