"""What every provider can be asked, what it is told, and how it says that something went wrong.

The names of the operations are Slurm's. All of it is called in a worker process of its own (an agent's, or one that
the leading replica started), blocks until the operation is over, and may be ended at any moment by SIGTERM.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from replica.model import CreatePersistent, DestroyPersistent, Provision


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
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the site's programs find beside PATH, LANG and TMPDIR."""
    status_identity: bool = False
    """Whether slurm_bb_get_status is given user and group id before its arguments (newer releases of Slurm)."""


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
    account: str = ""
    qos: str = ""
    partition: str = ""
    comment: str = ""
    reservation: str = ""
    time_limit_s: int = 0
    cpus: int = 1
    nodes: int = 1
    array_job: int = 0
    array_task: int = 0
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
    """Grains that are free, where the provider says so."""


class Provider(Protocol):
    """Who performs operations. Each raises OperationError with what went wrong."""

    def process(self, subject: Subject, directory: str) -> str:
        """Validate a job at submit; return what the provider says to whoever submits it."""
        ...

    def pools(self, directory: str) -> tuple[PoolReport, ...] | None:
        """Return the pools; None where the provider has none to tell."""
        ...

    def get_status(self, arguments: tuple[str, ...], uid: int, gid: int, directory: str) -> str:
        """Return what the provider says to `bbstat ARGUMENTS`."""
        ...

    def create_persistent(self, subject: Subject, wanted: CreatePersistent, directory: str) -> None:
        """Make a persistent buffer; `wanted.capacity_bytes` is already rounded, and `wanted.pool` named."""
        ...

    def destroy_persistent(self, subject: Subject, wanted: DestroyPersistent, directory: str) -> None:
        """Remove a persistent buffer; one that is not there is no failure."""
        ...

    def setup(self, subject: Subject, directory: str) -> None:
        """Make the job's buffer."""
        ...

    def data_in(self, subject: Subject, directory: str) -> None:
        """Stage in."""
        ...

    def real_size(self, subject: Subject, directory: str) -> int | None:
        """Return the size that the buffer really has; None where the provider does not say."""
        ...

    def paths(self, subject: Subject, directory: str) -> tuple[tuple[str, str], ...]:
        """Return what the job's environment is told of its buffer."""
        ...

    def pre_run(self, subject: Subject, directory: str) -> None:
        """Prepare the job's node."""
        ...

    def post_run(self, subject: Subject, directory: str) -> None:
        """Clean the job's node up."""
        ...

    def data_out(self, subject: Subject, directory: str) -> None:
        """Stage out."""
        ...

    def teardown(self, subject: Subject, hurry: bool, directory: str) -> None:
        """Remove the job's buffer."""
        ...


__all__ = ["Local", "OperationError", "PoolReport", "Provider", "Provision", "Subject"]
