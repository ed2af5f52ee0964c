"""What can be asked of the controller: requests, imperative, each settled by one entry of a batch.

Commands are not in the ledger (their events and refusals are), so they have no wire numbers; `kind_of` gives the name
that the ledger keeps for audits.
"""

from __future__ import annotations

import hashlib
import re
from enum import IntEnum

import msgspec

from replica.buffers import BufferRequest
from replica.events import Stage
from replica.jobs import Hold, JobSpec, JobState
from replica.policy import Policy
from replica.pools import Pool


class ActorRole(IntEnum):
    """Who asks; the numbers are wire numbers (law 12)."""

    CONTROLLER = 1
    OPERATOR = 2
    USER = 3
    AGENT = 4


class Actor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The identity that a request was authenticated as."""

    role: ActorRole
    name: str

    def __str__(self) -> str:
        return f"{self.role.name.lower()}:{self.name}"


CONTROLLER = Actor(ActorRole.CONTROLLER, "leader")


class FoundCluster(msgspec.Struct, frozen=True):
    """Make the first event; refused when there is one."""

    cluster_id: str
    name: str
    policy: Policy
    pools: tuple[Pool, ...]


class SetPool(msgspec.Struct, frozen=True):
    """Make or change a pool (operator)."""

    pool: Pool


class SetPolicy(msgspec.Struct, frozen=True):
    """Change the site policy (operator)."""

    policy: Policy


class RegisterNode(msgspec.Struct, frozen=True):
    """An agent announces itself; a new instance restarts its unfinished staging as new attempts."""

    node: str
    cpus: int
    instance: str
    storage_id: str


class DrainNode(msgspec.Struct, frozen=True):
    """Keep new work from a node (operator)."""

    node: str
    reason: str


class ResumeNode(msgspec.Struct, frozen=True):
    """Give a drained node new work again (operator)."""

    node: str


class MarkNodeDown(msgspec.Struct, frozen=True):
    """The leader has not heard of a node's agent (controller)."""

    node: str
    reason: str


class MarkNodeBack(msgspec.Struct, frozen=True):
    """The leader hears a node's agent again (controller)."""

    node: str


class SubmitJob(msgspec.Struct, frozen=True):
    """Make a job."""

    spec: JobSpec
    request: BufferRequest | None
    hold: Hold = Hold.NONE


class CancelJob(msgspec.Struct, frozen=True):
    """End a job; `hurry` skips stage-out."""

    job: int
    hurry: bool = False


class HoldJob(msgspec.Struct, frozen=True):
    """Hold a pending job back."""

    job: int


class ReleaseJob(msgspec.Struct, frozen=True):
    """End a hold, and order an operation again that had failed for good."""

    job: int


class OperationDone(msgspec.Struct, frozen=True, tag="done"):
    """A stage-in, post-run, stage-out or teardown succeeded."""

    files: int = 0
    size_bytes: int = 0
    digest: str = ""


class OperationFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A stage-in, post-run, stage-out or teardown failed; `message` says why, in words.

    `final`: what is wrong does not go away by itself (a source that does not exist), so it is not tried again until
    somebody releases the job.
    """

    message: str
    final: bool = False


class ScriptStarted(msgspec.Struct, frozen=True, tag="started"):
    """The job's script is running."""


class ScriptEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The job's script has ended: its exit code, or the signal that ended it; `result` COMPLETED, FAILED, TIMEOUT,
    CANCELLED or NODE_FAIL.
    """

    result: JobState
    exit_code: int = 0
    signal: int = 0
    message: str = ""


OperationResult = OperationDone | OperationFailed | ScriptStarted | ScriptEnded


class ReportOperation(msgspec.Struct, frozen=True):
    """What an agent says of one order."""

    node: str
    job: int
    attempt: int
    stage: Stage
    result: OperationResult


class RaiseFeatureLevel(msgspec.Struct, frozen=True):
    """Allow what came with the next feature level (operator).

    `known` are the facts it is decided by: each member of the cluster with the highest level that it says it knows, 0
    for one that did not say. They are no part of what the operator asks for, so a retry may bring others.
    """

    level: int
    known: tuple[tuple[str, int], ...]


class RunSchedulingPass(msgspec.Struct, frozen=True):
    """Give space and CPUs to whoever may have them now, and do what is due by time (controller)."""


Command = (
    FoundCluster
    | SetPool
    | SetPolicy
    | RegisterNode
    | DrainNode
    | ResumeNode
    | MarkNodeDown
    | MarkNodeBack
    | SubmitJob
    | CancelJob
    | HoldJob
    | ReleaseJob
    | ReportOperation
    | RaiseFeatureLevel
    | RunSchedulingPass
)


class Request(msgspec.Struct, frozen=True):
    """A command with its client-made id (16 bytes, UUIDv7) and the actor it was authenticated as."""

    id: bytes
    actor: Actor
    command: Command


_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


def kind_of(command: Command) -> str:
    """Return the command's name as the ledger keeps it, for example `submit_job`."""
    kind = type(command)
    word = _WORDS.get(kind)
    if word is None:
        word = _WORDS[kind] = _WORD.sub("_", kind.__name__).lower()
    return word


DIGEST_BYTES = 8
"""Digest of a command, bytes: tells a retry from a mistaken second use of an id; nobody gains by a collision."""

_ENCODER = msgspec.msgpack.Encoder()


def command_digest(request: Request) -> bytes:
    """Return the digest of who asks for what: the same for a retry, another for another command with the same id."""
    command = request.command
    if type(command) is RaiseFeatureLevel:
        command = RaiseFeatureLevel(command.level, ())
    encoded = _ENCODER.encode((request.actor, kind_of(command), command))
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


_WORDS: dict[type, str] = {}
"""The names found so far; a fixed function of the classes, kept because each entry of a batch has one."""
