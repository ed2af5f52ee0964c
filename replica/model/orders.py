"""Orders: the operations that agents request from the leader, as JSON objects."""

from __future__ import annotations

import msgspec

from forebay.replica.model.buffers import Transfer
from forebay.replica.model.pools import NO_LAYOUT, QUOTA_AUTO, FilesystemLayout
from forebay.replica.model.provider import Provision
from forebay.replica.model.requests import (
    DEFAULT_PRIORITY,
    ArrayTask,
    CreatePersistent,
    DestroyPersistent,
    JobOptions,
    ListTransfer,
)
from forebay.replica.model.transfers import RateShares, TransferChoice, TransferRules
from forebay.replica.values import NEVER, Instant


class OrderFilesystem(msgspec.Struct, frozen=True, kw_only=False):
    """The location of an order's buffer in a shared filesystem (JSON object)."""

    name: str
    path: str
    identity: str
    """Content of the shared filesystem's identity file. An agent that does not find it there has not mounted the
    filesystem.
    """
    directory: str
    """The buffer's directory below `path`."""
    quota: str = QUOTA_AUTO
    """Adapter that limits the buffer to its capacity."""
    layout: FilesystemLayout = NO_LAYOUT
    """Placement of the buffer's files."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of an order's job, for a provider's scripts (JSON object). Times are NEVER before the event."""

    state: str = "PENDING"
    result: str = "PENDING"
    """State of the job after its stage-out; PENDING before the script has ended."""
    buffer_state: str = "pending"
    priority: int = DEFAULT_PRIORITY
    restarts: int = 0
    dependency: str = ""
    """Unmet conditions, for example `afterok:12,singleton`."""
    output: str = ""
    error: str = ""
    """Files for standard output and error; an empty `error` means the file of standard output."""
    comment: str = ""
    """History of the job's failures, one per line."""
    tres: str = ""
    """Resources of the job, for example `cpu=1,node=1,bb/lua=3G`."""
    exit_code: int = 0
    signal: int = 0
    submitted_at: Instant = NEVER
    eligible_at: Instant = NEVER
    started_at: Instant = NEVER
    ended_at: Instant = NEVER
    deadline: Instant = NEVER
    suspended_at: Instant = NEVER
    suspended_s: int = 0
    """Seconds of finished suspensions."""


NO_STATUS = JobStatus()
"""Status of a job without information."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An operation for an agent (JSON object). Durations are seconds, sizes bytes."""

    job: int
    attempt: int
    stage: str
    """stage_in, run, post_run, stage_out or teardown."""
    user: str
    name: str
    workdir: str
    capacity_bytes: int = 0
    """Capacity of the buffer; 0: none was requested."""
    has_buffer: bool = False
    access: tuple[str, ...] = ()
    """striped, private, ldbalance: determines the job's DW_JOB_* variables."""
    transfers: tuple[Transfer, ...] = ()
    """For stage_in and stage_out: (kind, outside path, inside path such as $DW_JOB_STRIPED/data)."""
    roots: tuple[str, ...] = ()
    """Directories that the outside paths must lie below, expanded for the user."""
    timeout_s: int = 0
    """stage_in, post_run, stage_out, teardown: time limit of the operation."""
    script: str = ""
    output: str = ""
    """run: the file for standard output, absolute."""
    error: str = ""
    """run: the file for standard error, absolute; empty: that of standard output."""
    input: str = ""
    """run: the file for standard input, absolute; empty: none."""
    environment: tuple[tuple[str, str], ...] = ()
    time_limit_s: int = 0
    cpus: int = 1
    cancel: bool = False
    """run: end the script with the result CANCELLED."""
    suspend: bool = False
    """run: stop the script and its time limit."""
    started: bool = False
    """run: the controller knows that the script was started. An agent without a record of it must report NODE_FAIL, and
    never start it.
    """
    hurry: bool = False
    creates: tuple[CreatePersistent, ...] = ()
    """stage_in: persistent buffers to create first, with their granted capacity and pool."""
    destroys: tuple[DestroyPersistent, ...] = ()
    """stage_in, teardown: persistent buffers to delete first."""
    uses: tuple[str, ...] = ()
    """Persistent buffers that the job uses."""
    names: tuple[str, ...] = ()
    """Names of the job's own buffers, each a directory of its buffer."""
    provision: Provision | None = None
    """Provider that performs the operations; None: the agent itself. Most of the fields below are for providers."""
    directives: str = ""
    """Effective directives; those from --bb or --bbf are not in the script."""
    pool: str = ""
    pool_is_bytes: bool = True
    gid: int = 0
    """Group that the job requested; 0: the user's own."""
    options: JobOptions | None = None
    array: ArrayTask | None = None
    """`options` and `array` are for scripts, too, which receive them as variables."""
    special: SpecialTransfers | None = None
    """stage_in, stage_out with the native provider: transfers besides `transfers`, and special options."""
    rules: TransferRules | None = None
    """stage_in, stage_out with the native provider, from feature level 4 on: transfer rules. None: the rules before
    that level.
    """
    shares: RateShares | None = None
    """With `rules`: present rate limits on this node."""
    filesystem: OrderFilesystem | None = None
    """Shared filesystem of the buffer; None: it lies in the agent's own directory."""
    partial: bool = False
    """stage_out: missing sources are listed in the receipt and tolerated, because the script failed or a user accepted
    it.

    Otherwise they fail the stage-out after everything else has been copied.
    """
    persistent: tuple[tuple[str, OrderFilesystem], ...] = ()
    """Location of each persistent buffer in `creates`, `destroys` and `uses` that lies in a shared filesystem."""
    status: JobStatus | None = None
    """With `provision`: status of the job."""


# ---- transfers besides files and directories: lists, Spur's commands, and options of single transfers


class SpecialTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of an order besides files and directories, and options of single transfers (JSON object)."""

    lists: tuple[ListTransfer, ...] = ()
    """Transfers of the files that a list names."""
    list_roots: tuple[str, ...] = ()
    """Directories that list files, and the outside paths they name, must lie below."""
    commands: tuple[str, ...] = ()
    """Shell commands of the user, run after the transfers."""
    environment: tuple[tuple[str, str], ...] = ()
    """With `commands`: the job's environment."""
    choices: tuple[TransferChoice, ...] = ()
    """Options of each of the order's transfers; empty if none has any."""
    list_choices: tuple[TransferChoice, ...] = ()
    granted: tuple[tuple[str, int], ...] = ()
    """Capacity of each persistent buffer that the job uses, bytes, for pools that count bytes."""


NO_SPECIAL_TRANSFERS = SpecialTransfers()
