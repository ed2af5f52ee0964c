"""Interface of external providers: operations, their parameters and their errors.

Operations are named as in Slurm. They are called in a worker process of their own (started by an agent or the leading
replica), block until complete, and may be ended by SIGTERM at any time.
"""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.cluster.system import Clock
from forebay.replica.model import (
    NO_OPTIONS,
    NO_STATUS,
    CreatePersistent,
    DestroyPersistent,
    JobOptions,
    JobStatus,
    Provision,
)
from forebay.replica.values import POOLS_MAX, SIZE_BYTES_MAX, name_fault

LUA_VERSIONS: Final = ("5.1", "5.2", "5.3", "5.4")
"""Supported Lua releases."""


class OperationError(Exception):
    """A provider operation failed.

    `operation` is its name (setup, data_in, …), and `message` the provider's output. `final` is True if a retry cannot
    succeed.
    """

    def __init__(self, operation: str, message: str, *, final: bool = False) -> None:
        super().__init__(f"{operation}: {message}")
        self.operation = operation
        self.message = message
        self.final = final


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """Provider settings of one machine: [provider] in its forebay.toml."""

    lua_script: str = ""
    """Path of burst_buffer.lua on this machine.

    If empty, the site's configuration applies, then `lua_script_beside`.
    """
    lua_script_beside: str = ""
    """burst_buffer.lua in the directory of forebay.toml, as in Slurm beside slurm.conf."""
    get_sys_state: str = ""
    get_sys_status: str = ""
    """Paths of these two programs on this machine; empty to use the site's configuration."""
    allowed_programs: tuple[str, ...] = ()
    """Further paths that the site's configuration may name. This machine runs no other programs."""
    closed: tuple[str, ...] = ()
    """Directories of this machine's replicas and agents; nothing below them is executed."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables for the site's programs besides PATH, LANG and TMPDIR."""
    status_identity: bool = False
    """Pass user and group ID before the arguments of slurm_bb_get_status, as newer Slurm releases do."""
    lua_version: str = LUA_VERSIONS[-1]
    """Lua release that runs the script, which must match the script's C modules."""
    cluster: str = ""
    """Name of the cluster: `[cluster] name`."""

    @property
    def program_paths(self) -> frozenset[str]:
        """Paths of all programs that this machine's configuration names."""
        own = (self.lua_script, self.lua_script_beside, self.get_sys_state, self.get_sys_status)
        return frozenset(path for path in (*own, *self.allowed_programs) if path)


NO_LOCAL: Final = Local()
"""Settings of a machine without a [provider] table."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Job that an operation is for. `size` counts bytes, or units of its pool."""

    job: int
    name: str = ""
    user: str = ""
    uid: int = 0
    gid: int = 0
    workdir: str = ""
    script: str = ""
    directives: str = ""
    """Effective directives, including those from --bb or --bbf, which are not in the script."""
    pool: str = ""
    size: int = 0
    size_is_bytes: bool = True
    node: str = ""
    """Node of the job; empty while unknown."""
    options: JobOptions = NO_OPTIONS
    status: JobStatus = NO_STATUS
    time_limit_s: int = 0
    cpus: int = 1
    array_job: int = 0
    array_task: int = 0
    array_throttle: int = 0
    """Limit on concurrently active tasks of the array; 0 for none."""
    has_size: bool = False
    """True if the job requested a capacity."""
    persistent_only: bool = False
    """True if the job only creates or destroys persistent buffers (`-N0`)."""


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Pool reported by a provider: `quantity` grains of `granularity` bytes (or units) each."""

    name: str
    quantity: int
    granularity: int
    is_bytes: bool = True
    free: int | None = None
    """Free grains, if reported.

    Forebay derives free capacity from its own grants, and uses this value only to detect usage by other clients.
    """


class Provider:
    """Base class of external providers. Every operation may raise OperationError.

    A provider's class is `PROVIDER` in the module of its name (`provider_for`). Operations that a class does not
    override succeed without a result, except operations on persistent buffers, which are rejected.
    """

    def __init__(self, provision: Provision, local: Local, clock: Clock) -> None:
        """Prepare without running anything."""
        self._provision = provision
        self._clock = clock

    def process(self, subject: Subject, directory: str) -> str:
        """Validate a job at submit; return the provider's message for the user."""
        return ""

    def pools(self, directory: str) -> tuple[PoolReport, ...] | None:
        """Return the pools, or None if the provider reports none."""
        return None

    def get_status(self, arguments: tuple[str, ...], uid: int, gid: int, directory: str) -> str:
        """Return the provider's reply to `bbstat ARGUMENTS`."""
        return ""

    def create_persistent(self, subject: Subject, wanted: CreatePersistent, directory: str) -> None:
        """Create a persistent buffer; `wanted.capacity_bytes` is already rounded and `wanted.pool` set."""
        raise self._without_persistent("create_persistent")

    def destroy_persistent(self, subject: Subject, wanted: DestroyPersistent, directory: str) -> None:
        """Remove a persistent buffer; succeed if it does not exist."""
        raise self._without_persistent("destroy_persistent")

    def setup(self, subject: Subject, directory: str) -> None:
        """Create the job's buffer."""

    def data_in(self, subject: Subject, directory: str) -> None:
        """Stage data in."""

    def real_size(self, subject: Subject, directory: str) -> int | None:
        """Return the actual size of the buffer, or None if not reported."""
        return None

    def paths(self, subject: Subject, directory: str) -> tuple[tuple[str, str], ...]:
        """Return the variables that describe the buffer in the job's environment."""
        return ()

    def pre_run(self, subject: Subject, directory: str) -> None:
        """Prepare the job's node."""

    def post_run(self, subject: Subject, directory: str) -> None:
        """Clean up the job's node."""

    def data_out(self, subject: Subject, directory: str) -> None:
        """Stage data out."""

    def teardown(self, subject: Subject, hurry: bool, directory: str) -> None:
        """Remove the job's buffer."""

    def _without_persistent(self, operation: str) -> OperationError:
        return OperationError(
            operation, f"the {self._provision.provider} provider does not support persistent buffers", final=True
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
    """Parse `{"pools": [{"id": …, "quantity": …, "granularity": …}]}`, ignoring unknown keys.

    `quantity` counts grains and defaults to 0; a `granularity` of 0 counts as 1, as in Slurm's lua plugin.

    Raises:
        OperationError: The text is invalid.
    """
    try:
        rows = msgspec.json.decode(text, type=_Pools).pools
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OperationError(operation, f"the pools are not valid JSON: {error}") from error
    if len(rows) > POOLS_MAX:
        raise OperationError(operation, f"there are {len(rows)} pools; at most {POOLS_MAX} are possible")
    found: dict[str, PoolReport] = {}
    for row in rows:
        fault = name_fault(row.id)
        if fault is not None:
            raise OperationError(operation, f"the id of a pool {fault}")
        if row.id in found:
            raise OperationError(operation, f"the pool {row.id} is listed twice")
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
    """Set up logging as in the parent process; every line begins with the job, and its record has the job's ID."""
    import logging

    from forebay.cluster.system import about, begin_logging

    begin_logging()
    if job is None:
        return

    def begin_with_job(record: logging.LogRecord) -> bool:
        record.msg = f"job {job}: {record.msg}"
        record.__dict__.update(about(job=job))
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(begin_with_job)
