"""Complete life cycles of buffer jobs, and results that cannot be exported."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from typing import Final

from forebay.cluster.client import Client
from tests.slurm.exercises.arrays import all_tasks
from tests.slurm.exercises.common import Figures, exported, nothing_left, require
from tests.slurm.gates import FUNCTIONS
from tests.slurm.plain import PlainSite
from tests.slurm.site import RunFailed, Seen, Site
from tests.slurm.slurm import Submitted

BUFFER_STATES: Final = (
    "pending", "staging-in", "staged-in", "pre-run", "running", "post-run", "staging-out", "teardown", "complete",
)  # fmt: skip


async def lifecycle(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """Files and directories in, a run on two nodes, files out; arrays; afterburstbuffer."""
    data = site.make_input("whole")
    tree = site.input / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below" / "leaf").write_text("leaf\n")
    # The root of the buffer is a destination beside that of a file, and a source.
    lines = (
        f"stage_in type=directory source={tree} destination=$DW_JOB_STRIPED/",
        f"stage_out type=directory source=$DW_JOB_STRIPED destination={site.results}/root/",
        f"stage_out type=file source=$DW_JOB_STRIPED/out destination={site.results}/sub/",
    )
    body = (
        'test "$(cat "$DW_JOB_STRIPED/below/leaf")" = leaf || exit 3',
        'srun -N2 -n2 sh -c \'cat "$DW_JOB_STRIPED/in" > "$DW_JOB_STRIPED/of.$SLURMD_NODENAME"\' || exit 4',
        'cmp "$DW_JOB_STRIPED/of.n1" "$DW_JOB_STRIPED/of.n2" || exit 5',
        'cp "$DW_JOB_STRIPED/of.n1" "$DW_JOB_STRIPED/out"',
    )
    job = await site.submit(site.script("whole", *body, lines=lines, grains=4), "-N2")
    child = await site.submit("#!/bin/sh\n#SBATCH -o /dev/null\ntrue\n", f"--dependency=afterburstbuffer:{job}")
    states: list[str] = []

    async def watched() -> Seen | None:
        after, found = await site.seen(child), await site.seen(job)
        begun = after is not None and after.state != "PENDING"
        # datawarp, unlike lua, lets a dependent job start once the results are staged out.
        done = found is None or found.is_over or (site.plugin == "datawarp" and found.buffer == "teardown")
        require(not begun or done, f"job {child} is {after} while job {job} is {found}")
        if found is not None and found.buffer and states[-1:] != [found.buffer]:
            states.append(found.buffer)
        return found if found is not None and found.is_over else None

    ended = await site.until(f"job {job} is over", watched)
    require(ended.state == "COMPLETED", f"job {job} is {ended}")
    in_order = [state for state in BUFFER_STATES if state in states]
    # A state that ends between two looks is not seen.
    require(states and states == in_order, f"job {job} went through {states}")
    exported(site, "whole", data)
    exported(site, "root/out", data)
    exported(site, "sub/out", data)
    require((site.results / "root" / "below" / "leaf").read_text() == "leaf\n", "a file in the root was not exported")
    require((await site.over(child)).state == "COMPLETED", "the job after the buffer's end did not run")
    inputs = {f"task{task}": site.make_input(f"task{task}") for task in (1, 2, 3)}
    # The directives of an array are one text: Slurm replaces %a.
    array = await site.submit(site.script("task%a"), "--array=1-3")
    await all_tasks(site, array, len(inputs))
    for name, expected in inputs.items():
        exported(site, name, expected)
    figures: Figures = {"jobs": 5, "states": states}
    if site.plugin == "datawarp":
        figures |= await _persistent(site, thorough=rounds > 0)
    else:
        figures |= await _as_with_a_script_of_its_own(site)
    await nothing_left(site, client)
    return figures


async def _shown(site: Submitted) -> dict[str, Seen]:
    """Return how Slurm shows a job in each call of its life, which waits while it is looked at."""
    for call in FUNCTIONS:
        site.gates.close(call)
    site.make_input("shown")
    job = await site.submit(site.script("shown"))
    shown: dict[str, Seen] = {}
    for call in FUNCTIONS:

        async def waits(call: str = call) -> bool:
            return site.gates.waits_at(call)

        await site.until(f"job {job} is in {call}", waits)
        # Its nodes end their part beside the call, one sooner than another.
        await site.until(f"job {job} is on no node in {call}", partial(_has_left_its_nodes, site, job))
        found = await site.seen(job)
        if found is None:
            raise RunFailed(f"job {job} is not known in {call}")
        shown[call] = found
        site.gates.let_pass(call)
    shown["over"] = await site.over(job)
    return shown


async def _has_left_its_nodes(site: Submitted, job: str) -> bool:
    found = await site.seen(job)
    return found is None or found.state != "COMPLETING"


async def _as_with_a_script_of_its_own(site: Site) -> Figures:
    """Compare states and reasons of a job, in each call, with those of a Slurm whose script copies by itself."""
    plain = PlainSite(site.directory / "plain")
    try:
        await plain.start()
        ours, theirs = await asyncio.gather(_shown(site), _shown(plain))
    finally:
        await asyncio.to_thread(plain.stop)
    differing = {call: (ours[call], theirs[call]) for call in ours if ours[call] != theirs[call]}
    require(not differing, f"Slurm shows a job otherwise than with a script of its own: {differing}")
    return {"shown": {call: " ".join(found) for call, found in ours.items()}}


STRUCK_OFF_S: Final = 95.0
"""Seconds after a restart by which datawarp has struck off what no session lists: a minute, and half a one between two
looks.
"""


async def _persistent(site: Site, *, thorough: bool) -> Figures:
    """A job of no nodes makes a persistent buffer, others use it, and one removes it; `thorough`: each of them again,
    with restarts of slurmctld between.
    """

    def of_no_nodes(directive: str) -> str:
        return f"#!/bin/sh\n#SBATCH -o /dev/null\n#BB {directive}\ntrue\n"

    async def known() -> str:
        lines = (await site.ask("scontrol", "show", "burst")).stdout.splitlines()
        return next((line.strip() for line in lines if "Name=lake " in line), "")

    async def ended(job: str, what: str) -> None:
        over = await site.over(job)
        require(over.state == "COMPLETED", f"job {job}, which {what}, is {over}")

    made = "create_persistent name=lake capacity=4MiB access=striped type=scratch pool=fast"
    await ended(await site.submit(of_no_nodes(made), "-N0"), "makes a persistent buffer")
    listed = await known()
    require("Size=4MiB State=allocated" in listed, f"scontrol show burst says: {listed!r}")
    if thorough:
        await ended(await site.submit(of_no_nodes(made), "-N0"), "makes it again")
    data = site.make_input("kept", 100_000)
    body = (
        'cp "$DW_JOB_STRIPED/in" "$DW_PERSISTENT_STRIPED_lake/kept" || exit 3',
        'cp "$DW_PERSISTENT_STRIPED_lake/kept" "$DW_JOB_STRIPED/out"',
    )
    await ended(
        await site.submit(site.script("kept", *body, lines=("persistentdw name=lake",))), "uses it beside its own"
    )
    exported(site, "kept", data)
    if thorough:
        site.slurmctld(signal.SIGTERM)
        await site.slurmctld_again()
        since_s = time.monotonic()
        while time.monotonic() - since_s < STRUCK_OFF_S:
            require(await known(), f"{time.monotonic() - since_s:.0f} s after a restart Slurm does not know the buffer")
            await asyncio.sleep(1)
        site.slurmctld(signal.SIGKILL)
        await site.slurmctld_again()
        require(await known(), "after a SIGKILL Slurm does not know the buffer")
        again = f"#DW stage_out type=file source=$DW_PERSISTENT_STRIPED_lake/kept destination={site.results}/again"
        reads = "\n".join(
            ("#!/bin/sh", "#SBATCH -o /dev/null", "#DW persistentdw name=lake", again, 'test -z "$DW_JOB_STRIPED"', "")
        )
        await ended(await site.submit(reads), "has no buffer of its own")
        exported(site, "again", data)
    await ended(await site.submit(of_no_nodes("destroy_persistent name=lake"), "-N0"), "removes it")
    require(not await known(), "a persistent buffer that was removed is still known to Slurm")
    if thorough:
        await ended(await site.submit(of_no_nodes("destroy_persistent name=lake"), "-N0"), "removes what is gone")
    return {"persistent": listed}


async def unexported(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """Check that results that cannot be exported are retained and exported later."""
    figures = {}
    for flags in ("", "Flags=TeardownFailure\n"):
        site.slurmctld(signal.SIGTERM)
        site.slurm.configure_buffers(flags)
        await site.slurmctld_again()
        name = "retained" if flags else "kept"
        data = site.make_input(name)
        blocker = site.results / name
        (blocker / "in-the-way").mkdir(parents=True)
        job = await site.submit(site.script(name))
        expected = "retained" if flags else "stage-out-failed"

        async def kept(job: str = job, expected: str = expected) -> bool:
            external_job = (await site.external_jobs(client)).get(job)
            return external_job is not None and external_job.phase == expected

        await site.until(f"the results of job {job} are {expected}", kept)
        figures[expected] = (await site.seen(job) or Seen("", "", "")).reason
        (blocker / "in-the-way").rmdir()
        blocker.rmdir()
        listed = await asyncio.to_thread(site.cluster.forebay, "buffer", "list", "--retained")
        require(bool(flags) is (f"slurm:{job}" in listed), f"what is retained: {listed}")
        await asyncio.to_thread(site.cluster.forebay, "buffer", "export", f"slurm:{job}")

        async def there(name: str = name) -> bool:
            return (site.results / name).is_file()

        await site.until(f"{name} was exported", there)
        exported(site, name, data)
        if not flags:
            await site.ask("scancel", "--hurry", job)  # without the flag Slurm waits for somebody
        await site.over(job)
    await nothing_left(site, client)
    return figures
