"""Schemas of agent requests: registration, polls with progress, and operation reports."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from forebay.cluster.schemas.base import NUMBER_MAX, Command, Number, Request
from forebay.replica.messages import OperationResult
from forebay.replica.values import FILESYSTEMS_MAX, NAME_CHARACTERS_MAX

_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]

POLL_WAIT_S_MAX = 30
"""Longest wait of a poll, seconds: below the idle timeouts of common proxies and firewalls."""


class RegisterRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/agents/{node}/register. `instance` changes with every start, `storage_id` with every disk;
    `buffers` is the directory that contains the jobs' buffers.
    """

    instance: str
    storage_id: str
    cpus: Number
    buffers: str = ""
    process_control: str = ""
    """Method of ending all processes of a job: cgroup, or listing, which can miss fast forks; empty: unknown."""
    capacity_control: str = ""
    """Method of limiting a buffer to its capacity while a job writes: project_quota, subvolume_quota, image, or watch;
    empty: unknown.
    """
    filesystems: Annotated[dict[_Name, _Name], msgspec.Meta(max_length=FILESYSTEMS_MAX)] = {}
    """Shared filesystems it stages for, each with the content of its identity file.

    An agent with any is a mover without CPUs.
    """


StageWord: TypeAlias = Literal["stage_in", "run", "post_run", "stage_out", "teardown"]


PHASE_CHARACTERS_MAX = 32
FILE_SHOWN_CHARACTERS_MAX = 1_100
"""Length of the file name in a progress row, characters: one word and the escaped end of a path."""


class OperationProgress(Request, frozen=True, kw_only=True):
    """Progress of one operation. It is displayed but never replicated. Unknown totals are 0."""

    job: Number
    attempt: Number
    stage: StageWord
    files_done: Number = 0
    files_total: Number = 0
    bytes_done: Number = 0
    bytes_total: Number = 0
    rate_bytes_s: float = 0.0
    directories_done: Number = 0
    retries: Number = 0
    resumed_files: Number = 0
    resumed_bytes: Number = 0
    """Bytes moved by an earlier attempt; `files_done` and `bytes_done` include them."""
    phase: Annotated[str, msgspec.Meta(max_length=PHASE_CHARACTERS_MAX)] = ""
    """Current phase: planning, copying, verifying, committing."""
    file: Annotated[str, msgspec.Meta(max_length=FILE_SHOWN_CHARACTERS_MAX)] = ""
    """End of the path of the file being moved."""
    waiting: bool = False
    """True if a rate limit delays it."""


PROGRESS_ROWS_MAX = 1024
"""Operations in one poll, count: eight times the default limit on operations of a stage."""


class PollRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/agents/{node}/poll, answered when the node's orders differ from those at `seen_revision`.

    After `wait_s` seconds the replica answers in any case.
    """

    instance: str
    seen_revision: Number = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=POLL_WAIT_S_MAX)] = POLL_WAIT_S_MAX
    progress: Annotated[tuple[OperationProgress, ...], msgspec.Meta(max_length=PROGRESS_ROWS_MAX)] = ()


REPORTS_MAX = 1024
"""Reports in one request, count: the size of one batch."""


class OperationReport(Command, frozen=True, kw_only=True):
    """An agent's report on one order, identified by job and attempt.

    It is resent with the same ID until acknowledged.
    """

    job: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
    attempt: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
    stage: StageWord
    result: OperationResult


class ReportsRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/agents/{node}/reports."""

    reports: Annotated[tuple[OperationReport, ...], msgspec.Meta(max_length=REPORTS_MAX)]
