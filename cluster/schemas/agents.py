"""What agents send to a replica: who they are, how far they are, and what came of their orders."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from cluster.schemas.base import NUMBER_MAX, Command, Number, Request
from replica.messages import OperationResult
from replica.values import NAME_CHARACTERS_MAX, PLACES_MAX

_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]

POLL_WAIT_S_MAX = 30
"""Seconds that a poll may wait: below the idle timeouts of common proxies and firewalls."""


class RegisterRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/agents/{node}/register. `instance` is new with every start, `storage_id` with every disk;
    `buffers` is the directory that jobs' buffers lie in.
    """

    instance: str
    storage_id: str
    cpus: Number
    buffers: str = ""
    process_control: str = ""
    """How all processes of a job are ended: cgroup, or listing, which may miss what forks fast; empty: not known."""
    capacity_control: str = ""
    """What holds a buffer to its capacity while a job writes: project_quota, subvolume_quota, image, or watch; empty:
    not known."""
    places: Annotated[dict[_Name, _Name], msgspec.Meta(max_length=PLACES_MAX)] = {}
    """The places that it stages for, each with what its own file says there: then it is a mover, and has no CPUs."""


StageWord: TypeAlias = Literal["stage_in", "run", "post_run", "stage_out", "teardown"]


PHASE_CHARACTERS_MAX = 32
FILE_SHOWN_CHARACTERS_MAX = 1_100
"""What a progress row says in words, characters: one word, and the end of a path with what it needs to escape."""


class OperationProgress(Request, frozen=True, kw_only=True):
    """How far one operation is. Soft: shown, never replicated. Totals are 0 while they are not known."""

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
    """What an earlier attempt had moved; it is in `files_done` and `bytes_done`, too."""
    phase: Annotated[str, msgspec.Meta(max_length=PHASE_CHARACTERS_MAX)] = ""
    """What it is busy with: planning, copying, verifying, committing."""
    file: Annotated[str, msgspec.Meta(max_length=FILE_SHOWN_CHARACTERS_MAX)] = ""
    """The file that is being moved, the end of its path."""
    waiting: bool = False
    """Whether the rate holds it back."""


PROGRESS_ROWS_MAX = 1024
"""Operations reported by one poll: eight stages' worth of the default limit on operations."""


class PollRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/agents/{node}/poll: answered when the node's orders differ from those at `seen_revision`.

    At the latest after `wait_s` seconds it is answered anyway.
    """

    instance: str
    seen_revision: Number = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=POLL_WAIT_S_MAX)] = POLL_WAIT_S_MAX
    progress: Annotated[tuple[OperationProgress, ...], msgspec.Meta(max_length=PROGRESS_ROWS_MAX)] = ()


REPORTS_MAX = 1024
"""Reports in one request: what one batch holds."""


class OperationReport(Command, frozen=True, kw_only=True):
    """What an agent says of one order; (job, attempt) says which. The same id is sent until it is acknowledged."""

    job: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
    attempt: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
    stage: StageWord
    result: OperationResult


class ReportsRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/agents/{node}/reports."""

    reports: Annotated[tuple[OperationReport, ...], msgspec.Meta(max_length=REPORTS_MAX)]
