"""Test host of a slurmctld: a bridge, a double of the leader, and a real Lua interpreter for each of Slurm's calls."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from forebay.cluster.client import Client
from forebay.cluster.slurm import script_text
from forebay.cluster.slurm.bridge import Bridge
from forebay.cluster.slurm.files import SlurmFiles
from forebay.cluster.slurm.slurmctld import SlurmView
from forebay.cluster.system import SystemClock
from tests.cluster.harness import until
from tests.cluster.slurm.leader import GRAIN, LeaderDouble
from tests.cluster.slurm.releases import RELEASES, Release, Value
from tests.fuzzing.external_jobs import interpreters

SCRIPT = "#!/bin/sh\n#BB_LUA pool=fast capacity=8MiB\ntrue\n"
UID = str(os.getuid() or 65534)


def _lua(argument: Value) -> str:
    """Return an argument as Lua reads it."""
    if isinstance(argument, str):
        return json.dumps(argument)
    return "{" + ", ".join(f"{key} = {value}" for key, value in argument.items()) + "}"


class Host:
    """Host of a slurmctld, with the functions that Slurm calls."""

    def __init__(self, directory: Path, release: Release = RELEASES["22.05"], interpreter: str = "") -> None:
        """`release` is Slurm's; `interpreter` is the Lua for the script, by default the first installed one."""
        self.release = release
        self.interpreter = interpreter or (interpreters() or [""])[0]
        self.run = directory / "run"
        self.leader = LeaderDouble()
        self.owners: dict[str, int] = {}
        self.arrays: dict[str, str] = {}
        """IDs of tasks -> IDs of their job arrays, as slurmctld returns them."""
        self.ended: set[str] = set()
        """Jobs that have ended and were not cancelled, as slurmctld returns them."""
        self.slurm: SlurmView | str = "slurmctld does not answer"
        self.script = directory / "script"
        self.script.write_text(SCRIPT)
        self.lua = directory / "burst_buffer.lua"
        self.lua.write_text(script_text(self.run, directory))

    async def owner(self, job: str) -> int | str:
        """User ID that slurmctld returns for a job."""
        return self.owners.get(job, f"slurmctld does not know job {job}")

    async def array(self, job: str) -> str | None:
        """Return the job array of a task."""
        return self.arrays.get(job)

    async def has_ended(self, job: str) -> bool:
        """Return whether a job has ended and was not cancelled."""
        return job in self.ended

    async def look(self) -> SlurmView | str:
        """slurmctld's view."""
        return self.slurm

    @asynccontextmanager
    async def bridge(self, **options: Any) -> AsyncIterator[Bridge]:
        stop = asyncio.Event()
        state, on_served = options.pop("state", None), options.pop("on_served", lambda: None)
        files = SlurmFiles(self.run, "head1", **options)
        bridge = Bridge(
            cast(Client, self.leader), files, "token", "head1", SystemClock(),
            state=state, ask=self.look, ask_owner=self.owner, ask_array=self.array,
            ask_ended=self.has_ended, on_served=on_served,
        )  # fmt: skip
        running = asyncio.create_task(bridge.run(stop))
        try:
            await until(lambda: running.done() or (self.run / "site.json").exists() or self.leader.away)
            await until(lambda: running.done() or (self.run / "socket").exists())
            yield bridge
        finally:
            stop.set()
            await running

    async def start(self, function: str, *arguments: str | Mapping[str, int]) -> asyncio.subprocess.Process:
        """Call a function in a new Lua process, as slurmscriptd does; a mapping is passed as a table."""
        words = ", ".join(_lua(argument) for argument in arguments)
        text = (
            f"slurm = {{SUCCESS = 0, ERROR = -1{self.release.constants}}}\n"
            f"dofile('{self.lua}')\n"
            f"local rc, said = slurm_bb_{function}({words})\n"
            "io.write(tostring(rc), '\\n', tostring(said or ''))\n"
        )
        return await asyncio.create_subprocess_exec(
            self.interpreter, "-e", text, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )

    async def call(self, function: str, *arguments: str | Mapping[str, int]) -> tuple[int, str]:
        """Return code and text of a function."""
        return await self.end_of(await self.start(function, *arguments))

    async def end_of(self, process: asyncio.subprocess.Process) -> tuple[int, str]:
        said, _ = await process.communicate()
        code, _, text = said.decode().partition("\n")
        return int(code), text

    async def set_up(self, job: str = "42") -> tuple[int, str]:
        return await self.call("setup", job, UID, UID, "fast", str(8 * GRAIN), str(self.script))

    async def perform(self, function: str, job: str = "42", **values: Value) -> tuple[int, str]:
        """Call a function with the arguments of the host's release; return code and text."""
        return await self.end_of(await self.begin(function, job, **values))

    async def begin(self, function: str, job: str = "42", **values: Value) -> asyncio.subprocess.Process:
        """Start such a call."""
        usual: dict[str, Value] = {
            "job": job, "uid": UID, "gid": UID, "pool": "fast", "size": str(8 * GRAIN), "script": str(self.script),
            "hurry": "true", "table": {"job_id": int(job), "array_job_id": 0},
        }  # fmt: skip
        return await self.start(function, *self.release.arguments(function, {**usual, **values}))

    def waiting(self) -> list[str]:
        return os.listdir(self.run / "calls")
