"""Slurm of a site: submits jobs as a user, reads `scontrol`, and ends slurmctld."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from forebay.cluster.client import ApiError
from tests.account import KNOWN
from tests.benchmarks.users.slurm import SlurmSite
from tests.faults.local_cluster import RunFailed
from tests.slurm.gates import Gates

PATIENCE_S = 240.0
"""Seconds for a state of Slurm's to come: its passes are up to half a minute apart."""

SETTINGS = "MinJobAge=7200\n"
"""Lines of slurm.conf: nothing is forgotten while somebody still asks for it."""

_JOB = re.compile(r"JobState=(\S+) Reason=(\S+)")
_BUFFER = re.compile(r"BurstBufferState=(\S+)")
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


class Seen(NamedTuple):
    """A job as `scontrol show job` prints it."""

    state: str
    reason: str
    buffer: str

    @property
    def is_over(self) -> bool:
        """Return whether job and buffer have ended."""
        return self.buffer in ("complete", "") and self.state in _ENDED


class Submitted:
    """A Slurm of a site in a directory, to which jobs are submitted that read `input` and write `results`."""

    slurm: SlurmSite

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.input, self.results = directory / "input", directory / "results"
        self.gates = Gates(directory / "gates")
        self.account = pwd.getpwnam(KNOWN)
        self.exports_as = self.account.pw_uid

    def found(self) -> None:
        """Make what jobs read and write."""
        self.directory.chmod(0o755)
        for path in (self.input, self.results):
            path.mkdir()
            path.chmod(0o755)
        os.chown(self.results, self.account.pw_uid, self.account.pw_gid)

    def check(self) -> None:
        """Raise RunFailed if a process has ended by itself."""

    def script(self, name: str, *body: str) -> str:
        """Return a job that stages `name` in and what it makes of it out."""
        raise NotImplementedError

    async def ask(self, *command: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands as the user."""
        return await asyncio.to_thread(self.slurm.ask, *command, script=script)

    def make_input(self, name: str, size_bytes: int = 1000) -> bytes:
        """Make what a job stages in, and return it."""
        data = os.urandom(size_bytes)
        path = self.input / name
        path.write_bytes(data)
        os.chown(path, self.account.pw_uid, self.account.pw_gid)
        return data

    async def as_administrator(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands as its administrator."""
        return await asyncio.to_thread(
            subprocess.run, command, env=self.slurm.environment, capture_output=True, text=True, check=False
        )

    async def release(self) -> tuple[int, int]:
        """Return the release of Slurm, for example (24, 11)."""
        found = re.search(r"(\d+)\.(\d+)", (await self.ask("sbatch", "--version")).stdout)
        if found is None:
            raise RunFailed("sbatch does not say its release")
        return int(found[1]), int(found[2])

    async def submit(self, script: str, *options: str) -> str:
        """Submit a job; return its number. RunFailed if it is refused."""
        done = await self.ask("sbatch", *options, script=script)
        if done.returncode != 0:
            raise RunFailed(f"sbatch: {done.stderr.strip()}")
        return done.stdout.split()[-1]

    async def seen(self, job: str) -> Seen | None:
        """Return how Slurm shows a job, None while it does not answer or has forgotten it."""
        shown = (await self.ask("scontrol", "show", "job", job)).stdout
        state, buffer = _JOB.search(shown), _BUFFER.search(shown)
        return None if state is None else Seen(state[1], state[2], buffer[1] if buffer else "")

    async def until(
        self, what: str, holds: Callable[[], Awaitable[Any]], patience_s: float = PATIENCE_S, *, every_s: float = 0.1
    ) -> Any:
        """Poll `holds` and return its first true result; raise RunFailed after the time limit."""
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                if found := await holds():
                    return found
            except ApiError as error:
                if time.monotonic() > deadline_s:
                    raise RunFailed(f"{what}: {error}") from error
            self.check()
            if time.monotonic() > deadline_s:
                raise RunFailed(f"not so after {patience_s:.0f} s: {what}")
            await asyncio.sleep(every_s)

    async def over(self, job: str, patience_s: float = PATIENCE_S) -> Seen:
        """Return how Slurm shows a job once that is over and its buffer gone."""
        last: list[Seen | None] = [None]

        async def is_over() -> Seen | None:
            last[0] = await self.seen(job) or last[0]
            return last[0] if last[0] is not None and last[0].is_over else None

        try:
            found: Seen = await self.until(f"job {job} is over", is_over, patience_s)
        except RunFailed as error:
            raise RunFailed(f"{error}; it is {last[0]}") from error
        return found

    def slurmctld(self, number: int) -> None:
        """End slurmctld by a signal, and wait for its end."""
        self.slurm.end_controller(number)

    async def nodes_up(self) -> None:
        """Have nodes that slurmctld gave up while it was taken over back in service, as an administrator would."""

        async def idle() -> bool:
            shown = (await self.ask("sinfo", "-h", "-o", "%T")).stdout
            if "down" in shown:
                await self.as_administrator("scontrol", "update", "NodeName=ALL", "State=RESUME")
            return bool(shown) and "down" not in shown

        await self.until("all nodes are in service", idle, 60)

    async def slurmctld_again(self) -> None:
        """Start slurmctld on its state, and wait until it answers."""
        await asyncio.to_thread(self.slurm.controller_again)

    def remove(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.directory, ignore_errors=True)
