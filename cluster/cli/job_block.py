"""`forebay job show`: one job as `scontrol show job` shows it, in the lines for which Forebay has something to say.

Source of the form: the transcripts of Slurm 22.05.8. A line or a pair that is about what Forebay does not have
(sockets, features, MCS labels) is left out; the last line is Forebay's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from cluster.cli.moments import format_duration
from cluster.cli.output import size
from cluster.cli.tables import run_time_s
from cluster.cli.transfer_text import transfer_lines
from cluster.eventloop import group_name, uid_of
from cluster.schemas import NO_DETAILS, NO_VALUE, JobDetailsView, JobView, Zone, local_time, owner
from cluster.system import format_instant, parse_instant
from replica.model import ENDED, JobState
from replica.values import Instant, plain, seconds

INDENT: Final = "\n   "

_ENDED: Final = frozenset(state.name for state in ENDED)
_NOT_OVER: Final = frozenset({JobState.PENDING.name, JobState.RUNNING.name, JobState.SUSPENDED.name})

Uid = Callable[[str], int | None]
Group = Callable[[int], str | None]


def job_block(job: JobView, now: Instant, *, zone: Zone = None, uid: Uid = uid_of, group: Group = group_name) -> str:
    """Return the job as `scontrol show job` prints it; `now` is the wall clock, µs.

    The lines about a buffer are there only for a job that asked for one. Times are in `zone`, None: this machine's.
    """
    return INDENT.join(_lines(job, job.details or NO_DETAILS, now, zone, uid, group))


def _lines(job: JobView, more: JobDetailsView, now: Instant, zone: Zone, uid: Uid, group: Group) -> Iterator[str]:
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
    nodes = plain(shown_node(job))
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
    if more.comment:
        yield f"Comment={_text(more.comment)}"
    yield _pairs(StdErr=job.output)
    yield "StdIn=/dev/null"
    yield _pairs(StdOut=job.output)
    if job.burst_buffer is not None:
        yield f"BurstBuffer={_text(job.burst_buffer)}"
        yield f"BurstBufferState={plain(job.burst_buffer_state or NO_VALUE)}"
    if more.mail_types:
        types = ",".join(word.upper() for word in more.mail_types)
        yield _pairs(MailUser=more.mail_user or job.user, MailType=types)
    own: dict[str, str | int | None] = {"Hold": job.hold or "none", "Attempt": job.attempt}
    if job.burst_buffer is not None:
        own["BurstBufferPool"] = job.pool
        own["BurstBufferCapacity"] = size(job.capacity_bytes) if job.capacity_bytes else "none"
    if job.expected_after:
        own["WaitsFor"] = ",".join(job.expected_after)
    yield _pairs(**own)
    if job.transfers is not None:
        yield from transfer_lines(job.transfers)


def reason_word(reason: str) -> str:
    """Return a reason as scontrol prints it: one word, each white space an underscore (squeue prints the spaces)."""
    return "".join("_" if character.isspace() else character for character in reason)


def shown_node(job: JobView) -> str:
    """Return the job's node as Slurm shows it, empty before it is allocated: data may be staged somewhere by then."""
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
    """Return when the job started; for one that waits, as in Slurm, when it should."""
    return job.expected_start if job.state == JobState.PENDING.name else job.start_time


def _end_time(job: JobView, more: JobDetailsView) -> str | None:
    """Return when the job ended, or would at its time limit."""
    start = _start_time(job)
    if job.end_time is None and start is not None and job.state in _NOT_OVER and not more.suspend_time:
        return format_instant(Instant(parse_instant(start) + seconds(job.time_limit_s + more.suspended_s)))
    return job.end_time


def _text(text: str) -> str:
    """Return a text of several lines as scontrol prints it: they follow each other without indentation."""
    return "\n".join(plain(line) for line in text.splitlines())


def _pairs(**values: str | int | None) -> str:
    return " ".join(
        f"{key}={plain(str(value)) if value not in (None, '') else NO_VALUE}" for key, value in values.items()
    )
