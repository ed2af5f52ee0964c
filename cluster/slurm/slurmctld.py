"""View of slurmctld's jobs and their buffers, from `squeue` and `scontrol`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

ASK_S: Final = 60.0
"""Timeout of one query, seconds: several timeouts of Slurm's own messages."""

SAID_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limit of one reply, bytes: a million jobs and their buffers."""

CONFIG_S: Final = 20.0
"""Timeout of the query for slurmctld's configuration, seconds: a user waits, and slurmctld may be down."""

ENDED: Final = frozenset({"BF", "CA", "CD", "DL", "F", "NF", "OOM", "PR", "RV", "TO"})
"""States of finished jobs as squeue abbreviates them; a job whose results are being staged out is SO."""

PENDING: Final = "PD"
"""State of a job that has not started."""

CANCELLED: Final = "CA"
"""State of a job that a user or an administrator cancelled."""

COMPLETING: Final = "CG"
"""State of a job whose end is being processed: it hides how the job ended."""

COMPLETING_LOOKS_MAX: Final = 60
"""Maximum number of queries for a completing job, one a second: an epilog, and less than a teardown may take."""

STAGE_IN_REASON: Final = "BurstBufferStageIn"
"""Reason of a pending job whose stage-in is running according to slurmctld."""

STAGING_OUT: Final = "SO"
"""State of a job between the end of its run and the end of its stage-out.

Buffer states do not show this, because a restarted slurmctld lists the buffers as allocated.
"""

_JOBS: Final = ("squeue", "--noheader", "--array", "--all", "--states=all", "--format=%A %t %r")
_BUFFERS: Final = ("scontrol", "show", "burst")
_TYPE = re.compile(r"^BurstBufferType +=[ ]*(\S+)", re.MULTILINE)
_BUFFER = re.compile(r"^ *JobID=(?:[0-9]+[_+][0-9]+\()?([0-9]+)\)? (.*?)State=([a-z-]+)", re.MULTILINE)
_POOL = re.compile(r"\bPool=(\S+)")


class SqueueRow(NamedTuple):
    """Row of squeue: abbreviated state, and reason."""

    state: str
    reason: str


class SlurmView(NamedTuple):
    """Snapshot of slurmctld's jobs and buffers."""

    jobs: frozenset[str]
    """IDs of jobs that have not finished or still have a buffer."""
    buffers: Mapping[str, str]
    """Job ID -> state of its buffer."""
    over: frozenset[str] = frozenset()
    """IDs of finished jobs that still have a buffer, which is to be torn down."""
    staging_out: frozenset[str] = frozenset()
    """IDs of jobs whose run has ended, and whose results are to be staged out."""
    staging_in: frozenset[str] = frozenset()
    """IDs of pending jobs with the reason BurstBufferStageIn."""
    pending: frozenset[str] = frozenset()
    """IDs of all pending jobs."""
    pools: Mapping[str, str] = {}
    """Job ID -> pool of its buffer, if slurmctld names the pool."""


async def look() -> SlurmView | str:
    """Return slurmctld's view, or why it is unavailable."""
    # Query buffers first, so that a job that ends meanwhile is found in at least one of the replies.
    buffers = await _said(_BUFFERS)
    if isinstance(buffers, str):
        return buffers
    jobs = await _said(_JOBS)
    if isinstance(jobs, str):
        return jobs
    listing = buffers.decode("utf-8", "replace")
    held = parsed_buffers(listing)
    going_on = parsed_jobs(jobs.decode("utf-8", "replace"))
    return SlurmView(
        jobs=frozenset(going_on.keys() | held.keys()),
        buffers=held,
        over=frozenset(held.keys() - going_on.keys()),
        staging_out=frozenset(job for job, shown in going_on.items() if shown.state == STAGING_OUT),
        staging_in=frozenset(job for job, shown in going_on.items() if shown == (PENDING, STAGE_IN_REASON)),
        pending=frozenset(job for job, shown in going_on.items() if shown.state == PENDING),
        pools=parsed_pools(listing),
    )


async def _rows_of(job: str, fields: str) -> list[list[str]] | str:
    """Return the words of squeue's rows for a job in a format, or why they are unavailable."""
    said = await _said(("squeue", "--noheader", "--all", "--states=all", f"--jobs={job}", f"--format={fields}"))
    return said if isinstance(said, str) else [row.split() for row in said.decode("utf-8", "replace").splitlines()]


async def owner_of(job: str) -> int | str:
    """Return the uid of a job's user according to slurmctld, or why it is unavailable."""
    rows = await _rows_of(job, "%U")
    if isinstance(rows, str):
        return rows
    found = {word for row in rows for word in row if word.isdigit()}
    return int(found.pop()) if len(found) == 1 else f"slurmctld does not know job {job}"


async def array_of(job: str) -> str | None:
    """Return the ID of a task's job array, or None if slurmctld does not return it."""
    rows = await _rows_of(job, "%F")
    found = set() if isinstance(rows, str) else {word for row in rows for word in row}
    array = found.pop() if len(found) == 1 else ""
    return array if array.isdigit() else None


async def ended_by_itself(job: str) -> bool:
    """Return whether slurmctld says that a job has ended and was not cancelled.

    Waits while the job's end is being processed.
    """
    for _ in range(COMPLETING_LOOKS_MAX):
        rows = await _rows_of(job, "%A %t")
        # The ID of a job array is also that of one of its tasks.
        state = None if isinstance(rows, str) else dict(row for row in rows if len(row) == 2).get(job)
        if state != COMPLETING:
            return state in ENDED - {CANCELLED}
        await asyncio.sleep(1)
    return False


def buffers_in_use(conf: Path) -> str:
    """Return the BurstBufferType of the running slurmctld of a slurm.conf directory; empty if none answers."""
    environment = {**os.environ, "SLURM_CONF": str(conf / "slurm.conf")}
    command = ("scontrol", "show", "config")
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=CONFIG_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return parsed_type(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else ""


def parsed_type(text: str) -> str:
    """Return the BurstBufferType in the output of `scontrol show config`; empty for none."""
    found = _TYPE.search(text)
    return found[1] if found and found[1] != "(null)" else ""


def parsed_jobs(text: str) -> dict[str, SqueueRow]:
    """Return the jobs that have not finished, with their states and reasons as squeue prints them."""
    rows = (line.split(maxsplit=2) for line in text.splitlines())
    return {
        row[0]: SqueueRow(row[1], row[2].strip() if len(row) > 2 else "")
        for row in rows
        if len(row) >= 2 and row[0].isdigit() and row[1].isupper() and row[1] not in ENDED
    }


def parsed_buffers(text: str) -> dict[str, str]:
    """Return the jobs that have buffers, with the buffers' states; a task of an array by its own ID."""
    return {match[1]: match[3] for match in _BUFFER.finditer(text)}


def parsed_pools(text: str) -> dict[str, str]:
    """Return the jobs whose buffers are in a pool, with the pool's name."""
    found = {match[1]: _POOL.search(match[2]) for match in _BUFFER.finditer(text)}
    return {job: pool[1] for job, pool in found.items() if pool is not None and pool[1] != "(null)"}


async def _said(command: tuple[str, ...]) -> bytes | str:
    """Return a program's output, or why it failed."""
    name = " ".join(command[:3])
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"
    assert process.stdout is not None
    try:
        async with asyncio.timeout(ASK_S):
            said = bytearray()
            while part := await process.stdout.read(64 * 1024):
                said += part
                if len(said) > SAID_BYTES_MAX:
                    return f"{name} printed more than {SAID_BYTES_MAX} bytes"
            code = await process.wait()
    except TimeoutError:
        return f"{name} did not answer within {ASK_S:.0f} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return bytes(said) if code == 0 else f"{name} exited with code {code}"
