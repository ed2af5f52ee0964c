"""Request bodies of `/v1`, shared by the server, the CLI and the client.

Every write carries a `command_id` made by its sender (cluster.schemas.command_ids); a retry with the same ID gets the
first response. Unknown fields are rejected, so that misspelt ones are not ignored. Default values are not sent, because
during a rolling upgrade an older replica does not know newer fields. A released default therefore never changes.
"""

from typing import Annotated, TypeAlias

import msgspec

from forebay.cluster.schemas.base import Answer, Command, Number, Request
from forebay.cluster.schemas.job_fields import SubmitRequest, UpdateRequest

FEATURE_LEVEL_MAX = 2**31 - 1
"""Largest feature level in a request, far above any real one."""

JOB_REFERENCE_CHARACTERS_MAX = 4_200
"""Length of a job or array task reference, characters, as read by `replica.decide.arrays`."""

JobReference: TypeAlias = Number | Annotated[str, msgspec.Meta(max_length=JOB_REFERENCE_CHARACTERS_MAX)]
"""Job ID, or text as in a path: `12`, `12_3` for an array task, `12_[1-4]` for several."""


# Jobs


class CancelRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/cancel. `hurry`: skip stage-out and discard unexported results."""

    hurry: bool = False


class ReleaseRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/release. `partial`: give up missing results of a failed stage-out."""

    partial: bool = False


# Pools and nodes (operators)


class PoolRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/pools/{name}. Sizes are text with a suffix (`96MiB`), exact and never rounded silently."""

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
    """Only show the effect on the node's jobs."""


# Replicas (operators)


class AddMemberRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/members: the addresses for peers and for clients, each `host:port`."""

    name: str
    peer: str
    api: str


class UpdateMemberRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/members/{name}/update: new addresses; omitted ones stay."""

    peer: str | None = None
    api: str | None = None


class TransferRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/members/transfer: the new leader; default: the most advanced replica."""

    name: str | None = None


class SetClockRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/clock: the correct time; the cluster's must be ahead of it."""

    at: Annotated[str, msgspec.Meta(max_length=64)]


class FeatureLevelRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/feature-level: the new level, one above the current one."""

    level: Annotated[int, msgspec.Meta(ge=1, le=FEATURE_LEVEL_MAX)]


# Bulk: the same commands with their path parameters as fields


class SubmitCommand(SubmitRequest, frozen=True, kw_only=True, tag_field="type", tag="submit_job"):
    """Submit of a bulk request."""


class CancelCommand(CancelRequest, frozen=True, kw_only=True, tag_field="type", tag="cancel_job"):
    """Cancel of a bulk request."""

    job_id: JobReference


class JobCommand(Command, frozen=True, kw_only=True):
    """Base of bulk commands whose only parameter is the job."""

    job_id: JobReference


class HoldCommand(JobCommand, frozen=True, kw_only=True, tag_field="type", tag="hold_job"):
    """Hold of a bulk request."""


class ReleaseCommand(ReleaseRequest, frozen=True, kw_only=True, tag_field="type", tag="release_job"):
    """Release of a bulk request."""

    job_id: JobReference


class SuspendCommand(JobCommand, frozen=True, kw_only=True, tag_field="type", tag="suspend_job"):
    """Suspend of a bulk request."""


class ContinueCommand(JobCommand, frozen=True, kw_only=True, tag_field="type", tag="resume_job"):
    """Resume of a suspended job in a bulk request."""


class RequeueCommand(JobCommand, frozen=True, kw_only=True, tag_field="type", tag="requeue_job"):
    """Requeue of a bulk request."""


class UpdateCommand(UpdateRequest, frozen=True, kw_only=True, tag_field="type", tag="update_job"):
    """Change of a pending job in a bulk request."""

    job_id: JobReference


class ClearCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="clear_buffer"):
    """Clear of a bulk request (operators): the buffer of a job, or the persistent buffer `name`.

    `discard`: clear even the only copy of data.
    """

    job_id: Number | None = None
    name: str | None = None
    discard: bool = False


class PoolCommand(PoolRequest, frozen=True, kw_only=True, tag_field="type", tag="set_pool"):
    """Pool change of a bulk request."""

    name: str


class DrainCommand(DrainRequest, frozen=True, kw_only=True, tag_field="type", tag="drain_node"):
    """Drain of a bulk request."""

    node: str


class ResumeCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="resume_node"):
    """Resume of a drained node in a bulk request."""

    node: str


class OpenSessionCommand(Command, frozen=True, kw_only=True, tag_field="type", tag="open_session"):
    """Open a program's session on the channel; the revision in the response is its number."""


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
"""Commands in one bulk request, count: a few batches, some hundredths of a second."""


class BulkRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/commands; each command has its own id and gets its own result."""

    commands: Annotated[tuple[BulkCommand, ...], msgspec.Meta(max_length=BULK_COMMANDS_MAX)]


# ---- requests about running jobs and stuck buffers


class ClearRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/clear and /v1/persistent/{name}/clear. `discard`: clear even the only copy of data."""

    discard: bool = False


class PersistentClearedAnswer(Answer, frozen=True, kw_only=True):
    """Response after a persistent buffer was cleared."""

    name: str
