"""Outages: missing or rejected bridges, missing leaders, and a changed clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import signal
import struct
from pathlib import Path
from typing import Final

from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.system import SystemClock
from forebay.replica.values import Instant
from tests.faults import faults
from tests.faults.kernel import Unable
from tests.slurm.exercises.common import require
from tests.slurm.exercises.reasons import Slurm
from tests.slurm.site import MOVERS, REPLICAS, RunFailed

YEARS_US: Final = 30 * 366 * 86_400 * 1_000_000
EXIT_CONFIGURATION: Final = 78
OFF_S: Final = 3600
"""How far slurmctld's clock is set off, seconds: files are believed for 10."""


async def _back(slurm: Slurm, name: str) -> None:
    """Check that buffer jobs are accepted again, and end well."""
    data = slurm.site.make_input(name)
    await slurm.ends_well(await slurm.accepted(name), name, data)


async def bridge_killed(slurm: Slurm) -> None:
    """Check a killed bridge: buffer jobs are rejected with the message, Slurm sees no space, and other jobs run."""
    slurm.site.signal("bridge", signal.SIGKILL)
    await slurm.refused()
    await slurm.others_untouched()

    async def none_free() -> bool:
        return await slurm.free() == 0

    await slurm.site.until("scontrol show burst has no free space", none_free, 60)
    slurm.saw("scontrol show burst: FreeSpace=0")
    slurm.site.start_bridge()
    await _back(slurm, "killed")


async def bridge_stopped(slurm: Slurm) -> None:
    """Check a stopped bridge in the same way."""
    slurm.site.signal("bridge", signal.SIGSTOP)
    try:
        await slurm.refused()
        await slurm.others_untouched()
    finally:
        slurm.site.signal("bridge", signal.SIGCONT)
    await _back(slurm, "stopped")


async def when_away_accept(slurm: Slurm) -> None:
    """`--when-away accept`: what comes without a bridge is accepted, and waits for one."""
    site = slurm.site
    site.signal("bridge", signal.SIGTERM)
    site.start_bridge("--when-away", "accept")

    async def says_so() -> bool:
        return bool(json.loads((site.run / "site.json").read_text())["away"] == "accept")

    await site.until("the bridge accepts", says_so, 30)
    site.signal("bridge", signal.SIGKILL)
    await slurm.stale()
    data = site.make_input("accept")
    job = await site.submit(site.script("accept"))
    slurm.saw("accepted without a bridge")
    await slurm.others_untouched()
    site.start_bridge()
    await slurm.ends_well(job, "accept", data)


async def certificates(slurm: Slurm) -> None:
    """A certificate that is missing, expired or for something else: 78 with file and remedy, and refusals."""
    site = slurm.site
    tls = site.cluster.directory / "tls"
    authority, now = load_authority(tls), SystemClock().now()
    good = {path: path.read_bytes() for path in (tls / "slurm.pem", tls / "slurm.key")}
    site.signal("bridge", signal.SIGTERM)
    try:
        for role, at, sentences in (
            (Role.USER, now, ("has the role user, but a bridge needs the role scheduler", "cert issue NAME")),
            (Role.SCHEDULER, Instant(now - YEARS_US), ("expired on", "--role scheduler --replace")),
            (None, now, ("there is no certificate", "forebay cert issue slurm --role scheduler")),
        ):
            for path in good:
                path.unlink()
            if role is not None:
                issue(authority, tls, role=role, name="slurm", at=at)
            code, said = await site.refused_bridge()
            require(code == EXIT_CONFIGURATION, f"the bridge ended with {code}: {said}")
            for sentence in (str(tls / "slurm.pem"), *sentences):
                require(sentence in said, f"{sentence!r} is not in {said!r}")
            slurm.saw(said.strip().splitlines()[-1])
            if role is None:
                break
            # The next one finds files to take away.
        await slurm.refused()
        await slurm.others_untouched()
    finally:
        for path, content in good.items():
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(content)
    site.start_bridge()
    await _back(slurm, "certified")


async def two_clusters(slurm: Slurm) -> None:
    """Check that the bridge of another cluster with the same name exits with 78 and names the first address."""
    site = slurm.site
    other = site.directory / "other"
    other.mkdir()
    code, said = await site.refused_bridge(other, site.directory / "other-run")
    require(code == EXIT_CONFIGURATION, f"the second bridge ended with {code}: {said}")
    for sentence in (
        f"scheduler name slurm is in use by another cluster, last seen at {await slurm.host()}",
        "rename one of the two clusters",
        "forebay slurm release slurm",
    ):
        require(sentence in said, f"{sentence!r} is not in {said!r}")
    slurm.saw(said.strip().splitlines()[-1])
    await _back(slurm, "first")


async def replicas_dead(slurm: Slurm) -> None:
    """All replicas dead: the sentence of a dead bridge; what waits waits on, and succeeds with the next leader."""
    site = slurm.site
    await slurm.cli("config", "set", "ExternalJobSetupWait=120")
    data = {name: site.make_input(name, 1_000_000) for name in ("moving", "waiting")}
    native, waiting = await slurm.waits_for_space("waiting")
    # So that its stage-in is under way when the replicas die.
    for mover in MOVERS:
        site.signal(mover, signal.SIGSTOP)
    moving = ""
    try:
        moving = await site.submit(site.script("moving"))
        await asyncio.sleep(3)
        for name in REPLICAS:
            site.cluster.kill(name)
    finally:
        for mover in MOVERS:
            site.signal(mover, signal.SIGCONT)
    await slurm.refused()
    await slurm.others_untouched()
    for name in REPLICAS:
        site.cluster.start(name)

    async def leads() -> bool:
        members = await slurm.client.call(ops.LIST_MEMBERS, deadline_s=30)
        return any(member.role == "leader" for member in members.members)

    await site.until("a replica leads again", leads)
    await slurm.cli("cancel", native)
    await slurm.ends_well(waiting, "waiting", data["waiting"])
    await slurm.ends_well(moving, "moving", data["moving"])
    for job, written in (await site.written_in(slurm.client, (moving, waiting))).items():
        require(written == 1_000_000, f"job {job} had {written} bytes written for 1000000")
    slurm.saw("a setup and a stage-in that waited have succeeded")
    await _back(slurm, "led")


async def clock_jumps(slurm: Slurm) -> None:
    """slurmctld's clock set an hour ahead and back: fresh files are believed, and old ones are not."""
    site = slurm.site
    try:
        library = faults.build(site.directory / "shim", Path(faults.__file__).with_name("wallclock.c"))
    except Unable as error:
        raise RunFailed(f"the row clock {error}") from error
    off = site.directory / "slurmctld.wallclock"

    def set_clock(off_s: int) -> None:
        with off.open("r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), 8)) as mapped:
            mapped[:] = struct.pack("<q", off_s)

    off.write_bytes(struct.pack("<q", 0))
    site.slurmctld(signal.SIGTERM)
    site.slurm.preload = {"LD_PRELOAD": str(library), "FOREBAY_WALLCLOCK": str(off)}
    await asyncio.to_thread(site.slurm.controller_again)
    data = site.make_input("clock")
    set_clock(OFF_S)
    ahead = await site.submit(site.script("clock"))
    await slurm.ends_well(ahead, "clock", data)
    slurm.saw("an hour ahead: accepted, and ended well")
    site.signal("bridge", signal.SIGKILL)
    await slurm.refused()
    # A clock that is set back would make old files young.
    set_clock(-OFF_S)
    await slurm.refused()
    set_clock(0)
    site.slurmctld(signal.SIGTERM)
    site.slurm.preload = {}
    await asyncio.to_thread(site.slurm.controller_again)
    site.start_bridge()
    await _back(slurm, "right")
