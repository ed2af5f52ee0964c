"""Listing in squeue's format: columns, order and format strings."""

import re
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.text.job import slurm_node
from forebay.cluster.cli.text.tables import job_label, run_time_s, state_code
from forebay.cluster.cli.text.times import format_duration, format_elapsed
from forebay.cluster.schemas import JOB_FIELDS, NO_DETAILS, NO_VALUE, JobDetailsView, JobView, local_time
from forebay.replica.model import JobState
from forebay.replica.values import Instant, plain

STANDARD: Final = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
"""Default format of squeue: each column right-aligned, and cut to its width."""


STARTS: Final = "%.18i %.9P %.8j %.8u %.2t %.19S %.6D %R"
"""Format of `squeue --start` without the column SCHEDNODES, which is unknown before the start."""


FORMAT_CHARACTERS_MAX: Final = 1_000


WIDTH_MAX: Final = 1_000
"""Largest width of a column, characters."""


_FIELD: Final = re.compile(r"%(?P<right>\.?)(?P<width>[0-9]{0,6})(?P<letter>[A-Za-z%])", re.ASCII)


_WITH_REASON: Final = frozenset(
    {JobState.PENDING.name, JobState.STAGE_OUT.name, JobState.FAILED.name, JobState.TIMEOUT.name}
)
"""States whose last column is the reason in parentheses; for the others it is the node."""


_ORDER: Final = {
    state.name: place
    for place, states in enumerate(
        (
            (JobState.PENDING,),
            (JobState.CONFIGURING, JobState.RUNNING),
            (JobState.SUSPENDED,),
            (JobState.STAGE_OUT, JobState.COMPLETED),
            (JobState.CANCELLED,),
            (JobState.FAILED,),
            (JobState.TIMEOUT,),
            (JobState.NODE_FAIL,),
        )
    )
    for state in states
}


class Field(msgspec.Struct, frozen=True):
    """Field for a format letter: its heading, and a function of a job and the time, µs."""

    heading: str
    shows: Callable[[JobView, Instant], str]


def node_or_reason(job: JobView) -> str:
    """Return the last column: the job's node, or the reason in parentheses."""
    if job.state in _WITH_REASON:
        return f"({job.reason})"
    return slurm_node(job)


def _requested(field: str, job: JobView, now: Instant) -> str:
    """Return the requested value of one of JOB_FIELDS."""
    value = getattr(details_of(job), field)
    return _or(",".join(value) if isinstance(value, tuple) else value)


FIELDS: Final = {
    "i": Field("JOBID", lambda job, now: job_label(job)),
    "A": Field("JOBID", lambda job, now: str(job.job_id)),
    "F": Field("ARRAY_JOB_ID", lambda job, now: str(details_of(job).array_job_id or job.job_id)),
    "K": Field("ARRAY_TASK_ID", lambda job, now: _or(details_of(job).array_task_id, "N/A")),
    "j": Field("NAME", lambda job, now: job.name),
    "u": Field("USER", lambda job, now: job.user),
    "t": Field("ST", lambda job, now: state_code(job.state)),
    "T": Field("STATE", lambda job, now: job.state),
    "M": Field("TIME", lambda job, now: format_elapsed(run_time_s(job, now))),
    "l": Field("TIME_LIMIT", lambda job, now: format_duration(job.time_limit_s)),
    "D": Field("NODES", lambda job, now: str(details_of(job).nodes)),
    "C": Field("CPUS", lambda job, now: str(job.cpus)),
    "R": Field("NODELIST(REASON)", lambda job, now: node_or_reason(job)),
    "r": Field("REASON", lambda job, now: job.reason),
    "N": Field("NODELIST", lambda job, now: slurm_node(job)),
    "B": Field("EXEC_HOST", lambda job, now: slurm_node(job) or "n/a"),
    "S": Field("START_TIME", lambda job, now: _time(job.start_time or job.expected_start)),
    "e": Field("END_TIME", lambda job, now: _time(job.end_time)),
    "V": Field("SUBMIT_TIME", lambda job, now: _time(job.submit_time)),
    "Q": Field("PRIORITY", lambda job, now: str(0 if job.hold else job.priority)),
    "E": Field("DEPENDENCY", lambda job, now: _dependency(job)),
    "Z": Field("WORK_DIR", lambda job, now: job.workdir),
} | {row.letter: Field(row.heading, partial(_requested, row.field)) for row in JOB_FIELDS if row.letter}
"""Supported format letters of squeue."""


def _dependency(job: JobView) -> str:
    return ("?" if details_of(job).dependency_any else ",").join(job.dependencies) or NO_VALUE


def details_of(job: JobView) -> JobDetailsView:
    return job.details or NO_DETAILS


def _or(value: str | int | None, nothing: str = NO_VALUE) -> str:
    return nothing if value is None or value == "" else str(value)


def _time(iso: str | None) -> str:
    return "N/A" if iso is None else local_time(iso)


class Column(msgspec.Struct, frozen=True):
    """Column of a format: preceding text, field (None for trailing text), width (0 for the text's own width)."""

    before: str
    field: Field | None
    width: int = 0
    right: bool = False


def read_format(text: str) -> tuple[Column, ...]:
    """Return the columns of a format for `squeue -o`.

    Raises:
        Failure: bad input, if the format has an unknown letter or is too long.
    """
    if len(text) > FORMAT_CHARACTERS_MAX:
        raise bad_input("the format is too long", f"use at most {FORMAT_CHARACTERS_MAX} characters", place="--format")
    columns, end, before = [], 0, ""
    for found in _FIELD.finditer(text):
        before += _literal(text[end : found.start()])
        end = found.end()
        letter, width = found["letter"], int(found["width"] or 0)
        if letter == "%":
            before += "%"
            continue
        if letter not in FIELDS:
            raise bad_input(
                f"the format has the unknown letter %{letter}", f"use {', '.join(sorted(FIELDS))}", place="--format"
            )
        if width > WIDTH_MAX:
            raise bad_input(f"the column width {width} is too large", f"use at most {WIDTH_MAX}", place="--format")
        columns.append(Column(before, FIELDS[letter], width, bool(found["right"])))
        before = ""
    before += _literal(text[end:])
    return (*columns, Column(before, None)) if before else tuple(columns)


def _literal(text: str) -> str:
    if "%" in text:
        raise bad_input(
            f"the format has a single % in {text[:20]!r}", "write %%, or a field such as %i", place="--format"
        )
    return text


def format_line(columns: tuple[Column, ...], cell: Callable[[Field], str]) -> str:
    """Format one line of the listing; `cell` returns the text of a field."""
    parts = []
    for column in columns:
        parts.append(column.before)
        if column.field is None:
            continue
        text = plain(cell(column.field))
        if column.width:
            text = text[: column.width]
            text = text.rjust(column.width) if column.right else text.ljust(column.width)
        parts.append(text)
    return "".join(parts).rstrip()


def sort_jobs(jobs: tuple[JobView, ...]) -> list[JobView]:
    """Return the jobs in squeue's order: by state, then by falling priority, then by ID."""
    return sorted(jobs, key=lambda job: (_ORDER.get(job.state, len(_ORDER)), -job.priority, job.job_id))
