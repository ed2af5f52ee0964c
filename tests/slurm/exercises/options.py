"""Buffers requested on the command line of sbatch, srun and salloc, and by multi-node jobs."""

from __future__ import annotations

from forebay.cluster.client import Client
from tests.slurm.exercises.common import Figures, nothing_left, require
from tests.slurm.site import Site

HAS_BUFFER = 'test -d "$DW_JOB_STRIPED" || exit 3'


async def options(site: Site, client: Client, size: int, seed: int) -> Figures:
    """`--bb`, `--bbf`, srun, salloc and `-N2` have a buffer, and what Slurm would ignore is rejected."""
    space = site.space(1)
    plain = f"#!/bin/sh\n#SBATCH -o /dev/null\n{HAS_BUFFER}\n"
    seen: list[str] = []

    async def ends_well(job: str, what: str) -> None:
        ended = await site.over(job)
        require(ended.state == "COMPLETED", f"job {job} ({what}) ended as {ended}")
        seen.append(what)

    file = site.directory / "directives"
    file.write_text(f"{space}\n")
    await ends_well(await site.submit(plain, f"--bb={space}"), "sbatch --bb")
    await ends_well(await site.submit(plain, f"--bbf={file}"), "sbatch --bbf")
    on_both = f"#!/bin/sh\n#SBATCH -o /dev/null\n{space}\nsrun -N2 -n2 sh -c '{HAS_BUFFER}'\n"
    await ends_well(await site.submit(on_both, "-N2"), "-N2")
    for program in ("srun", "salloc"):
        done = await site.ask(program, f"--bb={space}", "-n1", "sh", "-c", HAS_BUFFER)
        require(done.returncode == 0, f"{program} --bb ended with {done.returncode}: {done.stderr}")
        seen.append(f"{program} --bb")
    figures: Figures = {"buffers": seen}
    if site.plugin == "lua":
        for program, more in (("sbatch", ()), ("srun", ("true",)), ("salloc", ("true",))):
            script = plain if program == "sbatch" else None
            done = await site.ask(program, "--bb=pool=fast capacity=2GiB", *more, script=script)
            require(done.returncode != 0, f"{program} accepts --bb without a directive")
            if program == "sbatch":
                require("--bb has no #BB_LUA directive" in done.stderr, f"sbatch says {done.stderr!r}")
                figures["rejected"] = done.stderr.splitlines()
    await nothing_left(site, client)
    return figures
