"""Slurm with a wiped state: job IDs start again, and old jobs' data is never mixed with that of new jobs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Final

from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.jobs import JobView
from forebay.cluster.slurm.files import LEFT_S
from tests.slurm.exercises.common import exported, require
from tests.slurm.exercises.outages import EXIT_CONFIGURATION
from tests.slurm.exercises.reasons import PLAIN, Slurm

SLEEP_S: Final = 613.25
"""For how long the job runs that loses its Slurm, seconds; its process is found by it."""


def _runs() -> bool:
    line = f"sleep\0{SLEEP_S}\0".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == line:
                return True
        except OSError:
            continue
    return False


async def _records(slurm: Slurm, job: str) -> list[JobView]:
    jobs = (await slurm.client.call(ops.LIST_JOBS, external_jobs="yes", deadline_s=30)).jobs
    return [one for one in jobs if one.external_job == f"slurm:{job}"]


async def _wipe(slurm: Slurm, token: Path) -> None:
    """Have a slurmctld begin anew. With its state goes the word that tells it from others: the bridge, which runs, puts
    it back.
    """
    site, word = slurm.site, token.read_text()
    site.slurmctld(signal.SIGKILL)
    token.unlink()
    site.slurm.wipe_state()
    await asyncio.to_thread(site.slurm.controller_again)

    async def is_back() -> bool:
        return token.exists() and token.read_text() == word

    await site.until("the bridge has put the word back", is_back, 30)


async def state_wiped(slurm: Slurm) -> None:
    """A job's number is used again after Slurm's state was wiped: a new epoch; what the old one left is retained."""
    site = slurm.site
    old = site.make_input("old")
    body = ("cp $DW_JOB_STRIPED/in $DW_JOB_STRIPED/out", f"exec sleep {SLEEP_S}")
    ran = await site.submit(site.script("old", *body), "-N2", "--exclusive")
    await slurm.phase(ran, "running")

    async def works() -> bool:
        return _runs()

    await site.until("the old job has made its results", works, 60)
    site.make_input("never")
    never = await site.submit(site.script("never"), "-N2", "--exclusive")
    await slurm.phase(never, "staged-in")
    [running], [staged] = await _records(slurm, ran), await _records(slurm, never)

    token = site.slurm.state / "forebay.cluster"
    await _wipe(slurm, token)

    async def has_ended() -> bool:
        return not _runs()

    await site.until("Slurm has ended what it does not know", has_ended)
    if site.plugin == "datawarp":
        # It tears down listed sessions, and reuses none of their numbers: only a retained buffer can meet its own.
        await slurm.phase(ran, "retained")
        other = await site.submit(PLAIN, "--hold")
        require(other not in (ran, never), f"Slurm gave number {other} again")

        async def unlisted() -> bool:
            return not any((site.run / "sessions" / job).exists() for job in (ran, never))

        # What was torn down stays listed for a minute, for a slurmctld that ends before it knows.
        await site.until("what was torn down is listed no longer", unlisted, 2 * LEFT_S)
        await _wipe(slurm, token)
    new = {ran: site.make_input("new"), never: site.make_input("newer")}
    names = dict(zip(new, ("new", "newer"), strict=True))
    number = 0
    while number < int(never):
        number += 1
        if str(number) in new:
            name = names[str(number)]
            job = await site.submit(site.script(name))
        else:
            job = await site.submit(PLAIN, "--hold")
            await site.ask("scancel", job)
        require(job == str(number), f"Slurm began with job {job} instead of {number}")
    for job, data in new.items():
        await slurm.ends_well(job, names[job], data)
        require(len(await _records(slurm, job)) == 2, f"slurm:{job} has no second epoch")
    retained = await slurm.cli("buffer", "list", "--retained")
    require(retained.count("slurm:") == 1 and f"slurm:{ran}" in retained, f"what is retained: {retained}")
    why = await slurm.cli("job", "why", str(running.job_id))
    slurm.saw(f"slurm:{ran} is used again: {why.strip().splitlines()[0]}")

    async def is_gone() -> bool:
        return not [path for path in site.left() if path.endswith(f"{staged.job_id}.1")]

    await site.until("what was staged and never ran is gone", is_gone)
    require(not (site.results / "never").exists(), "what never ran was exported")
    await slurm.cli("buffer", "export", str(running.job_id))

    async def there() -> bool:
        return (site.results / "old").is_file()

    await site.until("what the old job left is exported", there)
    exported(site, "old", old)

    # Both are gone while no bridge runs: it takes an operator to say that the old cluster is no more.
    site.signal("bridge", signal.SIGTERM)
    token.unlink()
    code, said = await site.refused_bridge()
    require(code == EXIT_CONFIGURATION and "forebay slurm release slurm" in said, f"it ended with {code}: {said}")
    slurm.saw(said.strip().splitlines()[-1])
    await slurm.cli("slurm", "release", "slurm", "--yes")
    site.start_bridge()
    data = site.make_input("released")
    await slurm.ends_well(await slurm.accepted("released"), "released", data)
