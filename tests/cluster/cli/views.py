"""Views for tests, as the API returns them: a job, a buffer, a history."""

from typing import Any

import msgspec

from forebay.cluster.schemas.jobs import HistoryAnswer, HistoryRow, JobsAnswer, JobView

PENDING = JobView(
    job_id=42,
    name="sort",
    user="alice",
    state="PENDING",
    reason="BurstBufferResources",
    burst_buffer="#DW jobdw capacity=16MiB type=scratch\n#DW stage_in type=file source=/i destination=$DW_JOB_STRIPED",
    burst_buffer_state="pending",
    pool="fast",
    capacity_bytes=16 * 1024**2,
    node=None,
    priority=100,
    attempt=0,
    cpus=2,
    time_limit_s=5_400,
    submit_time="2026-01-31T11:50:00.250000Z",
    eligible_time="2026-01-31T11:50:00.250000Z",
    start_time=None,
    end_time=None,
    exit_code=0,
    signal=0,
    hold=None,
    system_comment="",
    workdir="/data/alice",
    output="forebay-%j.out",
    dependencies=("afterok:40",),
    revision=1234,
)


def job(**changes: Any) -> JobView:
    """Return the pending job with changes."""
    return msgspec.structs.replace(PENDING, **changes)


RUNNING = job(
    job_id=7,
    name="a-name-that-is-much-longer-than-its-column",
    user="bob",
    state="RUNNING",
    reason="None",
    burst_buffer_state="running",
    node="n1",
    start_time="2026-01-31T10:57:55.000000Z",
    attempt=2,
    dependencies=(),
)
NO_BUFFER = job(
    job_id=8,
    name="plain",
    state="COMPLETED",
    reason="None",
    burst_buffer=None,
    burst_buffer_state=None,
    pool=None,
    capacity_bytes=0,
    node="n2",
    start_time="2026-01-31T11:00:00.000000Z",
    end_time="2026-01-31T11:00:07.900000Z",
    dependencies=(),
)
JOBS = JobsAnswer(revision=1234, jobs=(PENDING, RUNNING, NO_BUFFER))


def row(revision: int, at: str, event: str, sentence: str, state: str, buffer: str | None, **more: Any) -> HistoryRow:
    """Return one event of a history on the morning of 31 January."""
    return HistoryRow(
        revision=revision,
        at=f"2026-01-31T{at}Z",
        actor=more.pop("actor", "scheduler"),
        command=more.pop("command", "run_scheduling_cycle"),
        event=event,
        sentence=sentence,
        state=state,
        reason=more.pop("reason", "None"),
        burst_buffer_state=buffer,
        **more,
    )


_RESOURCES = {"reason": "BurstBufferResources", "actor": "user alice", "command": "submit_job"}
_STAGING = {"reason": "BurstBufferStageIn"}
_AGENT = {"actor": "agent n1", "command": "report_operation"}

HISTORY = HistoryAnswer(
    revision=900,
    job_id=42,
    rows=(
        row(101, "09:00:00.000000", "job_submitted", "asks for 16MiB of pool fast", "PENDING", "pending", **_RESOURCES),
        row(140, "09:00:02.500000", "buffer_allocated", "16MiB reserved on n1", "PENDING", "staging-in", **_STAGING),
        row(141, "09:00:03.000000", "staged_in", "1 file with 9MiB is there", "PENDING", "staged-in", **_AGENT),
        row(141, "09:00:03.000000", "run_ordered", "2 CPUs of n1 are taken", "CONFIGURING", "pre-run", attempt=2),
        row(143, "09:00:03.100000", "run_started", "the script runs", "RUNNING", "running", **_AGENT),
        row(150, "09:00:13.100000", "run_ended", "ended with exit code 0", "STAGE_OUT", "post-run", **_AGENT),
        row(151, "09:00:13.200000", "teardown_started", "teardown ordered", "COMPLETED", "teardown"),
        row(152, "09:00:13.300000", "torn_down", "16MiB are free", "COMPLETED", "complete", **_AGENT),
    ),
)
