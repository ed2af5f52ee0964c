"""What every provider can be asked, what it is told, and how it says that something went wrong.

The names of the operations are Slurm's. All of it is called in a worker process of its own (an agent's, or one that
the leading replica started), blocks until the operation is over, and may be ended at any moment by SIGTERM.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.system import Clock
from replica.model import (
    NO_OPTIONS,
    NO_STATUS,
    CreatePersistent,
    DestroyPersistent,
    JobOptions,
    JobStatus,
    Provision,
)
from replica.values import POOLS_MAX, SIZE_BYTES_MAX, name_fault

LUA_VERSIONS: Final = ("5.1", "5.2", "5.3", "5.4")
"""Releases of Lua that a script may be run with."""


class OperationError(Exception):
    """An operation that failed.

    `operation` is its name (setup, data_in, …), `message` what the provider said, `final` whether trying again by
    itself is of no use.
    """

    def __init__(self, operation: str, message: str, *, final: bool = False) -> None:
        super().__init__(f"{operation}: {message}")
        self.operation = operation
        self.message = message
        self.final = final


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine's configuration says about its provider: [provider] in its forebay.toml."""

    lua_script: str = ""
    """Where burst_buffer.lua is here; empty: where the site's configuration says, else `lua_script_beside`."""
    lua_script_beside: str = ""
    """burst_buffer.lua in the directory of forebay.toml, as Slurm has it beside slurm.conf."""
    get_sys_state: str = ""
    get_sys_status: str = ""
    """Where these two are here; empty: where the site's configuration says."""
    allowed_programs: tuple[str, ...] = ()
    """Which paths the site's configuration may name beside those above: nothing else that it names is run here."""
    closed: tuple[str, ...] = ()
    """Directories of this machine's replicas and agents: nothing below them is ever run."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the site's programs find beside PATH, LANG and TMPDIR."""
    status_identity: bool = False
    """Whether slurm_bb_get_status is given user and group id before its arguments (newer releases of Slurm)."""
    lua_version: str = LUA_VERSIONS[-1]
    """Release of Lua that runs the script: the one that its C modules were built for."""
    cluster: str = ""
    """Name of the cluster: `[cluster] name`."""

    @property
    def named(self) -> frozenset[str]:
        """Every path of a program that this machine's configuration names."""
        own = (self.lua_script, self.lua_script_beside, self.get_sys_state, self.get_sys_status)
        return frozenset(path for path in (*own, *self.allowed_programs) if path)


NO_LOCAL: Final = Local()
"""A machine whose configuration says nothing of it."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The job that an operation is for. `size` counts bytes, or units of its pool."""

    job: int
    name: str = ""
    user: str = ""
    uid: int = 0
    gid: int = 0
    workdir: str = ""
    script: str = ""
    directives: str = ""
    """The directives as they count: where some came by --bb or --bbf, they are not in the script."""
    pool: str = ""
    size: int = 0
    size_is_bytes: bool = True
    node: str = ""
    """Where the job runs, or will; empty while that is not known."""
    options: JobOptions = NO_OPTIONS
    status: JobStatus = NO_STATUS
    time_limit_s: int = 0
    cpus: int = 1
    array_job: int = 0
    array_task: int = 0
    array_throttle: int = 0
    """Tasks of the array that may be active at once; 0: all."""
    has_size: bool = False
    """Whether the job asked for a capacity."""
    persistent_only: bool = False
    """Whether it only creates or destroys persistent buffers (`-N0`)."""


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as a provider reports it: `quantity` grains of `granularity` bytes (or units) each."""

    name: str
    quantity: int
    granularity: int
    is_bytes: bool = True
    free: int | None = None
    """Grains that are free, where the provider says so. What is free is derived from what was given out, never from
    this, which is older than the newest grant; it tells what others use beside this cluster.
    """


class Provider:
    """External provider of a cluster's operations; each raises OperationError with what went wrong.

    The class of each is `PROVIDER` in the module of its name (`provider_for`). What it does not override it does not
    perform: such an operation succeeds and has nothing to tell, but persistent buffers are refused.
    """

    def __init__(self, provision: Provision, local: Local, clock: Clock) -> None:
        """Prepare; nothing is run yet."""
        self._provision = provision
        self._clock = clock

    def process(self, subject: Subject, directory: str) -> str:
        """Validate a job at submit; return what the provider says to whoever submits it."""
        return ""

    def pools(self, directory: str) -> tuple[PoolReport, ...] | None:
        """Return the pools; None where the provider has none to tell."""
        return None

    def get_status(self, arguments: tuple[str, ...], uid: int, gid: int, directory: str) -> str:
        """Return what the provider says to `bbstat ARGUMENTS`."""
        return ""

    def create_persistent(self, subject: Subject, wanted: CreatePersistent, directory: str) -> None:
        """Make a persistent buffer; `wanted.capacity_bytes` is already rounded, and `wanted.pool` named."""
        raise self._without_persistent("create_persistent")

    def destroy_persistent(self, subject: Subject, wanted: DestroyPersistent, directory: str) -> None:
        """Remove a persistent buffer; one that is not there is no failure."""
        raise self._without_persistent("destroy_persistent")

    def setup(self, subject: Subject, directory: str) -> None:
        """Make the job's buffer."""

    def data_in(self, subject: Subject, directory: str) -> None:
        """Stage in."""

    def real_size(self, subject: Subject, directory: str) -> int | None:
        """Return the size that the buffer really has; None where the provider does not say."""
        return None

    def paths(self, subject: Subject, directory: str) -> tuple[tuple[str, str], ...]:
        """Return what the job's environment is told of its buffer."""
        return ()

    def pre_run(self, subject: Subject, directory: str) -> None:
        """Prepare the job's node."""

    def post_run(self, subject: Subject, directory: str) -> None:
        """Clean the job's node up."""

    def data_out(self, subject: Subject, directory: str) -> None:
        """Stage out."""

    def teardown(self, subject: Subject, hurry: bool, directory: str) -> None:
        """Remove the job's buffer."""

    def _without_persistent(self, operation: str) -> OperationError:
        return OperationError(
            operation, f"the {self._provision.provider} provider knows no persistent buffers", final=True
        )


class _Row(msgspec.Struct):
    id: str
    quantity: int = 0
    granularity: int = 1
    units: str = ""
    free: int | None = None


class _Pools(msgspec.Struct):
    pools: list[_Row]


def parse_pools(text: bytes, *, operation: str, bytes_by_default: bool) -> tuple[PoolReport, ...]:
    """Return the pools of `{"pools": [{"id": …, "quantity": …, "granularity": …}]}`; keys not known are ignored.

    `quantity` counts grains; it is 0 where it is missing, and a `granularity` of 0 counts as 1, as in Slurm's lua
    plugin. OperationError says what is wrong with it.
    """
    try:
        rows = msgspec.json.decode(text, type=_Pools).pools
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OperationError(operation, f"the pools are not the JSON that is expected: {error}") from error
    if len(rows) > POOLS_MAX:
        raise OperationError(operation, f"there are {len(rows)} pools; at most {POOLS_MAX} are possible")
    found: dict[str, PoolReport] = {}
    for row in rows:
        fault = name_fault(row.id)
        if fault is not None:
            raise OperationError(operation, f"the id of a pool {fault}")
        if row.id in found:
            raise OperationError(operation, f"the pool {row.id} is there twice")
        granularity = row.granularity or 1
        if row.quantity < 0 or granularity < 0 or row.quantity * granularity > SIZE_BYTES_MAX:
            raise OperationError(
                operation, f"the pool {row.id} has quantity {row.quantity} and granularity {row.granularity}"
            )
        found[row.id] = PoolReport(
            name=row.id,
            quantity=row.quantity,
            granularity=granularity,
            is_bytes=bytes_by_default if not row.units else row.units == "bytes",
            free=row.free,
        )
    return tuple(found.values())


def log_for(job: int | None = None) -> None:
    """Have this process log as whoever started it does; all that it logs is about `job`, and begins with it."""
    import logging

    from cluster.system import about, begin_logging

    begin_logging()
    if job is None:
        return

    def begin_with_job(record: logging.LogRecord) -> bool:
        record.msg = f"job {job}: {record.msg}"
        record.__dict__.update(about(job=job))
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(begin_with_job)
