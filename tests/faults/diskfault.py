"""Injects errors into writes and syncs of a replica, and checks that it stops and its peers continue.

Run by scripts/diskfault.

A small library that is loaded before the C library lets fdatasync, pwrite and their kin fail with EIO or ENOSPC on the
sync log or the data file of one replica, at a moment drawn at random, while clients write. The replica must stop itself
with exit code 70 and the sentence of wal.Environment; its peers must go on committing; started again on a good disk it
must be whole. A disk that only becomes slow stops nobody: its replica hands over if it leads, and it is measured what
one client waits meanwhile. Other clients share jobs and pools all the while, and the history of each is linearizable (a
check that does not finish is a failure).
"""

import argparse
import asyncio
import contextlib
import errno
import itertools
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.serve import EXIT_STOPPED_ITSELF, EXIT_STORAGE_REFUSED
from tests.faults import disks, faults, kernel
from tests.faults.bare import BareCluster, held_job
from tests.faults.disks import Disk
from tests.faults.ending import perform
from tests.faults.faults import Plan
from tests.faults.histories import Clients
from tests.faults.local_cluster import REPLICAS, RunFailed
from tests.faults.promises import Promises

SENTENCE = re.compile(
    r"forebay: this replica stops itself: StorageFailed: \S+/wal/(data\.mdb|sync\.log) could not be written "
    r"durably: .+"
    r"Free space or replace the disk, then start the replica again"
)
AT_START = re.compile(r"forebay: .*data\.mdb")

CALLS = {
    "fdatasync": "sync",
    "pwrite": "write",
    "half a pwrite": "short-write",
}
ERRORS = ("EIO", "ENOSPC")
VICTIMS = ("leader", "follower")
CASES = [(call, error, victim) for call in CALLS for error in ERRORS for victim in VICTIMS]
SNAPSHOT, START, FULL, SLOW = "snapshot", "start", "full disk", "slow sync"
DELAYS_MS = {"50 ms": 50, "200 ms": 200, "1 s": 1000}
EXTRAS = [
    (SNAPSHOT, "ENOSPC", "leader"),
    (START, "EIO", "follower"),
    *((SLOW, delay, victim) for delay in DELAYS_MS for victim in VICTIMS),
]

KINDS = (*CALLS, SNAPSHOT, START, FULL, SLOW)

SMALL = "r3"
"""The replica whose directory is a small file system of its own, where that is possible."""

SMALL_BYTES = 24 << 20
"""Size of it: enough for what the cases write, filled in a moment."""

WRITERS = 4
"""Clients that write meanwhile, count."""

STOP_S = 60.0
"""How long a replica may take to notice, seconds: a fault may wait for the fourth checkpoint, which comes after some
two thousand commands; a busy machine does a few hundred a second."""

MORE = 30
"""Commands that must be acknowledged without the victim, count."""

SKIPPED_MAX = {"/wal/sync.log": 40, "/wal/data.mdb": 3}
"""Calls on a file that succeed after the fault was planned, at most, count: drawn, so that any write of a sync or of a
checkpoint is hit. There are hundreds of syncs to a checkpoint."""

MEASURED = 100
"""Commands of one client of which the median is said, count."""

GO_ON_S = 60.0
"""How long the peers may take for that many, seconds."""


class DiskFaults:
    """A cluster whose disks can be made to fail."""

    def __init__(self, directory: Path, seed: int, *, stale: bool = False) -> None:
        """With `stale` clients take for current what they should not: then the checks must fail."""
        self.cluster = BareCluster(directory)
        self.chance = random.Random(seed)
        self.stale = stale
        self.clients = Clients(seed)
        self.promises = Promises(beside=self.clients.submitted)
        self.library = faults.build(directory / "shim")
        self.disk: Disk | None = None
        self.hits = 0
        self.done: list[str] = []
        self.numbers = itertools.count()
        self.slow: list[dict[str, object]] = []
        """What clients waited while a disk was slow."""

    def plan_file(self, name: str) -> Path:
        """Return the file that says what fails at a replica."""
        return self.cluster.directory / f"{name}.faults"

    async def run(self, cases: list[tuple[str, str, str]]) -> None:
        """Do the cases one after the other."""
        self.cluster.found()
        if any(call == FULL for call, _, _ in cases):
            self.disk = Disk(
                self.cluster.directory / "small.img", self.cluster.directory / SMALL, "ext4", size_bytes=SMALL_BYTES
            )
            self.disk.format()
            self.disk.mount_with_contents()
        for name in REPLICAS:
            self.cluster.environments[name] = faults.environment(self.library, Plan("nothing"), self.plan_file(name))
        self.cluster.start_all()
        for number, case in enumerate(cases):
            started = time.monotonic()
            await self.case(number, *case)
            self.done.append(" ".join(case))
            took = f"{self.clients.operations} operations checked, {time.monotonic() - started:.1f} s"
            print(f"case {number + 1:2}: {_said(case)} at the {case[2]}; all held, {took}", flush=True)

    async def case(self, number: int, call: str, error: str, victim: str) -> None:
        """Let a call fail at a replica while clients write; look at what it does, what its peers do, what is left."""
        async with self.cluster.client("operator") as observer:
            leader = await self.cluster.leader(observer)
            name = leader if victim == "leader" else self.chance.choice([name for name in REPLICAS if name != leader])
            async with self.clients.at_work(self.cluster, stale=self.stale):
                await self.fail_while_writing(number, call, error, name)
                faults.change(Plan("nothing"), self.plan_file(name))
                self.cluster.start_all()
                started_s = time.monotonic()
                await self.cluster.leader(observer)
                async with self.cluster.client() as client:
                    await self.promises.check(client, self.chance)
                await self.clients.commits_after(started_s, self.cluster)
            await self.clients.look_at_everything(observer, beside=self.promises.jobs.keys())
            await self.cluster.agreed(observer)
        self.cluster.verify_ledgers()
        self.clients.check()

    async def fail_while_writing(self, number: int, call: str, error: str, name: str) -> None:
        """Let a call fail at a replica while promises are made; see that clients commit after that, too."""
        async with contextlib.AsyncExitStack() as stack:
            writers = []
            for row in range(WRITERS):
                client = await stack.enter_async_context(self.cluster.client())
                chance = random.Random(self.chance.random())
                writers.append(asyncio.create_task(self.promises.write(client, f"{number}-{row}", chance)))
            try:
                await self.more(writers, MORE)
                if call == SNAPSHOT:
                    await self.snapshot_fails(name)
                elif call == START:
                    await self.start_fails(name)
                elif call == FULL:
                    await self.disk_fills_up()
                elif call == SLOW:
                    await self.sync_is_slow(name, error)
                else:
                    await self.write_fails(name, CALLS[call], getattr(errno, error))
                failed_s = time.monotonic()
                await self.more(writers, MORE)
                await self.clients.commits_after(failed_s)
            finally:
                for writer in writers:
                    writer.cancel()
                await asyncio.gather(*writers, return_exceptions=True)

    async def write_fails(self, name: str, what: str, error: int) -> None:
        """The replica stops itself at the first failure, and says why."""
        file = self.chance.choice(sorted(SKIPPED_MAX))
        faults.change(Plan(what, error, file, self.chance.randrange(SKIPPED_MAX[file])), self.plan_file(name))
        code = await self.cluster.ended(name, STOP_S)
        self.hits += faults.hits(self.plan_file(name))
        words = self.cluster.log(name).read_text().splitlines()[-1]
        if code != EXIT_STOPPED_ITSELF or not SENTENCE.match(words):
            raise RunFailed(f"{name} exited {code}, and its last words are: {words}")
        if file not in words:
            raise RunFailed(f"{name} does not name {file}: {words}")
        # A write that took only a part of the bytes is an I/O error, whatever the next call would have said.
        if os.strerror(errno.EIO if what == "short-write" else error) not in words:
            raise RunFailed(f"{name} does not say {os.strerror(error)!r}: {words}")

    async def snapshot_fails(self, name: str) -> None:
        """A snapshot that cannot be written is refused to whoever asked for it; the replica goes on."""
        faults.change(Plan("write", errno.ENOSPC, needle="/snapshots/"), self.plan_file(name))
        async with self.cluster.client("operator", deadline_s=5) as client:
            try:
                view = await client.call(ops.SAVE_SNAPSHOT, replica=self.cluster.config.replica(name).api)
            except ApiError as error:
                if "space" not in str(error).lower():
                    raise RunFailed(f"the rejection of a snapshot does not name the reason: {error}") from error
            else:
                raise RunFailed(f"{name} says that it wrote {view.path} on a full disk")
        self.hits += faults.hits(self.plan_file(name))
        left = sorted(path.name for path in self.cluster.config.snapshot_directory(name).iterdir())
        if any(not entry.endswith(".fbs") for entry in left):
            raise RunFailed(f"{name} left pieces of a snapshot behind: {left}")

    async def start_fails(self, name: str) -> None:
        """A replica that cannot write when it starts says so and ends."""
        self.cluster.kill(name)
        faults.change(Plan("sync", errno.EIO), self.plan_file(name))
        self.cluster.start(name)
        code = await self.cluster.ended(name, STOP_S)
        self.hits += faults.hits(self.plan_file(name))
        words = self.cluster.log(name).read_text().splitlines()[-1]
        if code not in (EXIT_STORAGE_REFUSED, EXIT_STOPPED_ITSELF) or not AT_START.match(words):
            raise RunFailed(f"{name} exited {code}, and its last words are: {words}")

    async def disk_fills_up(self) -> None:
        """A disk without any space left stops its replica, whether it leads or not, until there is room again."""
        assert self.disk is not None
        ballast = self.disk.fill()
        code = await self.cluster.ended(SMALL, STOP_S)
        words = self.cluster.log(SMALL).read_text().splitlines()[-1]
        if code != EXIT_STOPPED_ITSELF or not SENTENCE.match(words):
            raise RunFailed(f"{SMALL} exited {code} on a full disk, and its last words are: {words}")
        self.hits += 1
        self.cluster.start(SMALL)
        code = await self.cluster.ended(SMALL, STOP_S)
        words = self.cluster.log(SMALL).read_text().splitlines()[-1]
        if code not in (EXIT_STORAGE_REFUSED, EXIT_STOPPED_ITSELF) or not words.startswith("forebay: "):
            raise RunFailed(f"{SMALL}, started on a full disk, exited {code}; its last words are: {words}")
        ballast.unlink()

    async def sync_is_slow(self, name: str, delay: str) -> None:
        """A replica whose disk becomes slow hands over where it leads, and holds up nobody for long."""
        async with self.cluster.client() as client, self.cluster.client("operator") as observer:
            before_ms = [await self.timed(client) for _ in range(MEASURED)]
            led = await self.cluster.leader(observer) == name
            faults.change(Plan("slow", needle="", delay_ms=DELAYS_MS[delay]), self.plan_file(name))
            began_s, meanwhile_ms = time.monotonic(), list[float]()
            while await self.cluster.leader(observer) == name:
                meanwhile_ms.append(await self.timed(client))
                if time.monotonic() > began_s + STOP_S:
                    raise RunFailed(f"{name} leads on although its disk takes {delay} longer for a sync")
            left_s = time.monotonic() - began_s
            after_ms = [await self.timed(client) for _ in range(MEASURED)]
        self.cluster.check_running()
        self.hits += faults.hits(self.plan_file(name))
        found: dict[str, object] = {"delay": delay, "led": led, "before_ms": round(statistics.median(before_ms), 1)}
        if led:
            found |= {"handed_over_s": round(left_s, 1), "meanwhile_ms": sorted(map(round, meanwhile_ms))}
        self.slow.append(found | {"after_ms": round(statistics.median(after_ms), 1)})

    async def timed(self, client: Client) -> float:
        """Submit a job; return for how long its answer was waited, milliseconds."""
        name = f"timed-{next(self.numbers)}"
        self.clients.submitted.add(name)
        began_s = time.monotonic()
        await client.call(ops.SUBMIT_JOB, held_job(client, name))
        return 1000 * (time.monotonic() - began_s)

    def release(self) -> None:
        """End all processes and release the mount, if there is one."""
        self.cluster.stop_all()
        if self.disk is not None:
            self.disk.discard()

    async def more(self, writers: list[asyncio.Task[None]], count: int) -> None:
        """Wait until `count` more commands were acknowledged."""
        wanted = self.promises.acknowledged + count
        until = time.monotonic() + GO_ON_S
        while self.promises.acknowledged < wanted:
            for writer in writers:
                if writer.done():
                    raise RunFailed(f"a writer has ended: {writer.exception()!r}")
            if time.monotonic() > until:
                raise RunFailed(f"clients could not commit {count} commands within {GO_ON_S:g} s")
            await asyncio.sleep(0.02)


def _said(case: tuple[str, str, str]) -> str:
    call, error, _ = case
    return f"{call}, {error} longer," if call == SLOW else f"{call} fails with {error}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/diskfault", description="Writes and syncs of a replica fail.")
    parser.add_argument("--rounds", type=int, default=1, help="how often each case is done (default: 1)")
    parser.add_argument("--cases", type=int, default=None, help="how many cases of a round, drawn (default: all)")
    parser.add_argument("--only", metavar="CALL", help=f"cases of one kind: {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=None, help="of moments and commands (default: drawn)")
    parser.add_argument(
        "--stale-reads", action="store_true", help="let clients read with stale=ok: the run must find that"
    )
    options = parser.parse_args()
    if options.only is not None and options.only not in KINDS:
        parser.error(f"--only must be one of {', '.join(KINDS)}")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    kernel.end_on_signals()
    directory = Path(tempfile.mkdtemp(prefix="forebay-diskfault-")).resolve()
    extras = list(EXTRAS)
    try:
        kernel.require_tools(faults.TOOLS)
        try:
            kernel.require_root("mount a small file system and fill it up")
            kernel.require_tools({**disks.PACKAGES["ext4"], **disks.TOOLS})
            kernel.enter_private_mounts()
            disks.probe(directory, "ext4")
            extras.append((FULL, "ENOSPC", "follower"))
        except kernel.Unable as unable:
            print(f"diskfault: left out: {FULL}: {unable}", file=sys.stderr)
        injection = DiskFaults(directory, seed, stale=options.stale_reads)
    except kernel.Unable as unable:
        shutil.rmtree(directory)
        print(f"diskfault: unable: {unable}", file=sys.stderr)
        return kernel.EXIT_UNABLE
    cases = []
    for _ in range(options.rounds):
        every = [case for case in (*CASES, *extras) if options.only in (None, case[0])]
        cases += every if options.cases is None else injection.chance.sample(every, min(options.cases, len(every)))
    print(f"diskfault: {len(cases)} cases, seed {seed}", flush=True)
    ended = perform("diskfault", injection.run(cases), release=injection.release, directory=directory, seed=seed)
    return ended.report(
        cases=len(injection.done),
        failed_calls=injection.hits,
        acknowledged=injection.promises.acknowledged,
        stale_reads=options.stale_reads,
        slow=injection.slow,
        **injection.clients.figures,
    )


if __name__ == "__main__":
    sys.exit(main())
