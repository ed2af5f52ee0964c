"""What is sent to a replica: the JSON bodies of `/v1`, shared by the server, the CLI and the client.

Every write carries a `command_id` that its sender made (cluster.schemas.command_ids): a retry with the same id gets the
first answer. Unknown fields are refused, so that a misspelt one is never silently ignored. What nobody asked for is not
said: in a rolling upgrade a replica of an earlier release does not know all fields, and need not. So a default that was
released never changes.
"""

from typing import Annotated, TypeAlias

import msgspec

from cluster.schemas.base import Answer, Command, Number, Request
from cluster.schemas.job_fields import SubmitRequest, UpdateRequest

FEATURE_LEVEL_MAX = 2**31 - 1
"""Feature levels that a request may name, far more than there will ever be."""

JOB_REFERENCE_CHARACTERS_MAX = 4_200
"""A job or tasks of an array as text, characters: what `replica.decide.arrays` reads."""

JobReference: TypeAlias = Number | Annotated[str, msgspec.Meta(max_length=JOB_REFERENCE_CHARACTERS_MAX)]
"""A job's number, or text as in a path: `12`, `12_3` for a task of an array, `12_[1-4]` for several."""


# Jobs


class CancelRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/cancel. `hurry`: skip stage-out and lose what was not exported."""

    hurry: bool = False


class ReleaseRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/release. `partial`: a stage-out that failed gives up results that are not there."""

    partial: bool = False


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


class LostRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/nodes/{name}/lost."""

    reason: str = ""
    dry_run: bool = False
    """Only say what would become of the node's jobs."""


# Replicas (operators)


class AddMemberRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/members: where the others reach it, and where people do, each `host:port`."""

    name: str
    peer: str
    api: str


class UpdateMemberRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/members/{name}/update: where it is reached from now on; what is left out stays."""

    peer: str | None = None
    api: str | None = None


class TransferRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/members/transfer: to whom; to whoever is furthest if left out."""

    name: str | None = None


class SetClockRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/clock: the time that it is; the cluster's must be ahead of it."""

    at: Annotated[str, msgspec.Meta(max_length=64)]


class FeatureLevelRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/feature-level: the level to raise the cluster to, one above the present one."""

    level: Annotated[int, msgspec.Meta(ge=1, le=FEATURE_LEVEL_MAX)]


# Bulk: the same commands with what the path says elsewhere


class SubmitCommand(SubmitRequest, frozen=True, kw_only=True, tag_field="type", tag="submit_job"):
    """A submit among many."""


class CancelCommand(CancelRequest, frozen=True, kw_only=True, tag_field="type", tag="cancel_job"):
    """A cancel among many."""

    job_id: JobReference


class JobCommand(Command, frozen=True, kw_only=True):
    """A command that says no more than which jobs, among many."""

    job_id: JobReference


class HoldCommand(JobCommand, frozen=True, kw_only=True, tag_field="type", tag="hold_job"):
    """A hold among many."""


class ReleaseCommand(ReleaseRequest, frozen=True, kw_only=True, tag_field="type", tag="release_job"):
    """A release among many."""

    job_id: JobReference


class SuspendCommand(JobCommand, frozen=True, kw_only=True, tag_field="type", tag="suspend_job"):
    """A suspend among many."""


class ContinueCommand(JobCommand, frozen=True, kw_only=True, tag_field="type", tag="resume_job"):
    """A resume of a suspended job among many."""


class RequeueCommand(JobCommand, frozen=True, kw_only=True, tag_field="type", tag="requeue_job"):
    """A requeue among many."""


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


class OpenSessionCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="open_session"):
    """A session for a program, opened where its commands go; the revision that it is answered is its number."""


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
    | OpenSessionCommand
)

BULK_COMMANDS_MAX = 1024
"""Commands in one bulk request, count: a few batches, which take some hundredths of a second."""


class BulkRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/commands; each command has its own id and gets its own result."""

    commands: Annotated[tuple[BulkCommand, ...], msgspec.Meta(max_length=BULK_COMMANDS_MAX)]


# ---- the JSON shapes of what is done to runs and stuck buffers


class ClearRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/clear and /v1/persistent/{name}/clear. `discard`: also where the only copy of data is
    lost by it.
    """

    discard: bool = False


class PersistentClearedAnswer(Answer, frozen=True, kw_only=True):
    """A persistent buffer that left the list."""

    name: str
