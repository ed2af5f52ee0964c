"""orders."""

from __future__ import annotations

import msgspec

from replica.model.buffers import Transfer
from replica.model.provider import Provision
from replica.model.requests import (
    DEFAULT_PRIORITY,
    ArrayTask,
    CreatePersistent,
    DestroyPersistent,
    JobOptions,
    ListTransfer,
)
from replica.model.transfers import RateShares, TransferChoice, TransferRules
from replica.values import NEVER, Instant


class OrderFilesystem(msgspec.Struct, frozen=True, kw_only=False):
    """Where the buffer of an order lies that is in a shared filesystem (JSON object)."""

    name: str
    path: str
    identity: str
    """What the shared filesystem's own file says: an agent that does not find it there has not mounted the shared
    filesystem.
    """
    directory: str
    """The buffer, below `path`."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of an order's job, for the scripts of a provider (JSON object). NEVER: it has not happened."""

    state: str = "PENDING"
    result: str = "PENDING"
    """State that the job will have after its stage-out; PENDING before the script has ended."""
    buffer_state: str = "pending"
    priority: int = DEFAULT_PRIORITY
    restarts: int = 0
    dependency: str = ""
    """Conditions that are not met yet, for example `afterok:12,singleton`."""
    output: str = ""
    error: str = ""
    """Files for standard output and error; an empty `error` means the file of standard output."""
    comment: str = ""
    """What went wrong in the job's life, one line for each failure."""
    tres: str = ""
    """What the job counts for, for example `cpu=1,node=1,bb/lua=3G`."""
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
"""Status of a job that nothing is known of."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Thing to do, as agents read it (JSON object). Durations are seconds, sizes bytes."""

    job: int
    attempt: int
    stage: str
    """stage_in, run, post_run, stage_out or teardown."""
    user: str
    name: str
    workdir: str
    capacity_bytes: int = 0
    """What the buffer may hold; 0: no capacity was asked for."""
    has_buffer: bool = False
    access: tuple[str, ...] = ()
    """striped, private, ldbalance: which DW_JOB_* variables the job has."""
    transfers: tuple[Transfer, ...] = ()
    """For stage_in and stage_out: (kind, outside path, inside path such as $DW_JOB_STRIPED/data)."""
    roots: tuple[str, ...] = ()
    """Directories that the outside paths must lie beneath, already expanded for the user."""
    timeout_s: int = 0
    """stage_in, post_run, stage_out, teardown: how long the operation may take."""
    script: str = ""
    output: str = ""
    """run: the file for standard output and error, absolute."""
    error: str = ""
    """run: the file for standard error, absolute; empty: that of standard output."""
    input: str = ""
    """run: the file for standard input, absolute; empty: none."""
    environment: tuple[tuple[str, str], ...] = ()
    time_limit_s: int = 0
    cpus: int = 1
    cancel: bool = False
    """run: the script is to be ended, result CANCELLED."""
    suspend: bool = False
    """run: the script is to stand still, and its time limit with it."""
    started: bool = False
    """run: the controller knows that the script was started; an agent with no record of it must report NODE_FAIL,
    never start it.
    """
    hurry: bool = False
    creates: tuple[CreatePersistent, ...] = ()
    """stage_in: persistent buffers to make first; their capacity is what they were granted, their pool is named."""
    destroys: tuple[DestroyPersistent, ...] = ()
    """stage_in, teardown: persistent buffers to remove first."""
    uses: tuple[str, ...] = ()
    """Persistent buffers that the job works with."""
    provision: Provision | None = None
    """Who performs the operations; None: the agent itself. The fields below are for providers."""
    directives: str = ""
    """The directives as they count: where some came by --bb or --bbf, they are not in the script."""
    pool: str = ""
    pool_is_bytes: bool = True
    gid: int = 0
    """The group that the job asked for; 0: its user's own."""
    options: JobOptions | None = None
    array: ArrayTask | None = None
    """These two for scripts as well, which are told."""
    special: SpecialTransfers | None = None
    """stage_in, stage_out with the native provider: what is to be moved beside `transfers`, and how."""
    rules: TransferRules | None = None
    """stage_in, stage_out with the native provider, from feature level 4 on: how to move data. None: as before."""
    shares: RateShares | None = None
    """With `rules`: how fast it may go here and now."""
    filesystem: OrderFilesystem | None = None
    """Where the buffer lies that all nodes see; None: in the directory of the agent itself."""
    partial: bool = False
    """stage_out: sources that are not there are left out and said in the receipt, since the script did not succeed or
    somebody said so; otherwise they fail it when everything else is at its destination.
    """
    persistent: tuple[tuple[str, OrderFilesystem], ...] = ()
    """Where those of the persistent buffers in `creates`, `destroys` and `uses` lie that are in a shared filesystem."""
    status: JobStatus | None = None
    """With `provision`: where the job stands."""


# ---- what the agent moves beside files and directories: lists, Spur's commands, and what is special about one transfer


class SpecialTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """What one order has beside its `transfers` (JSON object)."""

    lists: tuple[ListTransfer, ...] = ()
    """Transfers of what a file lists."""
    list_roots: tuple[str, ...] = ()
    """Directories that those files, and what they name outside, must lie beneath."""
    commands: tuple[str, ...] = ()
    """What the job's user has a shell do after the transfers."""
    environment: tuple[tuple[str, str], ...] = ()
    """With `commands`: what the job brought."""
    choices: tuple[TransferChoice, ...] = ()
    """What is special about each of the order's transfers; empty: nothing about any."""
    list_choices: tuple[TransferChoice, ...] = ()
    granted: tuple[tuple[str, int], ...] = ()
    """What each persistent buffer that the job works with may hold, bytes, where its pool counts those."""


NO_SPECIAL_TRANSFERS = SpecialTransfers()
