"""What a job asked for beyond its JobSpec: everything that came with feature level 3.

A job that asks for none of it has no record (State.options), so what an earlier level writes is as it was.
"""

from __future__ import annotations

import msgspec

from replica.buffers import Access


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
