"""The job table of a Lua script: every field that a release of Slurm from 22.05 to 26.05 gives, and its text.

Slurm has given the table to functions of the lua plugin since 23.02, with `_lua_job_info_field` of its source as the
list. What Forebay knows of the job is there under Slurm's name. Everything else has the value that Slurm gives for a
batch job which did not ask for it: nil for texts, and for numbers 0, NO_VAL or another default of Slurm.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from cluster.providers.interface import Local, Subject
from cluster.system import group_name
from replica.model import JobState, MailKind, wants
from replica.values import MICROSECONDS_PER_SECOND, Instant

NO_VAL: Final = 0xFFFF_FFFE
NO_VAL16: Final = 0xFFFE
INFINITE16: Final = 0xFFFF
NICE_OFFSET: Final = 0x8000_0000
"""Slurm's nice value 0."""

SHOW_DETAIL: Final = 0x2
CONFIGURING: Final = 0x4000
STAGE_OUT: Final = 0x80_0000
"""Flags of Slurm's job states."""

FIRST: Final = "23.02"
"""First release of Slurm that has a job table."""

_SECONDS_PER_MINUTE: Final = 60
_STATES: Final = {
    JobState.PENDING: 0,
    JobState.CONFIGURING: 1 | CONFIGURING,
    JobState.RUNNING: 1,
    JobState.SUSPENDED: 2,
    JobState.COMPLETED: 3,
    JobState.CANCELLED: 4,
    JobState.FAILED: 5,
    JobState.TIMEOUT: 6,
    JobState.NODE_FAIL: 7,
}
"""Slurm's number of each job state; STAGE_OUT is a flag beside the job's result."""

_MAIL: Final = {
    MailKind.BEGIN: 0x1,
    MailKind.END: 0x2,
    MailKind.FAIL: 0x4,
    MailKind.REQUEUE: 0x8,
    MailKind.STAGE_OUT: 0x100,
}

Value = str | int | float | tuple[str, ...] | None
Kind = Literal["string", "integer", "number", "table"]


class JobContext(NamedTuple):
    """What the values of the table are taken from."""

    subject: Subject
    local: Local


class Field(NamedTuple):
    """One field: Slurm's name and type, its value, and the releases that have it."""

    name: str
    kind: Kind
    value: Value | Callable[[JobContext], Value]
    """Value of every job, or the function that returns that of one job; None: nil."""
    since: str = FIRST
    until: str = ""
    """Last release that has it; empty: the newest one has it."""
    label: str = ""
    """Key in the text of the job; empty: the text leaves it out."""
    text: Callable[[JobContext], str] | None = None
    """Value in that text where it differs from `value`."""


def job_table(job: JobContext) -> dict[str, str | int | float | tuple[str, ...]]:
    """Return the fields that are not nil."""
    found = ((field.name, value_of(field, job)) for field in FIELDS)
    return {name: value for name, value in found if value is not None}


def value_of(field: Field, job: JobContext) -> Value:
    """Return the value of a field for a job."""
    return field.value(job) if callable(field.value) else field.value


def job_text(job: JobContext) -> str:
    """Return the job as slurm.job_info_to_string writes it: `Key=value`, with the keys of `scontrol show job`."""
    lines = [f"JobId={job.subject.job} JobName={job.subject.name}"]
    lines += [f"{field.label}={_text_of(field, job)}" for field in FIELDS if field.label]
    return "\n   ".join(lines) + "\n\n"


def _text_of(field: Field, job: JobContext) -> str:
    value = value_of(field, job) if field.text is None else field.text(job)
    return "(null)" if value is None else str(value)


def _seconds(instant: Instant) -> int:
    """Return an instant in seconds since 1970; 0 for one that has not come, as Slurm's times."""
    return instant // MICROSECONDS_PER_SECOND


def _time(value: Callable[[JobContext], Value], never: str = "Unknown") -> Callable[[JobContext], str]:
    """Return the function that writes a time of the table as scontrol does, in this machine's time zone."""

    def show(job: JobContext) -> str:
        at = value(job)
        if not at or not isinstance(at, int):
            return never
        return f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%dT%H:%M:%S}"

    return show


def _moment(name: str, label: str, attribute: str, never: str = "Unknown") -> Field:
    """Return the field for a time of the job's status."""

    def value(job: JobContext) -> int:
        return _seconds(getattr(job.subject.status, attribute))

    return Field(name, "integer", value, label=label, text=_time(value, never))


def _has_node(job: JobContext) -> bool:
    return job.subject.options.nodes > 0


def _node(job: JobContext) -> str | None:
    return job.subject.node or None if _has_node(job) else None


def _state(job: JobContext) -> int:
    status = job.subject.status
    if status.state == JobState.STAGE_OUT.name:
        return _STATES[JobState[status.result]] | STAGE_OUT
    return _STATES[JobState[status.state]]


def _state_description(job: JobContext) -> str | None:
    is_staging = job.subject.status.state == JobState.STAGE_OUT.name
    return "burst_buffer/lua: Stage-out in progress" if is_staging else None


def _max_nodes(job: JobContext) -> int:
    """Return the nodes that a pending job may get; 0 once it has them, as in Slurm."""
    return job.subject.options.nodes if job.subject.status.state == JobState.PENDING.name else 0


def _limit(job: JobContext) -> int:
    return -(-job.subject.time_limit_s // _SECONDS_PER_MINUTE)


def _end(job: JobContext) -> int:
    """Return when the job ended, or will at its time limit; 0 before it was started."""
    status = job.subject.status
    if status.ended_at or not status.started_at:
        return _seconds(status.ended_at)
    return _seconds(status.started_at) + status.suspended_s + job.subject.time_limit_s


def _mail_types(job: JobContext) -> int:
    return sum(bit for kind, bit in _MAIL.items() if wants(job.subject.options, kind))


def _licenses(job: JobContext) -> str | None:
    return ",".join(f"{name}:{count}" for name, count in job.subject.options.licenses) or None


def _allocated_tres(job: JobContext) -> str | None:
    status = job.subject.status
    return None if status.state == JobState.PENDING.name else status.tres or None


def _owner(job: JobContext) -> str:
    return f"{job.subject.user}({job.subject.uid})"


def _group(job: JobContext) -> str:
    gid = job.subject.gid
    return f"{group_name(gid) or gid}({gid})"


def _duration(job: JobContext) -> str:
    """Return the time limit as scontrol writes it: `1-02:30:00`."""
    days, minutes = divmod(_limit(job), 24 * 60)
    clock = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


FIELDS: Final = (
    Field("account", "string", lambda job: job.subject.options.account or None, label="Account"),
    Field("accrue_time", "integer", 0),
    Field("admin_comment", "string", None),
    Field("alloc_node", "string", None),
    Field("alloc_sid", "integer", NO_VAL),
    Field("array_job_id", "integer", lambda job: job.subject.array_job),
    Field("array_task_id", "integer", lambda job: job.subject.array_task if job.subject.array_job else NO_VAL),
    Field("array_max_tasks", "integer", lambda job: job.subject.array_throttle),
    Field("array_task_str", "string", None),
    Field("assoc_id", "integer", 0),
    Field("batch_features", "string", None),
    Field("batch_flag", "integer", 1, label="BatchFlag"),
    Field("batch_host", "string", _node, label="BatchHost"),
    Field("boards_per_node", "integer", 0),
    Field("burst_buffer", "string", lambda job: job.subject.directives or None, label="BurstBuffer"),
    Field("burst_buffer_state", "string", lambda job: job.subject.status.buffer_state, label="BurstBufferState"),
    Field("cluster", "string", lambda job: job.local.cluster or None),
    Field("cluster_features", "string", None),
    Field("command", "string", None, label="Command"),
    Field("comment", "string", lambda job: job.subject.options.comment or None, label="Comment"),
    Field("container", "string", None),
    Field("container_id", "string", None),
    Field("container_type", "string", None, since="26.05"),
    Field("contiguous", "integer", 0, label="Contiguous"),
    Field("core_spec", "integer", NO_VAL16),
    Field("cores_per_socket", "integer", NO_VAL16),
    Field("billable_tres", "number", float(NO_VAL)),
    Field(
        "cpus_per_task", "integer", lambda job: max(1, job.subject.cpus // job.subject.options.tasks), label="CPUs/Task"
    ),
    Field("cpu_freq_min", "integer", NO_VAL),
    Field("cpu_freq_max", "integer", NO_VAL),
    Field("cpu_freq_gov", "integer", NO_VAL),
    Field("cpus_per_tres", "string", None),
    Field("cronspec", "string", None),
    _moment("deadline", "Deadline", "deadline", "N/A"),
    Field("delay_boot", "integer", 0),
    Field("dependency", "string", lambda job: job.subject.status.dependency or None, label="Dependency"),
    Field("derived_ec", "integer", 0),
    _moment("eligible_time", "EligibleTime", "eligible_at"),
    Field("end_time", "integer", _end, label="EndTime", text=_time(_end)),
    Field("exc_nodes", "string", None, label="ExcNodeList"),
    Field("exclusive", "integer", 0, since="26.05"),
    Field(
        "exit_code",
        "integer",
        lambda job: job.subject.status.exit_code << 8 | job.subject.status.signal,
        label="ExitCode",
        text=lambda job: f"{job.subject.status.exit_code}:{job.subject.status.signal}",
    ),
    Field("features", "string", None, label="Features"),
    Field("fed_origin_str", "string", None),
    Field("fed_siblings_active_str", "string", None),
    Field("fed_siblings_viable_str", "string", None),
    Field("gres_detail_cnt", "integer", 0),
    Field("gres_detail_str", "table", None),
    Field("gres_total", "string", None),
    Field("group_id", "integer", lambda job: job.subject.gid, label="GroupId", text=_group),
    Field("het_job_id", "integer", 0),
    Field("het_job_id_set", "string", None),
    Field("het_job_offset", "integer", 0),
    Field("job_id", "integer", lambda job: job.subject.job),
    Field("job_state", "integer", _state, label="JobState", text=lambda job: job.subject.status.state),
    Field("last_sched_eval", "integer", 0),
    Field("licenses", "string", _licenses, label="Licenses"),
    Field("mail_type", "integer", _mail_types),
    Field("mail_user", "string", lambda job: job.subject.options.mail_user or job.subject.user or None),
    Field("max_cpus", "integer", 0),
    Field("max_nodes", "integer", _max_nodes),
    Field("mcs_label", "string", None),
    Field("mem_per_tres", "string", None),
    Field("min_mem_per_node", "integer", 0, label="MinMemoryNode"),
    Field("min_mem_per_cpu", "integer", None),
    Field("name", "string", lambda job: job.subject.name or None),
    Field("network", "string", None, label="Network"),
    Field("nodes", "string", _node, label="NodeList"),
    Field(
        "nice",
        "integer",
        lambda job: NICE_OFFSET + job.subject.options.nice,
        label="Nice",
        text=lambda job: str(job.subject.options.nice),
    ),
    Field("ntasks_per_core", "integer", INFINITE16),
    Field("ntasks_per_tres", "integer", 0),
    Field("ntasks_per_node", "integer", 0),
    Field("ntasks_per_socket", "integer", INFINITE16),
    Field("ntasks_per_board", "integer", 0),
    Field("num_cpus", "integer", lambda job: job.subject.cpus if _has_node(job) else 0, label="NumCPUs"),
    Field("num_nodes", "integer", lambda job: job.subject.options.nodes, label="NumNodes"),
    Field("num_tasks", "integer", lambda job: job.subject.options.tasks if _has_node(job) else 0, label="NumTasks"),
    Field("oversubscribe", "integer", 0, since="26.05"),
    Field("partition", "string", lambda job: job.subject.options.partition or None, label="Partition"),
    Field("prefer", "string", None),
    Field("pn_min_cpus", "integer", lambda job: job.subject.cpus, label="MinCPUsNode"),
    Field("pn_min_tmp_disk", "integer", 0, label="MinTmpDiskNode"),
    Field("power_flags", "integer", 0, until="23.11"),
    Field("preempt_time", "integer", 0),
    Field("preemptable_time", "integer", 0),
    Field("pre_sus_time", "integer", lambda job: job.subject.status.suspended_s, label="SecsPreSuspend"),
    Field("priority", "integer", lambda job: job.subject.status.priority, label="Priority"),
    Field("profile", "integer", 0),
    Field("qos", "string", lambda job: job.subject.options.qos or None, label="QOS"),
    Field("reboot", "integer", 0, label="Reboot"),
    Field("req_nodes", "string", None, label="ReqNodeList"),
    Field("req_switch", "integer", 0),
    Field("requeue", "integer", lambda job: int(job.subject.options.requeue), label="Requeue"),
    Field("resize_time", "integer", 0),
    Field("restart_cnt", "integer", lambda job: job.subject.status.restarts, label="Restarts"),
    Field("resv_name", "string", lambda job: job.subject.options.reservation or None, label="Reservation"),
    Field("sched_nodes", "string", None),
    Field("selinux_context", "string", None),
    Field("shared", "integer", lambda job: 0 if job.subject.options.exclusive else NO_VAL16, until="25.11"),
    Field("show_flags", "integer", SHOW_DETAIL, until="24.05"),
    Field("site_factor", "integer", NICE_OFFSET),
    Field("sockets_per_board", "integer", 0),
    Field("sockets_per_node", "integer", NO_VAL16),
    _moment("start_time", "StartTime", "started_at"),
    Field("start_protocol_ver", "integer", 0),
    Field("state_desc", "string", _state_description),
    Field("state_reason", "integer", 0, label="Reason", text=lambda _: "None"),
    Field("std_err", "string", lambda job: job.subject.status.error or None, label="StdErr"),
    Field("std_in", "string", lambda job: job.subject.options.input or "/dev/null", label="StdIn"),
    Field("std_out", "string", lambda job: job.subject.status.output or None, label="StdOut"),
    _moment("submit_time", "SubmitTime", "submitted_at"),
    _moment("suspend_time", "SuspendTime", "suspended_at", "None"),
    Field("system_comment", "string", lambda job: job.subject.status.comment or None, label="SystemComment"),
    Field("time_limit", "integer", _limit, label="TimeLimit", text=_duration),
    Field("time_min", "integer", 0, label="TimeMin", text=lambda _: "N/A"),
    Field("threads_per_core", "integer", NO_VAL16),
    Field("tres_bind", "string", None),
    Field("tres_freq", "string", None),
    Field("tres_per_job", "string", None),
    Field("tres_per_node", "string", None),
    Field("tres_per_socket", "string", None),
    Field("tres_per_task", "string", None),
    Field("tres_req_str", "string", lambda job: job.subject.status.tres or None, label="ReqTRES"),
    Field("tres_alloc_str", "string", _allocated_tres, label="AllocTRES"),
    Field("user_id", "integer", lambda job: job.subject.uid, label="UserId", text=_owner),
    Field("user_name", "string", lambda job: job.subject.user or None),
    Field("wait4switch", "integer", 0),
    Field("wckey", "string", None),
    Field("work_dir", "string", lambda job: job.subject.workdir or None, label="WorkDir"),
)
"""Every field, in the order of Slurm's source. A script may read any of them, whatever release it was written for."""
