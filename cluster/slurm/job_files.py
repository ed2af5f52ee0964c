"""The files of a job below StateSaveLocation: a directory, and in it the script.

From 24.11 on Slurm makes neither for a task that it splits from a job array. Its plugins still read the script there,
and write the job's variables beside it. What is missing is made here as 22.05 made it; Slurm removes it with the job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from replica.values import SCRIPT_BYTES_MAX

SCRIPT: Final = "script"
_PRIVATE: Final = 0o700


def directory_of(state: Path, job: str) -> Path:
    """Return a job's directory below StateSaveLocation; `job` is a number."""
    return state / f"hash.{int(job) % 10}" / f"job.{job}"


def make_directory(state: Path, job: str) -> None:
    """Make a job's directory where it is missing; OSError."""
    directory = directory_of(state, job)
    directory.parent.mkdir(mode=_PRIVATE, exist_ok=True)
    directory.mkdir(mode=_PRIVATE, exist_ok=True)


async def linked_script(state: Path, job: str, ask_array: Callable[[str], Awaitable[str | None]]) -> str:
    """Give a task the script of its job array, and return it; empty if there is none. OSError, UnicodeDecodeError.

    `ask_array` returns the number of the array that a task belongs to, None if it is not known.
    """
    path = directory_of(state, job) / SCRIPT
    if not path.exists():
        array = await ask_array(job)
        if array is None:
            return ""
        with contextlib.suppress(FileExistsError):
            os.link(directory_of(state, array) / SCRIPT, path)
    with path.open("rb") as file:
        # One byte more than is accepted, so that a longer script is seen, and the zero byte with which Slurm ends it.
        return file.read(SCRIPT_BYTES_MAX + 2).decode().rstrip("\0")
