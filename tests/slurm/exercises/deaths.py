"""Kills of the leader and of slurmctld during each call of Slurm and between calls."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from forebay.cluster.client import Client
from tests.slurm.controllers import TwoControllers
from tests.slurm.exercises.common import GONE_S, Figures, Jobs, all_well, exported, many, nothing_left, require
from tests.slurm.plain import PlainSite
from tests.slurm.site import RunFailed, Site
from tests.slurm.slurm import Submitted

CALLS: Final = ("setup", "data_in", "pre_run", "post_run", "data_out", "teardown")
"""Calls of both plugins that reach the bridge, in the order of a job's life: a gate holds each."""

STATES: Final = ("staged-in", "running")
"""What lies between two calls, as Slurm shows it. A staged job waits for nodes; a running one for its sleep."""

BLOCKER: Final = "#!/bin/sh\n#SBATCH -o /dev/null\n#SBATCH -N2 --exclusive\nsleep 600\n"
"""A job without a buffer that has all nodes."""

WORK: Final = ("sleep 1", "cp $DW_JOB_STRIPED/in $DW_JOB_STRIPED/out")

STUCK_S: Final = 150.0
"""Seconds after which a job that has not ended never will: Slurm sets up anew a minute after it started."""

COMES_S: Final = 150.0
"""Seconds for a moment of a job's life to come: after a restart Slurm sets up anew after a minute."""

TAKEN_OVER_S: Final = 240.0
"""Seconds in which a backup answers: it waits for SlurmctldTimeout twice, and reads its state on a busy machine."""

SAVED: Final = 0.7
"""In how many of the rounds slurmctld has saved the moment in which it ends."""

SAVES_S: Final = 8.0
"""Seconds in which it saves what is new."""

LEFT: Final = "left by Slurm"
"""How the ends begin of jobs that never ended."""

NEVER: Final = "never came so far"
"""How one ends that did not reach its moment: what is stuck keeps the nodes."""

LOST: Final = "COMPLETED, its result gone"
"""How one ends whose buffer slurmctld tore down, with `hurry`, since it had forgotten that it ran."""

SEEN_BESIDE: Final = frozenset(
    {
        "BurstBufferStageIn, staging-in",
        "BurstBufferResources, staging-in",
        "BurstBufferResources, teardown",
        "None, pre-run",
        "None, running",
        "None, teardown",
        "BeginTime, post-run",
        "Stage-out_in_progress, post-run",
        "Stage-out_in_progress, staging-out",
        "data_out failed, staging-out",
    }
)
"""How jobs were stuck in a Slurm 22.05 with a script that copies, by reason and state of the buffer, in any run: which
of these it is depends on milliseconds, so one run does not show all of them. Of a script that slurmctld does not know
to run it ends the orphan, and then has a result staged out that was never written: `data_out failed`."""

MORE_BY_CHANCE: Final = 0.1
"""In how many of the rounds ours may be stuck and the one beside it not: likewise."""

_FAILED: Final = re.compile(r"burst_buffer/\w+:_(?:slurm_bb|dws)_(\w+)")

HELD: Final = ("JobHeldAdmin", "JobHeldUser", "Burst_buffer_pre_run_error")
"""Reasons of jobs that Slurm does not begin again, since paths or pre_run failed, or a node did."""

HANDED_BACK_S, ANSWERS = 6.0, 12
"""Seconds, and how often in them slurmctld has to answer, until what a backup took over counts as given back."""

STANDS_BY_S: Final = 60.0
"""Seconds in which a backup that gives back stands by again."""


async def _at(site: Submitted, moment: str, tag: str, count: int) -> tuple[Jobs, list[str]]:
    """Begin so many jobs and return them when one is at a moment of its life, and what blocks the nodes."""
    blockers = []
    if moment == "staged-in":
        blockers = [await site.submit(BLOCKER)]
    if moment not in STATES:
        site.gates.close(moment)
    jobs = await many(site, count, tag, *WORK)
    first = next(iter(jobs))

    async def there() -> bool:
        if moment not in STATES:
            return site.gates.waits_at(moment)
        found = await site.seen(first)
        return bool(found is not None and found.buffer == moment)

    try:
        await site.until(f"job {first} is in {moment}", there, COMES_S)
    except RunFailed as error:
        raise RunFailed(f"{error}; {await _slurm_has(site)}") from error
    return jobs, blockers


async def _slurm_has(site: Submitted) -> str:
    """Return what Slurm says of its jobs, nodes and buffers, on one line: what may keep a job from its moment."""
    asked = (
        ("squeue", "-h", "-o", "%A %t %r %N"),
        ("sinfo", "-h", "-N", "-o", "%n %t %C"),
        ("scontrol", "show", "burst"),
    )
    said = await asyncio.gather(*(site.ask(*words) for words in asked))
    return "; ".join(", ".join(line.strip() for line in one.stdout.splitlines()) for one in said)


async def leader_kill(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """SIGKILL of the leader in each call and between them: every job ends as if nothing had happened."""
    chance = random.Random(seed)
    moments = [*CALLS, *STATES] + (["paths"] if site.plugin == "datawarp" else [])
    killed: Counter[str] = Counter()
    for number in range(rounds):
        moment = moments[number % len(moments)]
        jobs, blockers = await _at(site, moment, f"leader{number}", 3)
        leader = await site.leader(client)
        before = chance.random() < 0.5
        if before:  # the call finds no leader; else it loses the one that it has reached
            site.cluster.kill(leader)
        site.gates.open()
        await asyncio.sleep(chance.uniform(0, 0.3))
        if not before:
            site.cluster.kill(leader)
        for blocker in blockers:
            await site.ask("scancel", blocker)
        await asyncio.sleep(chance.uniform(0, 1))
        site.cluster.start(leader)
        await all_well(site, client, jobs)
        killed[moment] += 1
        print(f"round {number + 1}: {leader} was killed in {moment}; {len(jobs)} jobs ended well", flush=True)
    await nothing_left(site, client)
    return {"rounds": rounds, "jobs": 3 * rounds, "killed_in": dict(killed), "bytes_again": 0}


# ---- slurmctld

WAYS: Final = ("SIGTERM", "SIGKILL")
"""How slurmctld ends in `slurmctld-kill`, one way a round; the seed says which is first."""

TAKEOVER: Final = "takeover"
"""A SIGKILL after which the backup goes on, and the primary starts later."""


RECONFIGURE: Final = "reconfigure"
"""`scontrol reconfigure`: newer releases start slurmctld anew for it."""


def moment_and_way(number: int, ways: tuple[str, ...], seed: int) -> tuple[str, str]:
    """Return in which moment of a job's life slurmctld ends in a round, and how: rounds cover all pairs in turn."""
    moments = (*CALLS, *STATES)
    return moments[number % len(moments)], ways[(number + number // len(moments) + seed - 1) % len(ways)]


async def slurmctld_kill(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """Ends of slurmctld in each call and between them."""
    return await _slurmctld_ends(site, client, rounds, seed, WAYS)


async def takeover(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """Takeovers by the backup in each call and between them."""
    return await _slurmctld_ends(site, client, rounds, seed, (TAKEOVER,))


async def reconfigure(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """A new configuration in each call and between them."""
    return await _slurmctld_ends(site, client, rounds, seed, (RECONFIGURE,))


async def _slurmctld_ends(site: Site, client: Client, rounds: int, seed: int, ways: tuple[str, ...]) -> Figures:
    """End slurmctld in each moment: nothing is copied again, no buffer is left behind, and what Slurm itself leaves
    stuck is stuck with a script that copies by itself, too.
    """
    backup = isinstance(site.slurm, TwoControllers)
    plain = PlainSite(site.directory / "plain", plugin=site.plugin, backup=backup)
    ends, beside = _no_ends(ways), _no_ends(ways)
    ended_in: Counter[str] = Counter()
    retained = 0
    try:
        await plain.start()
        for number in range(rounds):
            moment, way = moment_and_way(number, ways, seed)
            chance = random.Random(f"{seed} {number}")
            end = _End(f"ctld{number}", moment, way, chance.random() < SAVED, chance.uniform(0, 2))
            since = await site.newest(client)
            jobs, _ = await asyncio.gather(
                _ended(site, end, ends[way]),
                _beside(plain, end, beside[way]),
            )
            written = await site.written_in(client, jobs, since=since)
            for job, (_, data) in jobs.items():
                require(written[job] <= len(data), f"job {job} had {written[job]} bytes written for {len(data)}")
            # Slurm begins a job anew that had run, if it forgot so: what that had not exported is kept for people.
            retained += await site.discard_retained(client)
            ended_in[f"{moment}, {way}"] += 1
            shown = f"{dict(ends[way].held)}, beside it {dict(beside[way].held)}, others {dict(ends[way].others)}"
            print(f"round {number + 1}: {way} in {moment}; so far with {way}: {shown}", flush=True)
    finally:
        await asyncio.to_thread(plain.stop)
    await nothing_left(site, client, GONE_S)
    stuck, stuck_beside = (_stuck(one.held for one in found.values()) for found in (ends, beside))
    unlike = set(stuck) - set(stuck_beside) - SEEN_BESIDE
    require(not unlike, f"nothing beside it is ever stuck so: {unlike}; {ends}, beside it {beside}")
    lost, lost_beside = (_lost(found) for found in (ends, beside))
    require("SIGTERM" not in lost, f"a result was lost that nobody had removed: {ends}, beside it {beside}")
    require(not lost or bool(lost_beside), f"results were lost, and none beside it: {ends}, beside it {beside}")
    more = stuck.total() - stuck_beside.total()
    require(more <= MORE_BY_CHANCE * rounds, f"{more} more are stuck than beside it: {ends}, beside it {beside}")
    return {
        "rounds": rounds,
        "stuck": stuck.total(),
        "stuck_beside": stuck_beside.total(),
        "lost": dict(lost),
        "lost_beside": dict(lost_beside),
        "ends": {way: dict(found.held) for way, found in ends.items()},
        "beside": {way: dict(found.held) for way, found in beside.items()},
        "others": {way: dict(found.others) for way, found in ends.items()},
        "backups": {way: dict(found.backups) for way, found in ends.items() if found.backups},
        "backups_beside": {way: dict(found.backups) for way, found in beside.items() if found.backups},
        "ended_in": dict(ended_in),
        "retained": retained,
        "bytes_again": 0,
    }


class _End(NamedTuple):
    """End of slurmctld: moment in a job's life, method, and duration of its absence."""

    tag: str
    moment: str
    way: str
    is_saved: bool
    """Whether it has saved that moment before: what it has not, a slurmctld that is killed forgets."""
    pause_s: float


class _Ends(NamedTuple):
    """How jobs have ended: those that were at the moment, and others that were anywhere."""

    held: Counter[str]
    others: Counter[str]
    backups: Counter[str]
    """Result of a backup that returned control to the primary."""


def _no_ends(ways: Iterable[str]) -> dict[str, _Ends]:
    return {way: _Ends(Counter(), Counter(), Counter()) for way in ways}


def _stuck(ends: Iterable[Counter[str]]) -> Counter[str]:
    """Return how many jobs are stuck, by reason and state of the buffer: one that is to run again is PENDING then."""
    found: Counter[str] = Counter()
    for counts in ends:
        for end, count in counts.items():
            if end.startswith(LEFT):
                reason, _, buffer = end.partition(", ")[2].partition(", ")
                failed = _FAILED.search(reason)
                reason = f"{failed[1]} failed" if failed else reason.rpartition(":_")[2]
                found[f"{reason}, {buffer}"] += count
    return found


def _lost(ends: dict[str, _Ends]) -> dict[str, int]:
    """Return how many results were lost, by the way in which slurmctld ended."""
    found = {way: one.held[LOST] + one.others[LOST] for way, one in ends.items()}
    return {way: count for way, count in found.items() if count}


async def _ended(site: Submitted, one: _End, ends: _Ends) -> Jobs:
    """Have slurmctld end when a job is at a moment of its life, and two more are anywhere; count how they end.

    The first is where its like beside it is, whatever else happens, so the two can be compared.
    """
    held, blockers = await _at(site, one.moment, one.tag, 1)
    others = await many(site, 2, f"{one.tag}.others", *WORK)
    if one.is_saved:
        await _saved(site)
    way = one.way
    if way == RECONFIGURE:
        done = await site.as_administrator("scontrol", "reconfigure")
        require(done.returncode == 0, f"scontrol reconfigure: {done.stderr}")
    else:
        site.slurmctld(signal.SIGTERM if way == "SIGTERM" else signal.SIGKILL)
    site.gates.open()
    await asyncio.sleep(one.pause_s)
    if way in WAYS:
        await site.slurmctld_again()

    async def answers() -> bool:
        return (await site.ask("squeue", "-h")).returncode == 0

    await site.until("slurmctld or its backup answers", answers, TAKEN_OVER_S)
    await site.nodes_up()
    for blocker in blockers:
        await site.ask("scancel", blocker)
    jobs = held | others
    ended = await asyncio.gather(*(_after_restart(site, job, *staged) for job, staged in jobs.items()))
    for job, end in zip(jobs, ended, strict=True):
        (ends.held if job in held else ends.others)[end] += 1
    if way == TAKEOVER:
        await site.slurmctld_again()
        await _handed_back(site)
        ends.backups[await _gave_back(site)] += 1
        await site.nodes_up()
    return jobs


async def _saved(site: Submitted) -> None:
    """Wait until slurmctld has written its jobs down; where nothing is new to it, it does not."""
    path, since_s, deadline_s = site.slurm.state / "job_state", time.time(), time.monotonic() + SAVES_S

    def saved_at_s() -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return 0.0  # Slurm removes the old file before it links the new one.

    while saved_at_s() < since_s and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)


async def _handed_back(site: Submitted) -> None:
    """Wait until the backup has given back: while it does, there are moments in which neither of the two answers."""
    answered = [0]

    async def in_a_row() -> bool:
        done = await site.ask("squeue", "-h")
        answered[0] = answered[0] + 1 if done.returncode == 0 else 0
        await asyncio.sleep(HANDED_BACK_S / ANSWERS)
        return answered[0] >= ANSWERS

    await site.until("slurmctld answers again and again", in_a_row, 120)


async def _gave_back(site: Submitted) -> str:
    """Have a backup that stands by, and return what became of it: one that gives back may end, or wait for ever for a
    thread of its own, with any script, and has to be started anew.
    """
    slurm = site.slurm
    assert isinstance(slurm, TwoControllers)

    async def stands_by() -> bool:
        return await asyncio.to_thread(slurm.backup_stands_by)

    try:
        await site.until("the backup stands by", stands_by, STANDS_BY_S)
    except RunFailed:
        await asyncio.to_thread(slurm.backup_again)
        await site.until("the backup stands by again", stands_by, STANDS_BY_S)
        return "hung or ended"
    return "gave back"


async def _beside(site: PlainSite, one: _End, ends: _Ends) -> None:
    """Do the same where nothing is promised: what is stuck there may keep nodes from those that come later."""
    try:
        await _ended(site, one, ends)
    except RunFailed:
        ends.held[NEVER] += 1
        site.gates.open()


async def _after_restart(site: Submitted, job: str, name: str, data: bytes) -> str:
    """Check a job after a restart; return how it ended: `well`, or what Slurm itself has made of it."""

    async def ended() -> str:
        found = await site.seen(job)
        if found is None:
            # Slurm had not saved it yet when it was killed.
            return "well" if (site.results / name).exists() else "forgotten by Slurm"
        if found.reason in HELD and (site.results / name).exists():
            # It had run, and its results are there; a slurmctld that was killed had not saved that.
            return "run before, held by Slurm"
        if not found.is_over:
            return ""
        return "well" if found.state == "COMPLETED" else found.state

    try:
        # Each look is a process: ten a second of each job are half a core, for minutes.
        end = str(await site.until(f"job {job} ends", ended, STUCK_S, every_s=1))
    except RunFailed:
        found = await site.seen(job)
        # Of a sentence about a call that failed, which call: the rest has paths in it.
        reason = "" if found is None else ":_".join(found.reason.split(":_")[:2])
        end = LEFT if found is None else f"{LEFT} as {found.state}, {reason}, {found.buffer}"
    if end == "well":
        if not (site.results / name).exists():
            return LOST
        exported(site, name, data)
    else:
        await site.ask("scancel", "--hurry", job)
        await site.ask("scancel", job)
    return end
