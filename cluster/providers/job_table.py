"""Job table of Lua scripts: all fields of Slurm releases 22.05 to 26.05, and their text form.

Slurm passes the table to functions of the lua plugin since 23.02; `_lua_job_info_field` in its source lists the fields.
Properties known to Forebay have Slurm's names. Other fields have the values that Slurm gives to a batch job without
such a request: nil for strings; 0, NO_VAL or another default for numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from forebay.cluster.providers.interface import Local, Subject
from forebay.cluster.system import group_name
from forebay.replica.model import JobState, MailKind, wants_mail
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant

NO_VAL: Final = 0xFFFF_FFFE
NO_VAL16: Final = 0xFFFE
INFINITE16: Final = 0xFFFF
NICE_OFFSET: Final = 0x8000_0000
"""Nice value 0 in Slurm."""

SHOW_DETAIL: Final = 0x2
CONFIGURING: Final = 0x4000
STAGE_OUT: Final = 0x80_0000
"""Flags of Slurm's job states."""

FIRST: Final = "23.02"
"""First Slurm release with a job table."""

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
"""Slurm's number of each job state; STAGE_OUT is a flag added to the job's result."""

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
    """Sources of the table's values."""

    subject: Subject
    local: Local


class JobField(NamedTuple):
    """Field of the table: Slurm's name and type, its value, and the releases that have it."""

    name: str
    kind: Kind
    value: Value | Callable[[JobContext], Value]
    """Constant value, or a function that returns a job's value; None for nil."""
    since: str = FIRST
    until: str = ""
    """Last release with the field; empty if the newest release has the field."""
    label: str = ""
    """Key in the text of the job; empty to omit it."""
    text: Callable[[JobContext], str] | None = None
    """Function that returns the value in the text, if it differs from `value`."""


def job_table(job: JobContext) -> dict[str, str | int | float | tuple[str, ...]]:
    """Return the fields that are not nil."""
    found = ((field.name, value_of(field, job)) for field in FIELDS)
    return {name: value for name, value in found if value is not None}


def value_of(field: JobField, job: JobContext) -> Value:
    """Return the value of a field for a job."""
    return field.value(job) if callable(field.value) else field.value


def job_text(job: JobContext) -> str:
    """Format the job as slurm.job_info_to_string does: `Key=value`, with the keys of `scontrol show job`."""
    lines = [f"JobId={job.subject.job} JobName={job.subject.name}"]
    lines += [f"{field.label}={_text_of(field, job)}" for field in FIELDS if field.label]
    return "\n   ".join(lines) + "\n\n"


def _text_of(field: JobField, job: JobContext) -> str:
    value = value_of(field, job) if field.text is None else field.text(job)
    return "(null)" if value is None else str(value)


def _seconds(instant: Instant) -> int:
    """Convert an instant to seconds since 1970; 0 if it has not occurred, as in Slurm."""
    return instant // MICROSECONDS_PER_SECOND


def _time(value: Callable[[JobContext], Value], never: str = "Unknown") -> Callable[[JobContext], str]:
    """Return a function that formats a time of the table as scontrol does, in this machine's time zone."""

    def show(job: JobContext) -> str:
        at = value(job)
        if not at or not isinstance(at, int):
            return never
        return f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%dT%H:%M:%S}"

    return show


def _moment(name: str, label: str, attribute: str, never: str = "Unknown") -> JobField:
    """Return the field for a time of the job's status."""

    def value(job: JobContext) -> int:
        return _seconds(getattr(job.subject.status, attribute))

    return JobField(name, "integer", value, label=label, text=_time(value, never))


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
    """Return the maximum number of nodes of a pending job; 0 after the allocation, as in Slurm."""
    return job.subject.options.nodes if job.subject.status.state == JobState.PENDING.name else 0


def _limit(job: JobContext) -> int:
    return -(-job.subject.time_limit_s // _SECONDS_PER_MINUTE)


def _end(job: JobContext) -> int:
    """Return the end time, or the end at the time limit; 0 before the start."""
    status = job.subject.status
    if status.ended_at or not status.started_at:
        return _seconds(status.ended_at)
    return _seconds(status.started_at) + status.suspended_s + job.subject.time_limit_s


def _mail_types(job: JobContext) -> int:
    return sum(bit for kind, bit in _MAIL.items() if wants_mail(job.subject.options, kind))


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
    """Format the time limit as scontrol does, for example `1-02:30:00`."""
    days, minutes = divmod(_limit(job), 24 * 60)
    clock = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


FIELDS: Final = (
    JobField("account", "string", lambda job: job.subject.options.account or None, label="Account"),
    JobField("accrue_time", "integer", 0),
    JobField("admin_comment", "string", None),
    JobField("alloc_node", "string", None),
    JobField("alloc_sid", "integer", NO_VAL),
    JobField("array_job_id", "integer", lambda job: job.subject.array_job),
    JobField("array_task_id", "integer", lambda job: job.subject.array_task if job.subject.array_job else NO_VAL),
    JobField("array_max_tasks", "integer", lambda job: job.subject.array_throttle),
    JobField("array_task_str", "string", None),
    JobField("assoc_id", "integer", 0),
    JobField("batch_features", "string", None),
    JobField("batch_flag", "integer", 1, label="BatchFlag"),
    JobField("batch_host", "string", _node, label="BatchHost"),
    JobField("boards_per_node", "integer", 0),
    JobField("burst_buffer", "string", lambda job: job.subject.directives or None, label="BurstBuffer"),
    JobField("burst_buffer_state", "string", lambda job: job.subject.status.buffer_state, label="BurstBufferState"),
    JobField("cluster", "string", lambda job: job.local.cluster or None),
    JobField("cluster_features", "string", None),
    JobField("command", "string", None, label="Command"),
    JobField("comment", "string", lambda job: job.subject.options.comment or None, label="Comment"),
    JobField("container", "string", None),
    JobField("container_id", "string", None),
    JobField("container_type", "string", None, since="26.05"),
    JobField("contiguous", "integer", 0, label="Contiguous"),
    JobField("core_spec", "integer", NO_VAL16),
    JobField("cores_per_socket", "integer", NO_VAL16),
    JobField("billable_tres", "number", float(NO_VAL)),
    JobField(
        "cpus_per_task", "integer", lambda job: max(1, job.subject.cpus // job.subject.options.tasks), label="CPUs/Task"
    ),
    JobField("cpu_freq_min", "integer", NO_VAL),
    JobField("cpu_freq_max", "integer", NO_VAL),
    JobField("cpu_freq_gov", "integer", NO_VAL),
    JobField("cpus_per_tres", "string", None),
    JobField("cronspec", "string", None),
    _moment("deadline", "Deadline", "deadline", "N/A"),
    JobField("delay_boot", "integer", 0),
    JobField("dependency", "string", lambda job: job.subject.status.dependency or None, label="Dependency"),
    JobField("derived_ec", "integer", 0),
    _moment("eligible_time", "EligibleTime", "eligible_at"),
    JobField("end_time", "integer", _end, label="EndTime", text=_time(_end)),
    JobField("exc_nodes", "string", None, label="ExcNodeList"),
    JobField("exclusive", "integer", 0, since="26.05"),
    JobField(
        "exit_code",
        "integer",
        lambda job: job.subject.status.exit_code << 8 | job.subject.status.signal,
        label="ExitCode",
        text=lambda job: f"{job.subject.status.exit_code}:{job.subject.status.signal}",
    ),
    JobField("features", "string", None, label="Features"),
    JobField("fed_origin_str", "string", None),
    JobField("fed_siblings_active_str", "string", None),
    JobField("fed_siblings_viable_str", "string", None),
    JobField("gres_detail_cnt", "integer", 0),
    JobField("gres_detail_str", "table", None),
    JobField("gres_total", "string", None),
    JobField("group_id", "integer", lambda job: job.subject.gid, label="GroupId", text=_group),
    JobField("het_job_id", "integer", 0),
    JobField("het_job_id_set", "string", None),
    JobField("het_job_offset", "integer", 0),
    JobField("job_id", "integer", lambda job: job.subject.job),
    JobField("job_state", "integer", _state, label="JobState", text=lambda job: job.subject.status.state),
    JobField("last_sched_eval", "integer", 0),
    JobField("licenses", "string", _licenses, label="Licenses"),
    JobField("mail_type", "integer", _mail_types),
    JobField("mail_user", "string", lambda job: job.subject.options.mail_user or job.subject.user or None),
    JobField("max_cpus", "integer", 0),
    JobField("max_nodes", "integer", _max_nodes),
    JobField("mcs_label", "string", None),
    JobField("mem_per_tres", "string", None),
    JobField("min_mem_per_node", "integer", 0, label="MinMemoryNode"),
    JobField("min_mem_per_cpu", "integer", None),
    JobField("name", "string", lambda job: job.subject.name or None),
    JobField("network", "string", None, label="Network"),
    JobField("nodes", "string", _node, label="NodeList"),
    JobField(
        "nice",
        "integer",
        lambda job: NICE_OFFSET + job.subject.options.nice,
        label="Nice",
        text=lambda job: str(job.subject.options.nice),
    ),
    JobField("ntasks_per_core", "integer", INFINITE16),
    JobField("ntasks_per_tres", "integer", 0),
    JobField("ntasks_per_node", "integer", 0),
    JobField("ntasks_per_socket", "integer", INFINITE16),
    JobField("ntasks_per_board", "integer", 0),
    JobField("num_cpus", "integer", lambda job: job.subject.cpus if _has_node(job) else 0, label="NumCPUs"),
    JobField("num_nodes", "integer", lambda job: job.subject.options.nodes, label="NumNodes"),
    JobField("num_tasks", "integer", lambda job: job.subject.options.tasks if _has_node(job) else 0, label="NumTasks"),
    JobField("oversubscribe", "integer", 0, since="26.05"),
    JobField("partition", "string", lambda job: job.subject.options.partition or None, label="Partition"),
    JobField("prefer", "string", None),
    JobField("pn_min_cpus", "integer", lambda job: job.subject.cpus, label="MinCPUsNode"),
    JobField("pn_min_tmp_disk", "integer", 0, label="MinTmpDiskNode"),
    JobField("power_flags", "integer", 0, until="23.11"),
    JobField("preempt_time", "integer", 0),
    JobField("preemptable_time", "integer", 0),
    JobField("pre_sus_time", "integer", lambda job: job.subject.status.suspended_s, label="SecsPreSuspend"),
    JobField("priority", "integer", lambda job: job.subject.status.priority, label="Priority"),
    JobField("profile", "integer", 0),
    JobField("qos", "string", lambda job: job.subject.options.qos or None, label="QOS"),
    JobField("reboot", "integer", 0, label="Reboot"),
    JobField("req_nodes", "string", None, label="ReqNodeList"),
    JobField("req_switch", "integer", 0),
    JobField("requeue", "integer", lambda job: int(job.subject.options.requeue), label="Requeue"),
    JobField("resize_time", "integer", 0),
    JobField("restart_cnt", "integer", lambda job: job.subject.status.restarts, label="Restarts"),
    JobField("resv_name", "string", lambda job: job.subject.options.reservation or None, label="Reservation"),
    JobField("sched_nodes", "string", None),
    JobField("selinux_context", "string", None),
    JobField("shared", "integer", lambda job: 0 if job.subject.options.exclusive else NO_VAL16, until="25.11"),
    JobField("show_flags", "integer", SHOW_DETAIL, until="24.05"),
    JobField("site_factor", "integer", NICE_OFFSET),
    JobField("sockets_per_board", "integer", 0),
    JobField("sockets_per_node", "integer", NO_VAL16),
    _moment("start_time", "StartTime", "started_at"),
    JobField("start_protocol_ver", "integer", 0),
    JobField("state_desc", "string", _state_description),
    JobField("state_reason", "integer", 0, label="Reason", text=lambda _: "None"),
    JobField("std_err", "string", lambda job: job.subject.status.error or None, label="StdErr"),
    JobField("std_in", "string", lambda job: job.subject.options.input or "/dev/null", label="StdIn"),
    JobField("std_out", "string", lambda job: job.subject.status.output or None, label="StdOut"),
    _moment("submit_time", "SubmitTime", "submitted_at"),
    _moment("suspend_time", "SuspendTime", "suspended_at", "None"),
    JobField("system_comment", "string", lambda job: job.subject.status.comment or None, label="SystemComment"),
    JobField("time_limit", "integer", _limit, label="TimeLimit", text=_duration),
    JobField("time_min", "integer", 0, label="TimeMin", text=lambda _: "N/A"),
    JobField("threads_per_core", "integer", NO_VAL16),
    JobField("tres_bind", "string", None),
    JobField("tres_freq", "string", None),
    JobField("tres_per_job", "string", None),
    JobField("tres_per_node", "string", None),
    JobField("tres_per_socket", "string", None),
    JobField("tres_per_task", "string", None),
    JobField("tres_req_str", "string", lambda job: job.subject.status.tres or None, label="ReqTRES"),
    JobField("tres_alloc_str", "string", _allocated_tres, label="AllocTRES"),
    JobField("user_id", "integer", lambda job: job.subject.uid, label="UserId", text=_owner),
    JobField("user_name", "string", lambda job: job.subject.user or None),
    JobField("wait4switch", "integer", 0),
    JobField("wckey", "string", None),
    JobField("work_dir", "string", lambda job: job.subject.workdir or None, label="WorkDir"),
)
"""Fields in the order of Slurm's source.

A script may read all of them, regardless of the release for which it was written.
"""
