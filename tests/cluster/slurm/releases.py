"""Arguments that each release of Slurm from 22.05 to 26.05 passes to burst_buffer.lua.

Source: burst_buffer_lua.c at the first and the last tag of each release, which do not differ in this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

Value = str | Mapping[str, int]
"""Argument: a text, or the job's table."""

_FIRST: Final = {
    "job_process": "script",
    "setup": "job uid gid pool size script",
    "data_in": "job script",
    "real_size": "job",
    "paths": "job script file",
    "pre_run": "job script",
    "post_run": "job script",
    "data_out": "job script",
    "job_teardown": "job script hurry",
}
_WITH_USER: Final = {
    "job_process": "script uid gid table",
    "setup": "job uid gid pool size script table",
    "data_in": "job script uid gid table",
    "real_size": "job uid gid table",
    "paths": "job script file uid gid table",
    "pre_run": "job script uid gid table",
    "post_run": "job script uid gid table",
    "data_out": "job script uid gid table",
    "job_teardown": "job script hurry uid gid",
}
_POLLING: Final = {
    **_WITH_USER,
    "test_data_in": "job script uid gid table",
    "test_data_out": "job script uid gid table",
}


class Release(NamedTuple):
    """Release of Slurm, as burst_buffer.lua sees it."""

    name: str
    functions: Mapping[str, str]
    """Functions that the release calls -> names of their arguments."""
    polls: bool
    """True if the release calls `test_data_in` and `test_data_out`, and defines the value for `busy`."""
    makes_task_files: bool
    """True if a task split from a job array has a directory and a link to the script."""

    @property
    def constants(self) -> str:
        """Further fields of the table `slurm`."""
        return ', SLURM_BB_BUSY = "BUSY"' if self.polls else ""

    def arguments(self, function: str, values: Mapping[str, Value]) -> list[Value]:
        """Return the arguments of a call."""
        return [values[name] for name in self.functions[function].split()]


RELEASES: Final = {
    release.name: release
    for release in (
        Release("22.05", _FIRST, polls=False, makes_task_files=True),
        Release("23.02", _WITH_USER, polls=False, makes_task_files=True),
        Release("23.11", _WITH_USER, polls=False, makes_task_files=True),
        Release("24.05", _POLLING, polls=True, makes_task_files=True),
        Release("24.11", _POLLING, polls=True, makes_task_files=False),
        Release("25.05", _POLLING, polls=True, makes_task_files=False),
        Release("25.11", _POLLING, polls=True, makes_task_files=False),
        Release("26.05", _POLLING, polls=True, makes_task_files=False),
    )
}
"""Releases by name, oldest first."""
