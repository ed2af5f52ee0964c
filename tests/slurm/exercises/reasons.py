"""Common parts of the rows of `refusals`: reasons of Slurm's jobs, and jobs of Forebay's own scheduler."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Final

from forebay.cluster.client import Client
from forebay.cluster.slurm.files import uptime_s
from tests.slurm.exercises.common import exported, node_starts, require
from tests.slurm.site import RunFailed, Site

REQUEST_REFUSED: Final = "Burst Buffer request invalid"
AWAY: Final = r"the buffer is not available on (\S+) \(bridge not running since \d\d:\d\d\); try again"
PLAIN: Final = "#!/bin/sh\n#SBATCH -o /dev/null\ntrue\n"
NODE: Final = "n3"
"""The node of Forebay's own jobs, which the site has only where somebody asks for it."""

NOTICED_S: Final = 8.0
"""Seconds within which the setup of a job begins that Slurm thinks to have space for: its passes are 1 s apart then."""

_REASON = re.compile(r"Reason=(\S+)")
_PRIORITY = re.compile(r"Priority=(\d+)")


class Slurm:
    """Site as its users and administrators see it, with the observed messages by row."""

    def __init__(self, site: Site, client: Client) -> None:
        self.site = site
        self.client = client
        self.row = ""
        self.seen: dict[str, list[str]] = {}
        self._has_node = False

    def saw(self, sentence: str) -> None:
        """Record an observed message."""
        self.seen.setdefault(self.row, []).append(sentence)

    async def cli(self, *words: str) -> str:
        """Run a command of `forebay` as an operator."""
        return await asyncio.to_thread(self.site.cluster.forebay, *words)

    # Jobs of Slurm

    async def failed(self, job: str, function: str, *sentences: str) -> str:
        """Wait until the job's reason is what a function said, with all these sentences; return it."""

        # From 24.05 on a stage that takes time fails in the question for its end, and from 25.05 on lua adds "failed".
        named = re.compile(rf"\b(?:test )?{function.replace('_', ' ')}(?: failed)?:")

        async def reason() -> str:
            shown = (await self.site.ask("scontrol", "show", "job", job)).stdout
            found = _REASON.search(shown)
            said = found[1].replace("_", " ") if found else ""
            return said if named.search(said) else ""

        said = str(await self.site.until(f"{function} of job {job} failed", reason))
        for sentence in sentences:
            require(sentence.replace("_", " ") in said, f"{sentence!r} is not in {said!r}")
        self.saw(said)
        return said

    async def held(self, job: str, function: str, *sentences: str) -> str:
        """As `failed`, and the job is held."""
        said = await self.failed(job, function, *sentences)

        async def is_held() -> bool:
            shown = (await self.site.ask("scontrol", "show", "job", job)).stdout
            found = _PRIORITY.search(shown)
            # Slurm has done with the buffer: only then a release begins anew.
            return found is not None and found[1] == "0" and "BurstBufferState=complete" in shown

        await self.site.until(f"job {job} is held", is_held, 30)
        return said

    async def release(self, job: str) -> None:
        """Release a job that Slurm holds, as its administrator: it holds them so that users cannot."""
        denied = await self.site.ask("scontrol", "release", job)
        require("permission denied" in denied.stderr, f"a user released job {job}: {denied}")
        done = await self.site.as_administrator("scontrol", "release", job)
        require(done.returncode == 0, f"scontrol release: {done.stderr}")

    async def phase(self, job: str, *phases: str) -> None:
        """Wait until the external job of a job is in one of these phases."""

        async def there() -> bool:
            external_job = (await self.site.external_jobs(self.client)).get(job)
            return external_job is not None and external_job.phase in phases

        await self.site.until(f"job {job} is {' or '.join(phases)}", there)

    async def ends_well(self, job: str, name: str, data: bytes) -> None:
        """Wait until a job is over, and check its end and its result."""
        ended = await self.site.over(job)
        require(ended.state == "COMPLETED", f"job {job} ended as {ended}")
        exported(self.site, name, data)
        (self.site.results / name).unlink()

    # While the bridge is away

    async def refused(self) -> str:
        """Wait until a buffer job is refused since the bridge is away, and return the sentence."""

        async def away() -> str | None:
            done = await self.site.ask("sbatch", script=self.site.script("none"))
            if done.returncode == 0:
                await self.site.ask("scancel", done.stdout.split()[-1])
            return done.stderr if done.returncode else None

        said = str(await self.site.until("a buffer job is refused without a bridge", away, 60))
        found = re.search(AWAY, said)
        require(found is not None and found[1] == await self.host(), f"this is not the sentence: {said}")
        require(REQUEST_REFUSED in said, said)
        self.saw(said.splitlines()[0])
        return said

    async def rejected(self, name: str, sentence: str) -> None:
        """Wait until a buffer job is rejected with this sentence."""

        async def said() -> str | None:
            done = await self.site.ask("sbatch", script=self.site.script(name))
            if done.returncode == 0:
                await self.site.ask("scancel", done.stdout.split()[-1])
            return done.stderr if sentence in done.stderr else None

        self.saw(str(await self.site.until(f"a buffer job is rejected: {sentence}", said, 60)).splitlines()[0])

    async def host(self) -> str:
        """Return this host's name."""
        done = await asyncio.create_subprocess_exec("uname", "-n", stdout=asyncio.subprocess.PIPE)
        return (await done.communicate())[0].decode().strip()

    async def others_untouched(self) -> None:
        """Check that a job without a buffer is accepted, and runs to its end."""
        job = await self.site.submit(PLAIN)

        async def is_over() -> bool:
            found = await self.site.seen(job)
            return found is None or found.state == "COMPLETED"

        await self.site.until("a job without a buffer runs", is_over, 60)

    async def stale(self) -> None:
        """Wait until the bridge's files are no longer believed."""

        async def is_stale() -> bool:
            known = json.loads((self.site.run / "pools.json").read_text())
            return bool(uptime_s() > known["until"])

        await self.site.until("the bridge's files are old", is_stale, 30)

    async def accepted(self, name: str) -> str:
        """Wait until a buffer job is accepted, and return its number."""

        async def job() -> str:
            done = await self.site.ask("sbatch", script=self.site.script(name))
            return done.stdout.split()[-1] if done.returncode == 0 else ""

        return str(await self.site.until("buffer jobs are accepted again", job, 60))

    async def free(self) -> int:
        """Return what Slurm says to be free in the pool, MiB; -1 while it does not say."""
        shown = (await self.site.ask("scontrol", "show", "burst")).stdout
        found = re.search(r"(?:PoolName\[0\]|DefaultPool)=fast .*?FreeSpace=(\d+)(MiB|M|\b)", shown)
        if found is None:
            return -1
        return int(found[1]) if found[2] else int(found[1]) // 2**20

    # Jobs of Forebay's own

    async def native(self, mib: int) -> str:
        """Have a job of Forebay's own hold so much of the pool; return its number."""
        if not self._has_node:
            await node_starts(self.site, self.client, NODE)
            self._has_node = True
        script = self.site.directory / "native.sh"
        script.write_text(
            f"#!/bin/sh\n#DW jobdw pool=fast capacity={mib}MiB access_mode=striped type=scratch\nsleep 900\n"
        )
        words = ("submit", "--uid", self.site.account.pw_name, "-D", str(self.site.results), str(script))

        job = (await self.cli(*words)).split()[-1]

        async def holds() -> bool:
            pools = json.loads(await self.cli("pool", "list", "--json"))["pools"]
            return any(pool["held_bytes"] >= mib * 2**20 for pool in pools)

        await self.site.until(f"job {job} of Forebay's own has its space", holds, 60)
        return job

    async def waits_for_space(self, name: str) -> tuple[str, str]:
        """Return a job of Forebay's own that has nearly all, and one of Slurm's whose setup waits for its space.

        Slurm asks for what is free every 30 s: if it does so in between, it is tried again.
        """
        for _ in range(5):

            async def all_free() -> bool:
                return await self.free() == self.site.grains

            await self.site.until("Slurm thinks that all is free", all_free, 90)
            native = await self.native(self.site.grains - 1)
            job = await self.site.submit(self.site.script(name, grains=3))
            deadline_s = time.monotonic() + NOTICED_S
            while time.monotonic() < deadline_s:
                external_job = (await self.site.external_jobs(self.client)).get(job)
                if external_job is not None and external_job.phase == "waiting":
                    return native, job
                await asyncio.sleep(0.1)
            await self.site.ask("scancel", job)
            await self.cli("cancel", native)
        raise RunFailed("Slurm has asked for what is free between each time")
