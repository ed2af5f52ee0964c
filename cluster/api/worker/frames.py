"""Protocol between an API worker and its controller.

Both ends are of one release, because the controller starts its workers; the version is checked nevertheless, and kinds
are append-only. A number belongs to the worker, and identifies a request or command until it is answered.
"""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.cluster.api.web import AccessRules, DecodedSubmit
from forebay.cluster.ipc import FrameCodec
from forebay.cluster.schemas import ErrorView
from forebay.cluster.security import Role
from forebay.replica.model import Revocation, Site

WORKER_VERSION: Final = 1

FRAME_BYTES_MAX: Final = 24 * 1024 * 1024
"""Bytes of one frame: a body of the largest size with its decoded form, or the largest event of a stream."""

PART_BYTES_MAX: Final = 128 * 1024
"""Bytes of a response in one frame; a larger one is split, so that other responses can go in between."""

OUTSTANDING_MAX: Final = 65_536
"""Waiting requests and commands of all connections of one API worker, count; further ones are rejected."""

OBSERVATIONS_MAX: Final = 4096
"""Responses that an API worker has counted but not reported, count; at this number it reports at once."""

Number = int


class WorkerFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all frames."""


class Greeting(WorkerFrame, frozen=True, tag=1):
    """First frame of an API worker."""

    version: int


class RequestReceived(WorkerFrame, frozen=True, tag=2):
    """A request. `prepared`: the decoded submit; its `content` is needed only if the site's grammar has changed."""

    number: Number
    operation: str
    role: Role
    name: str
    serial: str
    params: dict[str, str]
    query: dict[str, str]
    content: bytes
    prepared: DecodedSubmit | None
    last_event_id: str | None
    through: str = ""


class RequestAbandoned(WorkerFrame, frozen=True, tag=3):
    """The client of a request disconnected, or does not read its stream."""

    number: Number


class ChunkWritten(WorkerFrame, frozen=True, tag=4):
    """A stream chunk was written; the next may follow."""

    number: Number


class ProgramConnected(WorkerFrame, frozen=True, tag=5):
    """A new channel connection."""

    program: Number
    role: Role
    name: str
    serial: str


class ProgramDisconnected(WorkerFrame, frozen=True, tag=6):
    """A channel connection ended."""

    program: Number


class CommandReceived(WorkerFrame, frozen=True, tag=7):
    """A program's command as received, and its decoded submit."""

    number: Number
    program: Number
    content: bytes
    prepared: DecodedSubmit | None


class ResponsesObserved(WorkerFrame, frozen=True, tag=8):
    """Responses made by a worker: route, status, seconds, and error code or an empty string."""

    answers: tuple[tuple[str, int, float, str], ...]


class Welcome(WorkerFrame, frozen=True, tag=21):
    """The controller's first frame, with the worker's configuration."""

    version: int
    cluster_id: str
    api: str
    channel: str
    authority: str
    certificate: str
    key: str
    access: AccessRules


class SiteSettings(WorkerFrame, frozen=True, tag=22):
    """The part of the state a worker needs; sent again after each change."""

    site: Site
    revocations: dict[str, Revocation]


class RevisionUpdate(WorkerFrame, frozen=True, tag=23):
    """Revision and the leader's channel address; sent again when relevant."""

    revision: int
    leader_channel: str


class ResponseStart(WorkerFrame, frozen=True, tag=24):
    """A response or its first part; `left_bytes` follow in further frames."""

    number: Number
    status: int
    revision: int
    content_type: str
    content: bytes
    left_bytes: int = 0


class ResponseChunk(WorkerFrame, frozen=True, tag=25):
    """A further part of a response."""

    number: Number
    content: bytes


class FailureResponse(WorkerFrame, frozen=True, tag=26):
    """A request or command failed, or its outcome is unknown."""

    number: Number
    status: int
    problem: ErrorView
    headers: dict[str, str]


class RedirectResponse(WorkerFrame, frozen=True, tag=27):
    """Another replica leads."""

    number: Number
    base: str


class StreamStart(WorkerFrame, frozen=True, tag=28):
    """A stream begins."""

    number: Number
    revision: int
    content_type: str


class StreamChunkSent(WorkerFrame, frozen=True, tag=29):
    """A stream chunk; the next follows after the worker has written this one."""

    number: Number
    payload: bytes
    farewell: bytes


class StreamEnd(WorkerFrame, frozen=True, tag=30):
    """A stream ended."""

    number: Number


class CommandSettled(WorkerFrame, frozen=True, tag=31):
    """A command succeeded and is durable."""

    number: Number
    revision: int
    job: int


FromWorker = (
    Greeting
    | RequestReceived
    | RequestAbandoned
    | ChunkWritten
    | ProgramConnected
    | ProgramDisconnected
    | CommandReceived
    | ResponsesObserved
)
FromController = (
    Welcome
    | SiteSettings
    | RevisionUpdate
    | ResponseStart
    | ResponseChunk
    | FailureResponse
    | RedirectResponse
    | StreamStart
    | StreamChunkSent
    | StreamEnd
    | CommandSettled
)

CONTROLLER_CODEC: Final = FrameCodec[FromController, FromWorker](FromWorker, bytes_max=FRAME_BYTES_MAX)
"""The controller's end."""

WORKER_CODEC: Final = FrameCodec[FromWorker, FromController](FromController, bytes_max=FRAME_BYTES_MAX)
"""The worker's end."""
