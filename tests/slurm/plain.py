"""What a site would use instead: a Slurm whose burst_buffer.lua makes directories and copies, without Forebay."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.benchmarks.users.slurm import SCRIPT_OF_SITE, SlurmSite
from tests.slurm.controllers import TwoControllers
from tests.slurm.gates import FUNCTIONS
from tests.slurm.slurm import SETTINGS, Submitted


class PlainSite(Submitted):
    """Such a Slurm in a directory of its own; `gated`: its calls can be stopped on their way; `backup`: slurmctld has
    one; `copies` False: its script does nothing at all, and so do its jobs.
    """

    def __init__(self, directory: Path, *, gated: bool = True, backup: bool = False, copies: bool = True) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.exports_as = os.geteuid()
        self._copies = copies
        script = SCRIPT_OF_SITE if copies else SCRIPT_OF_SITE.replace("os.execute(command)", "0")
        if gated:
            script += self.gates.around(FUNCTIONS)
        if backup:
            self.slurm: SlurmSite = TwoControllers(
                directory / "slurm", script=script, plugin="lua", buffers=None, settings=SETTINGS, run=directory / "run"
            )
        else:
            self.slurm = SlurmSite(directory / "slurm", script=script, settings=SETTINGS)

    async def start(self) -> None:
        """Start it; return when its nodes are idle."""
        self.found()
        self.gates.make()
        for path in (self.directory / "run", self.directory / "run-ctl2"):
            path.mkdir()
        await asyncio.to_thread(self.slurm.start)

    def stop(self) -> None:
        """End it."""
        self.gates.open()
        self.slurm.stop()

    def script(self, name: str, *body: str) -> str:
        """Return a job that has `name` copied in and what it makes of it out."""
        request = f"#BB_LUA pool=fast capacity=1MiB in={self.input}/{name} out={self.results}/{name}"
        if not self._copies:
            return f"#!/bin/sh\n#SBATCH -o /dev/null\n{request}\ntrue\n"
        lines = [line.replace("$DW_JOB_STRIPED", "$BUFFER") for line in body]
        work = lines or ["cp $BUFFER/in $BUFFER/out"]
        return "\n".join(("#!/bin/sh", "#SBATCH -o /dev/null", request, *work, ""))
