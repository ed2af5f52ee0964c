"""What is sent to a replica: the JSON bodies of `/v1`, shared by the server, the CLI, the client and the agent.

Every write carries a `command_id` that its sender made (cluster.schemas.command_ids): a retry with the same id gets the
first answer. Unknown fields are refused, so that a misspelt one is never silently ignored. What nobody asked for is not
said: in a rolling upgrade a replica of an earlier release does not know all fields, and need not. So a default that was
released never changes.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from cluster.schemas.base import View
from replica.messages import OperationResult
from replica.values import DEPENDENCIES_MAX, LICENSES_PER_JOB_MAX

FEATURE_LEVEL_MAX = 2**31 - 1
"""Feature levels that a request may name, far more than there will ever be."""

NODES_ASKED_MAX = 2**31 - 1
"""Nodes that a request may name; how many there can be is for the controller to say."""

TEXT_CHARACTERS_MAX = 4_096
"""One text of a change, characters: longer than any name, comment or address may be."""

OPTION_CHARACTERS_MAX = 4096
"""The text of one option that lists much, characters: an array of 1,000 tasks named one by one."""

MAIL_TYPES_MAX = 16
"""Types of mail that one job names, count: more than there are."""

COMMAND_ID_PATTERN = r"^[0-9a-f]{32}$"

# The length is said too: a dollar sign also matches before a line break at the end.
CommandId = Annotated[
    str,
    msgspec.Meta(
        pattern=COMMAND_ID_PATTERN, min_length=32, max_length=32, description="UUIDv7 as 32 hexadecimal digits"
    ),
]

NUMBER_MAX = 2**63 - 1
"""A number in a request: what a signed 64-bit field of the ledger holds. What it may be is asked where it is used."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]

JOB_REFERENCE_CHARACTERS_MAX = 4_200
"""A job or tasks of an array as text, characters: what `replica.decide.arrays` reads."""

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]
JobReference: TypeAlias = Number | Annotated[str, msgspec.Meta(max_length=JOB_REFERENCE_CHARACTERS_MAX)]
"""A job's number, or text as in a path: `12`, `12_3` for a task of an array, `12_[1-4]` for several."""

POLL_WAIT_S_MAX = 30
"""Seconds that a poll may wait: below the idle timeouts of common proxies and firewalls."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What every body has in common: it is frozen, refuses unknown fields, and says no more than what was asked for."""


class Command(Request, frozen=True, kw_only=True):
    """A request that changes something; its id makes it happen once. All of the body where the path says the rest."""

    command_id: CommandId


# Jobs


class SubmitRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs. `bb` is the text of --bb, `bbf` the contents of a --bbf file."""

    script: str
    time_limit_s: Number
    workdir: str
    name: str | None = None
    bb: str | None = None
    bbf: str | None = None
    cpus: Number = 1
    priority: Number | None = None
    begin_at: str | None = None
    """ISO 8601 with a zone: the job is not eligible before."""
    deadline: str | None = None
    """ISO 8601 with a zone: the job is dropped if it cannot have run by then."""
    dependencies: tuple[str, ...] = ()
    """Such as `afterok:12`, `afterburstbuffer:12` or `singleton`; all must hold."""
    dependency_any: bool = False
    """One of the dependencies is enough (`?`)."""
    output: str | None = None
    environment: dict[str, str] = {}
    hold: bool = False
    user: str | None = None
    """Operators only: on whose behalf."""
    nodes: Annotated[int, msgspec.Meta(ge=0, le=NODES_ASKED_MAX)] = 1
    """0: a job that only creates or destroys persistent buffers (`-N0`)."""
    array: Annotated[str, msgspec.Meta(max_length=OPTION_CHARACTERS_MAX)] | None = None
    """Such as `1-10:2%3`: tasks, and how many of them may go at once."""
    account: str | None = None
    qos: str | None = None
    licenses: Annotated[tuple[str, ...], msgspec.Meta(max_length=LICENSES_PER_JOB_MAX)] = ()
    """Such as `matlab:2` or `matlab`, which is one of them."""
    reservation: str | None = None
    partition: str | None = None
    nice: Number = 0
    """Larger goes later."""
    requeue: bool = True
    """Whether the job may be requeued after a failure that is not its own."""
    mail_types: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAIL_TYPES_MAX)] = ()
    """Such as `stage_out` or `all`."""
    mail_user: str | None = None
    comment: str | None = None


class UpdateRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/update: what is null, or left out, stays as it is."""

    name: Text | None = None
    time_limit_s: Number | None = None
    priority: Number | None = None
    nice: Number | None = None
    begin_at: Text | None = None
    """ISO 8601 with a zone; empty: at once."""
    deadline: Text | None = None
    """ISO 8601 with a zone; empty: none any more."""
    dependencies: Annotated[tuple[Text, ...], msgspec.Meta(max_length=DEPENDENCIES_MAX + 1)] | None = None
    """Such as `afterok:12` or `singleton`, all of them; empty: none any more."""
    dependency_any: bool = False
    """Whether one of these dependencies is enough."""
    account: Text | None = None
    qos: Text | None = None
    reservation: Text | None = None
    partition: Text | None = None
    """Empty, as for the three before it: none any more, or the default one."""
    licenses: Annotated[tuple[Text, ...], msgspec.Meta(max_length=LICENSES_PER_JOB_MAX)] | None = None
    comment: Text | None = None
    requeue: bool | None = None
    mail_types: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAIL_TYPES_MAX)] | None = None
    mail_user: Text | None = None
    bb: str | None = None
    bbf: str | None = None
    """What it asks of burst buffers instead of all that it asked for: the text of --bb, what a --bbf file holds."""


class CancelRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/cancel. `hurry`: skip stage-out and lose what was not exported."""

    hurry: bool = False


# Pools and nodes (operators)


class PoolRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/pools/{name}: sizes as text with a suffix (`96MiB`), exact and never rounded silently."""

    quantity: str
    granularity: str
    default: bool = False
    out_of_service: str | None = None


class DrainRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/nodes/{name}/drain."""

    reason: str


# Replicas (operators)


class AddMemberRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/members: where the others reach it, and where people do, each `host:port`."""

    name: str
    peer: str
    api: str


class TransferRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/members/transfer: to whom; to whoever is furthest if left out."""

    name: str | None = None


class FeatureLevelRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/feature-level: the level to raise the cluster to, one above the present one."""

    level: Annotated[int, msgspec.Meta(ge=1, le=FEATURE_LEVEL_MAX)]


# Bulk: the same commands with what the path says elsewhere


class SubmitCommand(SubmitRequest, frozen=True, kw_only=True, tag_field="type", tag="submit_job"):
    """A submit among many."""


class CancelCommand(CancelRequest, frozen=True, kw_only=True, tag_field="type", tag="cancel_job"):
    """A cancel among many."""

    job_id: JobReference


class HoldCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="hold_job"):
    """A hold among many."""

    job_id: JobReference


class ReleaseCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="release_job"):
    """A release among many."""

    job_id: JobReference


class SuspendCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="suspend_job"):
    """A suspend among many."""

    job_id: JobReference


class ContinueCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="resume_job"):
    """A resume of a suspended job among many."""

    job_id: JobReference


class RequeueCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="requeue_job"):
    """A requeue among many."""

    job_id: JobReference


class UpdateCommand(UpdateRequest, frozen=True, kw_only=True, tag_field="type", tag="update_job"):
    """A change of a job that waits, among many."""

    job_id: JobReference


class ClearCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="clear_buffer"):
    """A clear among many (operators): the buffer of a job, or (`name`) a persistent one.

    `discard`: also where the only copy of data is lost by it.
    """

    job_id: Number | None = None
    name: str | None = None
    discard: bool = False


class PoolCommand(PoolRequest, frozen=True, kw_only=True, tag_field="type", tag="set_pool"):
    """A pool's change among many."""

    name: str


class DrainCommand(DrainRequest, frozen=True, kw_only=True, tag_field="type", tag="drain_node"):
    """A drain among many."""

    node: str


class ResumeCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="resume_node"):
    """A resume among many."""

    node: str


BulkCommand: TypeAlias = (
    SubmitCommand
    | CancelCommand
    | HoldCommand
    | ReleaseCommand
    | SuspendCommand
    | ContinueCommand
    | RequeueCommand
    | UpdateCommand
    | ClearCommand
    | PoolCommand
    | DrainCommand
    | ResumeCommand
)

BULK_COMMANDS_MAX = 1024
"""Commands in one bulk request, count: a few batches, which take some hundredths of a second."""


class BulkRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/commands; each command has its own id and gets its own result."""

    commands: Annotated[tuple[BulkCommand, ...], msgspec.Meta(max_length=BULK_COMMANDS_MAX)]


# Agents


class RegisterRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/agents/{node}/register. `instance` is new with every start, `storage_id` with every disk."""

    instance: str
    storage_id: str
    cpus: Number


StageWord: TypeAlias = Literal["stage_in", "run", "post_run", "stage_out", "teardown"]


PHASE_CHARACTERS_MAX = 32
FILE_SHOWN_CHARACTERS_MAX = 1_100
"""What a progress row says in words, characters: one word, and the end of a path with what it needs to escape."""


class Progress(Request, frozen=True, kw_only=True):
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
    progress: Annotated[tuple[Progress, ...], msgspec.Meta(max_length=PROGRESS_ROWS_MAX)] = ()


REPORTS_MAX = 1024
"""Reports in one request: what one batch holds."""


class Report(Command, frozen=True, kw_only=True):
    """What an agent says of one order; (job, attempt) says which. The same id is sent until it is acknowledged."""

    job: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
    attempt: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
    stage: StageWord
    result: OperationResult


class ReportsRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/agents/{node}/reports."""

    reports: Annotated[tuple[Report, ...], msgspec.Meta(max_length=REPORTS_MAX)]


# ---- the JSON shapes of what is done to runs and stuck buffers


class ClearRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/clear and /v1/persistent/{name}/clear. `discard`: also where the only copy of data is
    lost by it.
    """

    discard: bool = False


class PersistentCleared(View, frozen=True, kw_only=True):
    """A persistent buffer that left the list."""

    revision: int
    name: str
