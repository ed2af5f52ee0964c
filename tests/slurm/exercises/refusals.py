"""Messages for users and administrators: the rows of "What users see" in docs/slurm/errors.md."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable
from typing import Final

from forebay.cluster.client import Client
from tests.slurm.exercises.common import Figures, exported, nothing_left, rejection, require
from tests.slurm.exercises.outages import (
    bridge_killed,
    bridge_stopped,
    certificates,
    clock_jumps,
    replicas_dead,
    two_clusters,
    when_away_accept,
)
from tests.slurm.exercises.reasons import REQUEST_REFUSED, Slurm
from tests.slurm.exercises.wiped import state_wiped
from tests.slurm.site import Site

SETUP_WAIT_S: Final = 8
"""ExternalJobSetupWait of this exercise, seconds: what waits in vain need not wait for 20."""

PASSES_USER: Final = (23, 2)
"""First release that passes the user to `job_process`."""

PATIENT_S: Final = 120
"""ExternalJobSetupWait where the space comes before it is over, seconds."""


async def requests(slurm: Slurm) -> None:
    """A pool that is not there, a size that is none, more than the pool has, a wrong directive."""
    site, fine = slurm.site, slurm.site.script("none")
    for wrong, right, *sentences in (
        ("capacity=1.5MiB", "capacity=1MiB", "line 3, column", "whole number"),
        ("capacity=99TiB", "capacity=1MiB", "line 3, column", "request less"),
        ("stage_in type=fiel", "stage_in type=file", "line 4, column"),
        ("pool=fsat", "pool=fast"),
    ):
        script = fine.replace(right, wrong)
        if site.plugin == "datawarp" and wrong == "capacity=1.5MiB":
            continue  # 1.5 is a number there
        if site.plugin == "datawarp" and wrong == "capacity=99TiB":
            sentences = []  # Slurm may see it before it asks
        said = await rejection(site, script)
        for sentence in (*sentences, REQUEST_REFUSED):
            require(sentence in said, f"{sentence!r} is not in {said!r}")
        slurm.saw(said.splitlines()[0])
    line = f"stage_out type=file source=$DW_JOB_STRIPED/in destination={site.results}/none"
    said = await rejection(site, site.script("none", lines=(line,)))
    for sentence in ("line 6, column", "overlaps", "give each directive its own destination", REQUEST_REFUSED):
        require(sentence in said, f"{sentence!r} is not in {said!r}")
    slurm.saw(said.splitlines()[0])
    if site.plugin == "datawarp":
        # Slurm itself rejects this one.
        said = await rejection(site, fine.replace("#DW jobdw", "# jobdw"))
        require(REQUEST_REFUSED in said, said)


async def quota(slurm: Slurm) -> None:
    """Over quota: held with the limit; within it: runs."""
    await slurm.cli(
        "policy", "account", "set", "people", "--users", slurm.site.account.pw_name, "--limit", "GrpBB:bb/fast=2MiB"
    )
    await slurm.cli("config", "set", "DefaultAccount=people")
    data = slurm.site.make_input("quota")
    job = await slurm.site.submit(slurm.site.script("quota", grains=3))
    reason = await slurm.held(job, "setup", "AssocGrpBB: account people never permits the job")
    require("no space" not in reason, reason)
    other = await slurm.site.submit(slurm.site.script("quota", "sleep 15", *COPY, grains=2))
    await slurm.phase(other, "running")
    third = await slurm.site.submit(slurm.site.script("quota", grains=1))
    await slurm.held(third, "setup", f"AssocGrpBB for {SETUP_WAIT_S} s: account people has reached a limit")
    await slurm.cli("config", "set", "DefaultAccount=")
    await slurm.cli("policy", "account", "delete", "people", "--yes")
    await slurm.ends_well(other, "quota", data)
    for one in (job, third):
        await slurm.release(one)
        await slurm.ends_well(one, "quota", data)


COPY: Final = ("cp $DW_JOB_STRIPED/in $DW_JOB_STRIPED/out",)


async def users(slurm: Slurm) -> None:
    """Check a forbidden user: the job is held with Slurm's message, or rejected if Slurm passes the user to lua."""
    data = slurm.site.make_input("denied")
    await slurm.cli("config", "set", f"DenyUsers={slurm.site.account.pw_name}")
    if slurm.site.plugin == "lua" and await slurm.site.release() >= PASSES_USER:
        await slurm.rejected("denied", "User found in DenyUsers")
        await slurm.cli("config", "set", "DenyUsers=")
        job = await slurm.accepted("denied")
    else:
        job = await slurm.site.submit(slurm.site.script("denied"))
        await slurm.held(job, "setup", "User found in DenyUsers")
        await slurm.cli("config", "set", "DenyUsers=")
        await slurm.release(job)
    await slurm.ends_well(job, "denied", data)


async def space(slurm: Slurm) -> None:
    """No space although Slurm thought so: held with who has it; then, with more patience, nobody notices."""
    data = slurm.site.make_input("space")
    native, job = await slurm.waits_for_space("space")
    await slurm.held(
        job, "setup", f"no space became free within {SETUP_WAIT_S} s: 3MiB of pool fast were requested", f"job {native}"
    )
    await slurm.cli("cancel", native)
    await slurm.release(job)
    await slurm.ends_well(job, "space", data)
    await slurm.cli("config", "set", f"ExternalJobSetupWait={PATIENT_S}")
    native, job = await slurm.waits_for_space("space")
    await slurm.cli("cancel", native)
    await slurm.ends_well(job, "space", data)
    await slurm.cli("config", "set", f"ExternalJobSetupWait={SETUP_WAIT_S}")
    slurm.saw("space came before the time was over: nothing")


async def transfers(slurm: Slurm) -> None:
    """Stage-in and stage-out that fail: the transfer's sentence, with path and cause."""
    site = slurm.site
    job = await site.submit(site.script("missing"))
    await slurm.held(job, "data_in", f"{site.input}/missing does not exist")
    await site.ask("scancel", job)
    data = site.make_input("closed")
    closed = site.results / "closed"
    (closed / "in-the-way").mkdir(parents=True)
    job = await site.submit(site.script("closed"))
    await slurm.failed(job, "data_out", str(closed))
    (closed / "in-the-way").rmdir()
    closed.rmdir()
    await slurm.cli("buffer", "export", f"slurm:{job}")

    async def there() -> bool:
        return closed.is_file()

    await site.until("what is mended is exported", there)
    exported(site, "closed", data)
    await site.over(job)


_ROWS: Final[dict[str, Callable[[Slurm], Awaitable[None]]]] = {
    "requests": requests,
    "users": users,
    "transfers": transfers,
    "two-clusters": two_clusters,
    "quota": quota,
    "space": space,
    "bridge-killed": bridge_killed,
    "bridge-stopped": bridge_stopped,
    "accept": when_away_accept,
    "certificates": certificates,
    "replicas": replicas_dead,
    "clock": clock_jumps,
    "wiped": state_wiped,
}
ROWS: Final = tuple(_ROWS)
"""Names of the rows. `leader-kill` and `slurmctld-kill` are exercises of their own."""


async def refusals(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """Run every row: check the message, and that the site works again after the correction."""
    slurm = Slurm(site, client)
    site.slurmctld(signal.SIGTERM)
    site.slurm.configure_buffers("Flags=TeardownFailure\n")
    await site.slurmctld_again()
    await slurm.cli("config", "set", f"ExternalJobSetupWait={SETUP_WAIT_S}", "ExternalJobLinger=1")
    took: dict[str, float] = {}
    for name, row in _ROWS.items():
        if site.rows and name not in site.rows:
            continue
        began_s = time.monotonic()
        slurm.row = name
        with site.recorded(f"refusals {name}"):
            await row(slurm)
        took[name] = round(time.monotonic() - began_s, 1)
        print(f"{name}: {took[name]} s; {slurm.seen.get(name)}", flush=True)
    await nothing_left(site, client)
    return {"refusals": sum(map(len, slurm.seen.values())), "rows": slurm.seen, "took_s": took}
