"""What a job asked for beyond its JobSpec: everything that came with feature level 3.

A job that asks for none of it has no record (State.options), so what an earlier level writes is as it was.
"""

from __future__ import annotations

import msgspec

from replica.model.buffers import Access
from replica.model.jobs import Dependency, DependencyKind
from replica.values import Instant


class CreatePersistent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One `create_persistent`. `capacity_bytes` counts units where the pool does; `pool` empty: the default pool."""

    name: str
    capacity_bytes: int
    pool: str = ""
    access: tuple[Access, ...] = ()
    type: str = ""
    place: str = ""
    """Where in what the user wrote it stands, for example `line 3, column 1`."""
    units: str = "bytes"
    """As in BufferOptions."""


class DestroyPersistent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One `destroy_persistent`; `hurry`: without its stage-out."""

    name: str
    hurry: bool = False
    place: str = ""


class ListTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One `stage_in` or `stage_out` (`outgoing`) with `type=list`: `source` is the file that lists what to move."""

    outgoing: bool
    source: str
    destination: str
    place: str = ""


class BufferOptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a job asked of burst buffers beyond its BufferRequest."""

    directives_kind: str = ""
    """dw, bb, lua, spur, or empty where nothing was written."""
    creates: tuple[CreatePersistent, ...] = ()
    destroys: tuple[DestroyPersistent, ...] = ()
    uses: tuple[str, ...] = ()
    """Names of persistent buffers that the job works with (`persistentdw name=`)."""
    swap_bytes: int = 0
    """Swap for each node, bytes."""
    options: tuple[str, ...] = ()
    """Options that are not known here, as they were written: they go to the provider."""
    stage_in_command: str = ""
    stage_out_command: str = ""
    """Spur's commands, run instead of transfers."""
    lists: tuple[ListTransfer, ...] = ()
    units: str = "bytes"
    """What capacity counts: bytes, or count for units of the pool. While it is not decided, `bare`: a number without a
    suffix, which is one or the other by its pool."""


class JobOptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a job asked for beyond its JobSpec; every field has the value of a job that did not ask."""

    nodes: int = 1
    """0: the job runs no script, and only creates or destroys persistent buffers (`-N0`)."""
    account: str = ""
    qos: str = ""
    licenses: tuple[tuple[str, int], ...] = ()
    reservation: str = ""
    nice: int = 0
    array_job: int = 0
    array_task: int = 0
    array_throttle: int = 0
    singleton: bool = False
    requeue: bool = True
    mail_types: tuple[str, ...] = ()
    mail_user: str = ""
    comment: str = ""
    partition: str = ""
    gid: int = 0
    groups: tuple[int, ...] = ()
    buffer: BufferOptions | None = None
    by_operator: bool = False
    """Whether an operator submitted a job that destroys persistent buffers: then it may destroy other users'. Decided
    from who asks, never taken from what is asked.
    """


NO_OPTIONS = JobOptions()
"""What a job without a record asked for."""


# ---- what may change of a job while it waits, and how its conditions are to be read: from feature level 4 on


class JobTerms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """More of what a job asked for."""

    any_of: bool = False
    """Whether one of its dependencies is enough (`?`); otherwise all must hold."""


NO_TERMS = JobTerms()
"""What a job without a record asked for."""


class JobChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What of a waiting job is to be as it is here; None: it stays as it is. Durations are whole seconds."""

    name: str | None = None
    time_limit_s: int | None = None
    priority: int | None = None
    begin_at: Instant | None = None
    deadline: Instant | None = None
    """NEVER: none any more."""
    dependencies: tuple[Dependency, ...] | None = None
    singleton: bool | None = None
    any_of: bool | None = None
    nice: int | None = None
    account: str | None = None
    qos: str | None = None
    licenses: tuple[tuple[str, int], ...] | None = None
    reservation: str | None = None
    partition: str | None = None
    """Empty, as for the four before it: none any more."""
    comment: str | None = None
    requeue: bool | None = None
    mail_types: tuple[str, ...] | None = None
    mail_user: str | None = None


NO_CHANGE = JobChange()

OF_SPEC = ("name", "time_limit_s", "priority", "begin_at", "deadline", "dependencies")
"""Fields of a change that are fields of JobSpec."""

OF_OPTIONS = (
    "singleton",
    "nice",
    "account",
    "qos",
    "licenses",
    "reservation",
    "partition",
    "comment",
    "requeue",
    "mail_types",
    "mail_user",
)
"""Fields of a change that are fields of JobOptions."""


def changed_fields(change: JobChange, fields: tuple[str, ...]) -> dict[str, object]:
    """Return those of `fields` that the change is about, with their values."""
    found = ((field, getattr(change, field)) for field in fields)
    return {field: value for field, value in found if value is not None}


class AfterTask(msgspec.Struct, frozen=True, array_like=True):
    """A dependency on one task of an array, as it is asked for: `afterok:1_3`."""

    kind: DependencyKind
    array: int
    task: int
