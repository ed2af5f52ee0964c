"""The burst-buffer state machine: sixteen states, one transition table.

Theory of operation
===================

A *buffer* is the space, and the data in it, that one job (or one persistent name) has on the burst buffer. It is in
exactly one of the sixteen states that Slurm's documentation names. An *input* changes the state; the table below has
the next state for each legal pair of state and input. All other pairs are illegal: `decide` rejects them by name, and
a ledger that contains one is broken (fail stop).

A buffer of a job goes through five phases, in this order, each entered by an event and left by the report of the
agent that did the work:

1. It *waits* (`pending`): no space, no data, until a scheduling cycle allocates its space.
2. It is *filled* (`staging-in`, then `staged-in`): space is held, the agent creates the directories and copies data
   in. A failure leaves it in `staging-in`, with its space, for inspection; a retry is a new attempt.
3. It is *used* (`pre-run`, `running`, `suspended`): a node is allocated; the script reads and writes it.
   An allocation that is revoked before the script ran goes through `alloc-revoke`.
4. It is *drained* (`post-run`, then `staging-out`): the script has ended; results are copied out. A failure
   leaves it in `staging-out`, because it holds the only copy.
5. It is *released* (`teardown`, `teardown-fail`, `complete`): the data is removed, and then the space is free.

A persistent buffer has its own four states (`allocating`, `allocated`, `deleting`, `deleted`) and holds its space in
all but the last.

Space is held in every state but `pending`, `complete` and `deleted`: see `HOLDING`. Free capacity is derived from
that set and nothing else (law 8). No input leads from a state in which the script may have run back to one in which
it may run again, except REQUEUED, which starts a new life from `complete`, after the old one has released its space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

import msgspec

from forebay.replica.values import NEVER, Instant


class BufferState(IntEnum):
    """Slurm's sixteen burst-buffer states; the numbers are wire numbers (law 12)."""

    PENDING = 1
    ALLOCATING = 2
    ALLOCATED = 3
    DELETING = 4
    DELETED = 5
    STAGING_IN = 6
    STAGED_IN = 7
    PRE_RUN = 8
    ALLOC_REVOKE = 9
    RUNNING = 10
    SUSPENDED = 11
    POST_RUN = 12
    STAGING_OUT = 13
    TEARDOWN = 14
    TEARDOWN_FAIL = 15
    COMPLETE = 16

    @property
    def word(self) -> str:
        """Return the state as Slurm spells it, for example `staging-in`."""
        return self.name.lower().replace("_", "-")


class BufferInput(IntEnum):
    """Inputs of the buffer state machine."""

    ALLOCATED = 1
    """A scheduling cycle allocated its space."""
    STAGED_IN = 2
    STAGE_FAILED = 3
    """The operation of its present state failed; the state does not change."""
    STAGE_RETRIED = 4
    """The operation of its present state is ordered again, as a new attempt."""
    RUN_ORDERED = 5
    RUN_STARTED = 6
    SUSPENDED = 7
    RESUMED = 8
    RUN_ENDED = 9
    STAGE_OUT_STARTED = 10
    ALLOCATION_REVOKED = 11
    TEARDOWN_STARTED = 12
    TORN_DOWN = 13
    TEARDOWN_FAILED = 14
    ABANDONED = 15
    """Its job was cancelled before it had any space."""
    REQUEUED = 16
    CREATION_STARTED = 17
    CREATED = 18
    DELETION_STARTED = 19
    DELETED = 20
    RESTARTED = 21
    """The operation of its present state restarts, staging-out from post-run on (restart-policy slurm)."""
    CLEARED = 22
    """An operator ended the attempts to remove it."""
    TAKEN_UP = 23
    """The scheduler set up a lingering external job again: existing data is compared, and copied where it differs."""


_S, _I = BufferState, BufferInput

TRANSITIONS: Mapping[tuple[BufferState, BufferInput], BufferState] = MappingProxyType(
    {
        # 1. waiting
        (_S.PENDING, _I.ALLOCATED): _S.STAGING_IN,
        (_S.PENDING, _I.ABANDONED): _S.COMPLETE,
        (_S.PENDING, _I.CREATION_STARTED): _S.ALLOCATING,
        # 2. staging in
        (_S.STAGING_IN, _I.STAGED_IN): _S.STAGED_IN,
        (_S.STAGING_IN, _I.STAGE_FAILED): _S.STAGING_IN,
        (_S.STAGING_IN, _I.STAGE_RETRIED): _S.STAGING_IN,
        (_S.STAGING_IN, _I.ALLOCATION_REVOKED): _S.ALLOC_REVOKE,
        (_S.STAGING_IN, _I.TEARDOWN_STARTED): _S.TEARDOWN,
        (_S.STAGING_IN, _I.TAKEN_UP): _S.STAGING_IN,
        (_S.STAGED_IN, _I.TAKEN_UP): _S.STAGING_IN,
        (_S.STAGED_IN, _I.RUN_ORDERED): _S.PRE_RUN,
        (_S.STAGED_IN, _I.ALLOCATION_REVOKED): _S.ALLOC_REVOKE,
        (_S.STAGED_IN, _I.TEARDOWN_STARTED): _S.TEARDOWN,
        # 3. in use
        (_S.PRE_RUN, _I.RUN_STARTED): _S.RUNNING,
        (_S.PRE_RUN, _I.RUN_ENDED): _S.POST_RUN,
        (_S.PRE_RUN, _I.ALLOCATION_REVOKED): _S.ALLOC_REVOKE,
        (_S.PRE_RUN, _I.TEARDOWN_STARTED): _S.TEARDOWN,
        (_S.ALLOC_REVOKE, _I.TEARDOWN_STARTED): _S.TEARDOWN,
        (_S.RUNNING, _I.SUSPENDED): _S.SUSPENDED,
        (_S.RUNNING, _I.RUN_ENDED): _S.POST_RUN,
        (_S.RUNNING, _I.TEARDOWN_STARTED): _S.TEARDOWN,
        (_S.SUSPENDED, _I.RESUMED): _S.RUNNING,
        (_S.SUSPENDED, _I.RUN_ENDED): _S.POST_RUN,
        (_S.SUSPENDED, _I.TEARDOWN_STARTED): _S.TEARDOWN,
        # 4. draining
        (_S.POST_RUN, _I.STAGE_FAILED): _S.POST_RUN,
        (_S.POST_RUN, _I.STAGE_RETRIED): _S.POST_RUN,
        (_S.POST_RUN, _I.STAGE_OUT_STARTED): _S.STAGING_OUT,
        (_S.POST_RUN, _I.TEARDOWN_STARTED): _S.TEARDOWN,
        (_S.STAGING_OUT, _I.STAGE_FAILED): _S.STAGING_OUT,
        (_S.STAGING_OUT, _I.STAGE_RETRIED): _S.STAGING_OUT,
        (_S.STAGING_OUT, _I.TEARDOWN_STARTED): _S.TEARDOWN,
        # 5. releasing
        (_S.TEARDOWN, _I.STAGE_RETRIED): _S.TEARDOWN,
        (_S.TEARDOWN, _I.TORN_DOWN): _S.COMPLETE,
        (_S.TEARDOWN, _I.TEARDOWN_FAILED): _S.TEARDOWN_FAIL,
        (_S.TEARDOWN_FAIL, _I.STAGE_RETRIED): _S.TEARDOWN,
        (_S.COMPLETE, _I.REQUEUED): _S.PENDING,
        (_S.TEARDOWN_FAIL, _I.CLEARED): _S.COMPLETE,
        # restarts by a new leader (restart-policy slurm)
        (_S.PRE_RUN, _I.RESTARTED): _S.PRE_RUN,
        (_S.POST_RUN, _I.RESTARTED): _S.POST_RUN,
        (_S.STAGING_OUT, _I.RESTARTED): _S.POST_RUN,
        (_S.TEARDOWN, _I.RESTARTED): _S.TEARDOWN,
        # persistent buffers
        (_S.ALLOCATING, _I.CREATED): _S.ALLOCATED,
        (_S.ALLOCATING, _I.STAGE_FAILED): _S.ALLOCATING,
        (_S.ALLOCATING, _I.STAGE_RETRIED): _S.ALLOCATING,
        (_S.ALLOCATING, _I.DELETION_STARTED): _S.DELETING,
        (_S.ALLOCATED, _I.DELETION_STARTED): _S.DELETING,
        (_S.DELETING, _I.STAGE_FAILED): _S.DELETING,
        (_S.DELETING, _I.STAGE_RETRIED): _S.DELETING,
        (_S.DELETING, _I.DELETED): _S.DELETED,
    }
)

HOLDING: frozenset[BufferState] = frozenset(BufferState) - {_S.PENDING, _S.COMPLETE, _S.DELETED}
"""States in which a buffer occupies space."""

BEFORE_RUN: frozenset[BufferState] = frozenset({_S.PENDING, _S.STAGING_IN, _S.STAGED_IN})
"""States in which the job is still PENDING."""


class IllegalTransition(Exception):
    """An input without a transition from the present state.

    Decisions reject it; in a ledger it is fatal.
    """

    def __init__(self, state: BufferState, buffer_input: BufferInput) -> None:
        super().__init__(f"a buffer that is {state.word} cannot take {buffer_input.name}")
        self.state = state
        self.input = buffer_input


def next_state(state: BufferState, buffer_input: BufferInput) -> BufferState:
    """Return the state that follows an input.

    Raises:
        IllegalTransition: the transition table has no row for the pair.
    """
    following = TRANSITIONS.get((state, buffer_input))
    if following is None:
        raise IllegalTransition(state, buffer_input)
    return following


class TransferKind(IntEnum):
    """Kinds of transferred objects (DataWarp's `type=`)."""

    FILE = 1
    DIRECTORY = 2
    EITHER = 3
    """Whichever the source is when it is moved (`copy_in`, `copy_out`)."""


class Access(IntEnum):
    """Access modes of a buffer on the nodes of a job (DataWarp's `access_mode=`)."""

    STRIPED = 1
    PRIVATE = 2
    LDBALANCE = 3


class Transfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `stage_in` or `stage_out`. `outside` is an absolute path; `inside` starts with a variable of the buffer."""

    kind: TransferKind
    outside: str
    inside: str
    pattern: str = ""
    """Pattern of names below the source, such as `*/run-?.h5`. With it the destination is a directory, into which every
    match goes under its last name; empty: the source itself is moved.
    """


class Buffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The buffer of one job. Times are Instants, sizes bytes."""

    job: int
    state: BufferState
    pool: str
    """The pool chosen at submit; empty if the job requested no capacity."""
    granted_bytes: int
    """Capacity, rounded up to the pool's granularity at submit; held while the state is in HOLDING."""
    node: str = ""
    created_at: Instant = NEVER
    changed_at: Instant = NEVER
    staged_in_bytes: int = 0
    staged_in_files: int = 0
    staged_out_bytes: int = 0
    staged_out_files: int = 0
    hurry: bool = False
    """True if teardown skips stage-out by request of an operator or the user."""
    epoch: int = 0
    """In a shared filesystem: the attempt that allocated the space.

    The directory's name contains it, so that a late operation of an earlier life of the buffer never reaches a later
    one.
    """
    filesystems: tuple[str, ...] = ()
    """All shared filesystems that the job's operations need, that of its own buffer first.

    Set for jobs that use persistent buffers in shared filesystems; empty: only the filesystem of its pool, if it has
    one.
    """

    @property
    def held_bytes(self) -> int:
        """Return the space that the buffer occupies in its pool, bytes."""
        return self.granted_bytes if self.state in HOLDING else 0


# ---- persistent buffers: named space, unique in the cluster, that outlives the jobs that create, use and delete it


WHOLE_BUFFER = "FOREBAY_JOB_DIR"
"""Environment variable of a job's buffer, which has a directory for each access mode."""

VARIABLE_DIRECTORIES: Mapping[str, str] = MappingProxyType(
    {"DW_JOB_STRIPED": "striped", "DW_JOB_LDBALANCE": "striped", "DW_JOB_PRIVATE": "private"}
)
"""Directory in a job's buffer that the variable of each access mode points to. Two share one."""

JOB_PREFIX = "DW_JOB_"
"""Prefix of the environment variables of a job's buffer."""


def named_path(path: str, names: Iterable[str], access: Sequence[Access]) -> str | None:
    """Return a path below the variable of a named buffer as one below the variable of an access mode.

    `$DW_JOB_PRIVATE_a/x` becomes `$DW_JOB_PRIVATE/a/x`. `$DW_JOB_a/x` has the first access mode. None: no buffer has
    that name.
    """
    head, _, rest = path.partition("/")
    variable = head[2:-1] if head.startswith("${") and head.endswith("}") else head[1:]
    if not head.startswith("$") or not variable.startswith(JOB_PREFIX):
        return None
    suffix = _NOT_IN_VARIABLES.sub("_", variable.removeprefix(JOB_PREFIX))
    for name in names:
        own = _NOT_IN_VARIABLES.sub("_", name)
        for mode in Access:
            if suffix == f"{mode.name}_{own}":
                return f"${JOB_PREFIX}{mode.name}/{name}/{rest}"
        if suffix == own:
            return f"${JOB_PREFIX}{access[0].name}/{name}/{rest}"
    return None


def named_variables(name: str, access: Sequence[Access]) -> dict[str, str]:
    """Return the environment variables of a named buffer, each with that of its access mode."""
    own = _NOT_IN_VARIABLES.sub("_", name)
    found = {f"{JOB_PREFIX}{mode.name}_{own}": f"{JOB_PREFIX}{mode.name}" for mode in access}
    return {**found, f"{JOB_PREFIX}{own}": f"{JOB_PREFIX}{access[0].name}"}


PERSISTENT_PREFIX = "DW_PERSISTENT_STRIPED_"
"""Prefix of the environment variable that points to a persistent buffer."""

_NOT_IN_VARIABLES = re.compile("[^A-Za-z0-9_]")


def persistent_variable(name: str) -> str:
    """Return the environment variable of a persistent buffer, as HPE's DataWarp names it.

    Characters that no shell accepts in a variable become `_`: `$DW_PERSISTENT_STRIPED_lake_2` points to `lake-2`.
    """
    return PERSISTENT_PREFIX + _NOT_IN_VARIABLES.sub("_", name)


PERSISTENT_STATES = frozenset({BufferState.ALLOCATING, BufferState.ALLOCATED, BufferState.DELETING})
"""States of an existing persistent buffer; a deleted one has no record."""


class PersistentBuffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A persistent buffer, which holds its space from allocating to deleted (law 8).

    Times are Instants; sizes are in bytes or units of the pool.
    """

    name: str
    user: str
    """The owner: the user of the job that created it."""
    gid: int
    pool: str
    granted_bytes: int
    access: tuple[Access, ...]
    type: str
    state: BufferState
    """ALLOCATING, ALLOCATED or DELETING; a deleted buffer has no record."""
    node: str
    """The node whose storage holds it; empty if it lies in a shared filesystem."""
    job: int
    """The job that is creating or deleting it; afterwards the job that created it."""
    created_at: Instant = NEVER
    changed_at: Instant = NEVER
    hurry: bool = False
    filesystem: str = ""
    """The shared filesystem that holds it. If set, `node` is empty, and jobs that use it may run on any node."""
    directory: str = ""
    """Directory below the path of its shared filesystem: `CLUSTER/NAME.JOB.EPOCH`.

    JOB created it, and EPOCH is the attempt that allocated its space, so a buffer created again never reuses a
    directory.
    """

    @property
    def held_bytes(self) -> int:
        """Return the space that the buffer occupies in its pool, bytes."""
        return self.granted_bytes if self.state in HOLDING else 0
