"""Cuts the power of all three replicas at a random moment in each round. Run by scripts/powercut.

Each replica keeps its files on a file system of its own on a loop device. Clients write through the API; then all three
file systems are shut down without flushing anything, not even their journals (EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
with NOLOGFLUSH); the processes are killed, the file systems unmounted, mounted again (the kernel replays their
journals) and the replicas started. Then: every acknowledged command is there exactly once, commands of unknown outcome
at most once, and exactly once when sent again; state digests are equal and every ledger verifies. Other clients share
jobs and pools from before the cut until after it, and the history of each is linearizable over all cuts of a generation
(a check that does not finish is a failure).

What is not cut off is the cache of the drive below the loop device: what reached the device counts as kept.
"""

import argparse
import asyncio
import contextlib
import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from forebay.cluster.client import ApiError
from forebay.cluster.serve import EXIT_STOPPED_ITSELF, EXIT_STORAGE_REFUSED
from tests.faults import disks, faults, kernel
from tests.faults.bare import BareCluster, refused
from tests.faults.disks import Disk
from tests.faults.ending import perform
from tests.faults.histories import Clients
from tests.faults.local_cluster import REPLICAS, RunFailed
from tests.faults.promises import Promises

ROUNDS_PER_GENERATION = 12
"""Cuts before a new cluster on new file systems is founded, count: the checks read its whole history each time."""

JOBS_PER_GENERATION_MAX = 7_000
"""Jobs in a generation after which a new one begins, count: one list of the API shows 10,000."""

WRITERS, BULK_WRITERS, BULK = 6, 1, 24
"""Clients that write one command at a time, clients that write many in one request, and how many those are."""

MOMENT_S = 0.6
"""The cut comes between 0 and this after the clients began to write, seconds."""

START_S = 2.0
"""A cut of replicas that are starting comes between 0 and this after their start, seconds."""

START_SHARE = 0.12
"""Share of the cuts that come while replicas start, recover, elect and found."""

SOME_SHARE = 0.15
"""In this share of the rounds one or two replicas lose their power first and come back before all do."""

SKEW_S, SKEW_SHARE = 0.03, 0.4
"""In this share of the cuts the file systems do not go at once, but within this, seconds."""

AFTERLIFE_S, AFTERLIFE_SHARE = 0.15, 0.3
"""In this share of the cuts the processes live on without their disks for up to this, seconds: they must not lie."""


def may_end_so(code: int | None, last_words: str) -> bool:
    """Whether a replica whose disk goes may end with this exit code; None if it has not ended.

    Killed, or stopped by itself; one that was about to start refuses to, but for no other reason than the disk's error.
    """
    if code == EXIT_STORAGE_REFUSED:
        return os.strerror(errno.EIO) in last_words.rpartition(" / ")[2]
    return code in (-signal.SIGKILL, EXIT_STOPPED_ITSELF)


class PowerCuts:
    """Generations of clusters on file systems that lose their power."""

    def __init__(self, directory: Path, kind: str, seed: int, *, lying: str | None = None, kept: bool = True) -> None:
        """With `lying` disks the checks must fail; without `kept` the histories alone must find that out."""
        self.directory = directory
        self.kind = kind
        self.chance = random.Random(seed)
        self.lying = lying
        self.kept = kept
        self.cuts: Counter[str] = Counter()
        self.cuts_of_some = 0
        self.acknowledged = 0
        self.sent_again = 0
        self.figures: Counter[str] = Counter()
        self.generation = 0
        self.entries = 0
        self.cluster: BareCluster | None = None
        self.disks: dict[str, Disk] = {}
        self.shim = faults.build(directory / "shim") if lying else None

    async def run(self, count: int) -> None:
        """Cut the power `count` times."""
        while self.cuts.total() < count:
            await self.live(count)

    async def live(self, count: int) -> None:
        """Found a cluster and cut its power until it is too old."""
        cluster, clients = self.found(), Clients(self.chance.randrange(10**6))
        promises = Promises(beside=clients.submitted)
        done = 0
        try:
            while self.cuts.total() < count and done < ROUNDS_PER_GENERATION:
                if len(promises.jobs) + len(clients.submitted) > JOBS_PER_GENERATION_MAX:
                    break
                started = time.monotonic()
                how = await self.round(cluster, promises, clients)
                done += 1
                self.cuts[how] += 1
                took = time.monotonic() - started
                what = f"{promises.acknowledged} kept, {clients.operations} operations checked"
                print(f"cut {self.cuts.total():3}: {how}; {what}, {took:.1f} s", flush=True)
        finally:
            self.acknowledged += promises.acknowledged
            self.figures.update(clients.figures)
        self.discard()

    async def round(self, cluster: BareCluster, promises: Promises, clients: Clients) -> str:
        """Start, cut, start again, check; return how the cut was made."""
        cluster.start_all()
        async with clients.at_work(cluster), cluster.client() as client:
            how = await self.cut_somewhen(cluster, promises)
            cluster.start_all()
            started_s = time.monotonic()
            await cluster.leader(client)
            if self.kept:
                self.sent_again += await promises.check(client, self.chance)
            await clients.commits_after(started_s, cluster)
        async with cluster.client("operator") as client:
            await clients.look_at_everything(client, beside=promises.jobs.keys())
            await cluster.agreed(client)
        self.entries = cluster.verify_ledgers()
        clients.check()
        cluster.check_running()
        return how

    async def cut_somewhen(self, cluster: BareCluster, promises: Promises) -> str:
        """Cut the power while replicas start or while promises are made; return which."""
        if self.chance.random() < START_SHARE:
            await asyncio.sleep(self.chance.uniform(0, START_S))
            await self.cut(cluster, self.chance.sample(REPLICAS, len(REPLICAS)))
            return "starting"
        async with cluster.client() as client:
            await cluster.leader(client)
        await self.write_and_cut(cluster, promises)
        return "writing"

    async def write_and_cut(self, cluster: BareCluster, promises: Promises) -> None:
        """Let clients write and cut the power in the middle of it."""
        async with contextlib.AsyncExitStack() as stack:
            writers = []
            for number in range(WRITERS + BULK_WRITERS):
                client = await stack.enter_async_context(cluster.client(deadline_s=20))
                who = f"{self.cuts.total()}-{number}"
                bulk = BULK if number >= WRITERS else 0
                chance = random.Random(self.chance.random())
                writers.append(asyncio.create_task(promises.write(client, who, chance, bulk=bulk)))
            await asyncio.sleep(self.chance.uniform(0, MOMENT_S))
            if self.chance.random() < SOME_SHARE:
                await self.cut(cluster, self.chance.sample(REPLICAS, self.chance.choice((1, 2))))
                self.cuts_of_some += 1
                cluster.start_all()
                await asyncio.sleep(self.chance.uniform(0, START_S))
            await self.cut(cluster, self.chance.sample(REPLICAS, len(REPLICAS)))
            for writer in writers:
                writer.cancel()
            for outcome in await asyncio.gather(*writers, return_exceptions=True):
                if isinstance(outcome, RunFailed) or (isinstance(outcome, ApiError) and refused(outcome)):
                    raise RunFailed(f"a writer was refused: {outcome}")

    async def cut(self, cluster: BareCluster, names: list[str]) -> None:
        """Take the power away from these disks, in this order, kill their processes, and bring the disks back."""
        skewed = self.chance.random() < SKEW_SHARE
        for name in names:
            self.disks[name].cut()
            if skewed:
                await asyncio.sleep(self.chance.uniform(0, SKEW_S))
        if self.chance.random() < AFTERLIFE_SHARE:
            await asyncio.sleep(self.chance.uniform(0, AFTERLIFE_S))
        cluster.kill(*names)
        for name in names:
            process = cluster.processes[name]
            words = cluster.last_words(name)
            if not may_end_so(process.returncode, words):
                raise RunFailed(f"{name} exited {process.returncode} in a power cut: {words}")
        for name in names:
            self.disks[name].unmount()
            self.disks[name].mount()

    def found(self) -> BareCluster:
        """Make new file systems and a new cluster on them."""
        self.generation += 1
        root = self.directory / f"{self.kind}-{self.generation}"
        self.cluster = BareCluster(root)
        # Snapshots often, so that many cuts hit one being written; votes and leases as configured by default.
        self.cluster.found(settings="snapshot_every_entries = 40")
        for name in REPLICAS:
            disk = self.disks[name] = Disk(self.directory / f"{name}.img", root / name, self.kind)
            disk.format()
            disk.mount_with_contents()
            if self.shim is not None:
                plan = faults.Plan("lie" if self.lying == "all" else "lie-last", needle="")
                self.cluster.environments[name] = faults.environment(self.shim, plan, root / f"{name}.faults")
        return self.cluster

    def discard(self) -> None:
        """End the present generation and remove it."""
        self.release()
        if self.cluster is not None:
            shutil.rmtree(self.cluster.directory)
            self.cluster = None

    def release(self) -> None:
        """End all processes and release all mounts; what they held stays where it is not on the disks."""
        if self.cluster is not None:
            self.cluster.stop_all()
        for disk in self.disks.values():
            with contextlib.suppress(OSError):
                disk.unmount()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/powercut", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="how many power cuts (default: 20)")
    parser.add_argument("--fs", choices=sorted(disks.MAKE), default="ext4", help="file system (default: ext4)")
    parser.add_argument("--seed", type=int, default=None, help="of moments and commands (default: drawn)")
    parser.add_argument("--images", type=Path, default=None, help="where the images are (default: /tmp)")
    parser.add_argument(
        "--lying-disk", choices=("all", "last"), default=None,
        help="let syncs promise without doing it, all or only the last one of a commit: the run must fail",
    )  # fmt: skip
    parser.add_argument(
        "--histories-only", action="store_true",
        help="do not compare with what was acknowledged: a lying disk must make the histories fail as well",
    )  # fmt: skip
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    kernel.end_on_signals()
    try:
        kernel.require_root("mount file systems on loop devices and to shut them down")
        compiler = faults.TOOLS if options.lying_disk else {}
        kernel.require_tools({**disks.PACKAGES[options.fs], **disks.TOOLS, **compiler})
        kernel.enter_private_mounts()
        directory = Path(tempfile.mkdtemp(prefix="forebay-powercut-", dir=options.images)).resolve()
        try:
            disks.probe(directory, options.fs)
        except kernel.Unable:
            shutil.rmtree(directory)
            raise
    except kernel.Unable as unable:
        print(f"powercut: unable: {unable}", file=sys.stderr)
        return kernel.EXIT_UNABLE
    cuts = PowerCuts(directory, options.fs, seed, lying=options.lying_disk, kept=not options.histories_only)
    print(f"powercut: {options.count} cuts on {options.fs}, seed {seed}", flush=True)
    ended = perform("powercut", cuts.run(options.count), release=cuts.release, directory=directory, seed=seed)
    return ended.report(
        cuts=cuts.cuts.total(),
        fs=options.fs,
        acknowledged=cuts.acknowledged,
        sent_again=cuts.sent_again,
        cuts_of_some_besides=cuts.cuts_of_some,
        moments=dict(sorted(cuts.cuts.items())),
        generations=cuts.generation,
        lying_disk=options.lying_disk,
        **cuts.figures,
    )


if __name__ == "__main__":
    sys.exit(main())
