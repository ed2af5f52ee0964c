"""A day of work archived, pruned, verified, replayed, and one job of it proven: a replica through its own commands.

A replica alone makes the ledger through its proposer, as `tests.benchmarks.past` does; its clock goes on by a stretch
of the day between two waves of jobs. Then people's commands do the rest, each in a process of its own, while the
replica runs; what they say is held against what the replica had before.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from forebay.cluster.security.proofs import verify_proof
from forebay.cluster.serve import Replica
from forebay.cluster.system.clock import SystemClock
from forebay.replica.state.digest import state_digest
from forebay.replica.values import Instant
from forebay.wal.environment import FREE_BYTES_KEPT
from tests.benchmarks.load import VerificationFailed
from tests.benchmarks.past import Maker, Watch, cluster_in, founded

JOBS = 500
"""Jobs of the day if nobody says otherwise, count: half a minute. The full size is 100,000."""

JOBS_MIN = 200
"""Below it there is hardly a tile to be pruned."""

AT_ONCE, AT_ONCE_MAX = 16, 512
"""Jobs of a wave, count: of a small day and of a large one, so that each has some hundred waves."""

WAVES = 400

SINGLE_JOBS = 60
"""Jobs that come one by one in the morning, count: the one that is proven is among them, far behind the first entries
that are always kept.
"""

DAY_S = 20 * 3_600
"""The day, seconds: agents that this process plays are missed after 24 hours."""

SNAPSHOT_EVERY = 400
"""Entries between two snapshots, count: consensus keeps the last thousand or so, whatever they are."""

MAP_BYTES, JOB_BYTES = 64 << 20, 4096
"""Room of the journal, bytes: of a replica, and for each job."""

PROVEN = 42

WAIT_S = 120.0
"""How long the historian may take to come as far as the ledger, seconds for each 10,000 jobs, and once more."""


class DayClock(SystemClock):
    """The machine's clock, ahead by what the day has come further."""

    __slots__ = ("_ahead_s",)

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def now(self) -> Instant:
        return Instant(super().now() + int(self._ahead_s * 1_000_000))

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self._ahead_s

    def advance(self, duration_s: float) -> None:
        self._ahead_s += duration_s


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


async def command(*words: object) -> tuple[int, str, str, float]:
    """Run a command of `forebay`; return exit code, what it printed, what it said, and the seconds it took."""
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forebay.cluster.cli", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, said = await process.communicate()
    return process.returncode or 0, printed.decode(), said.decode(), round(time.perf_counter() - began_s, 2)


async def answered(*words: object) -> tuple[Any, float]:
    """Return what a command says as JSON, and the seconds it took; VerificationFailed."""
    code, printed, said, took_s = await command(*words)
    if code:
        raise VerificationFailed(f"`forebay {' '.join(map(str, words))}` ended with {code}: {said}")
    return json.loads(printed) if printed.startswith("{") else printed, took_s


def hold(condition: bool, sentence: str) -> None:
    """Raise VerificationFailed where something is not as it must be."""
    if not condition:
        raise VerificationFailed(sentence)


async def settled(replica: Replica, clock: DayClock, jobs: int) -> None:
    """Wait until a snapshot, the index, the tree and a checkpoint have come as far as the ledger."""
    controller, past = replica.controller, replica.service.past
    await asyncio.wrap_future(controller.save_snapshot())
    # The digest of a state is recorded when a minute passes.
    for _ in range(2):
        clock.advance(90)
        await Maker(replica, 1, clock).make(_once())
    controller.journal.flush_hints()
    until_s = time.perf_counter() + WAIT_S * (1 + jobs / 10_000)
    while min(past.progress.index, past.progress.tree_size) < controller.snapshot_index:
        hold(time.perf_counter() < until_s, "the historian has not come as far as the ledger")
        await asyncio.sleep(0.2)
    await published(replica, until_s)
    # It is alone: nobody is behind, for whom consensus would keep a thousand entries more.
    controller.engine.compact_to(controller.snapshot_index)
    controller.journal.flush_hints()


async def published(replica: Replica, until_s: float) -> None:
    """Have a checkpoint published, once the historian has come so far; VerificationFailed."""
    while True:
        try:
            hold(await replica.publisher.publish(), "no checkpoint was published")
            return
        except TimeoutError as error:
            hold(time.perf_counter() < until_s, f"no checkpoint was published: {error}")


def _once() -> Any:
    """Return what says that there is enough after one wave."""
    asked = iter((False, True))
    return lambda: next(asked)


async def run(directory: Path, jobs: int) -> dict[str, Any]:
    """Do all of it; return the figures. VerificationFailed."""
    clock = DayClock()
    config = cluster_in(directory)
    map_size_bytes = MAP_BYTES + JOB_BYTES * jobs
    storage = msgspec.structs.replace(
        config.storage, snapshot_every_entries=SNAPSHOT_EVERY, map_size_bytes=map_size_bytes
    )
    config = msgspec.structs.replace(config, storage=storage)
    replica = await founded(config, clock)
    controller, home = replica.controller, config.storage.directory / "r1"
    archives, keys, proof = (directory / "a", directory / "b"), directory / "keys", directory / "42.proof"
    figures: dict[str, Any] = {"jobs": jobs}
    runs = True
    try:
        at_once = min(AT_ONCE_MAX, max(AT_ONCE, jobs // WAVES))
        began_s, waves = time.perf_counter(), jobs / at_once

        def enough() -> bool:
            clock.advance(DAY_S / waves)
            return int(controller.state.next_job) > jobs

        await Maker(replica, 1, clock).make(lambda: int(controller.state.next_job) > SINGLE_JOBS)
        await Maker(replica, at_once, clock).make(enough)
        await settled(replica, clock, jobs)
        figures |= {
            "made_s": round(time.perf_counter() - began_s, 1),
            "entries": controller.applied_index,
            "revisions": int(controller.state.revision),
            "fill_before": round(controller.journal_fill, 5),
        }
        say(f"  {figures['entries']} entries of {jobs} jobs made in {figures['made_s']} s")
        found = await replica.publisher.keys()
        keys.write_text("".join(f"{key}\n" for key in found.values()))
        wal = controller.config.wal_directory("r1")
        written: Any = None
        for archive in archives:
            written, took_s = await answered("audit", "archive", archive, "--data", home, "--json")
            figures["archive_s"] = took_s
        figures["archive_bytes"] = sum(one["size_bytes"] for one in written["segments"])
        figures["data_bytes"] = sum(one["data_bytes"] for one in written["segments"])
        figures["segments"] = len(written["segments"])
        say(f"  archived: {figures['segments']} segments, {figures['archive_bytes']} bytes, {figures['archive_s']} s")
        named = [word for one in archives for word in ("--archive", one)]
        below = controller.journal.base_index + 1
        watch = Watch()
        pruned, figures["prune_s"] = await answered(
            *("audit", "prune", "--data", home, "--below", below, *named, "--keys", keys, "--yes", "--json")
        )
        figures["prune_hold_ms"] = watch.stop()
        figures["pruned_entries"] = pruned["entries"]
        figures["fill_after"] = round(controller.journal_fill, 5)
        hold(pruned["removed"] == "by the running replica" and pruned["entries"] > 0, f"nothing was pruned: {pruned}")
        room_bytes = (figures["fill_before"] - figures["fill_after"]) * map_size_bytes
        # Of less than that nothing counts as room yet.
        is_much = figures["data_bytes"] > 2 * FREE_BYTES_KEPT
        hold(room_bytes > 0 or not is_much, "the wall of map_size did not recede")
        say(f"  pruned: {pruned['entries']} entries in {figures['prune_s']} s, loop held {figures['prune_hold_ms']} ms")
        await replica.stop()
        runs = False
        figures["ledger_digest"] = controller.applied_digest.hex()
        figures["state_digest"] = state_digest(controller.state).hex()
        await _checked(figures, home, archives, keys, proof)
        # It starts again on what is left, and goes on.
        replica = Replica(config, "r1", clock=clock)
        controller = replica.controller
        await replica.start()
        runs = True
        while not controller.leads:
            await asyncio.sleep(0.01)
        await Maker(replica, AT_ONCE, clock).make(_once())
        await published(replica, time.perf_counter() + WAIT_S)
        figures["data_file_bytes"] = (wal / "data.mdb").stat().st_blocks * 512
    finally:
        if runs:
            await replica.stop()
    return figures


async def _checked(figures: dict[str, Any], home: Path, archives: tuple[Path, Path], keys: Path, proof: Path) -> None:
    """Verify, replay and prove from what is left and the archive; VerificationFailed."""
    code, _, said, _ = await command("audit", "verify", "--data", home, "--complete")
    hold(code == 7 and "--archive" in said, "a pruned ledger says that it is complete")
    verified, figures["verify_s"] = await answered(
        *("audit", "verify", "--data", home, "--archive", archives[0], "--keys", keys, "--complete", "--json")
    )
    hold(verified["ledger_digest"] == figures["ledger_digest"], "ledger and archive come to another digest")
    hold(verified["archive"]["checkpoints_signed"] > 0, "no checkpoint of the archive is believed")
    replayed, figures["replay_s"] = await answered(
        "audit", "replay", "--data", home, "--archive", archives[1], "--json"
    )
    hold(replayed["state_digest"] == figures["state_digest"], "the replay comes to another state")
    figures["digests_compared"] = replayed["digests_compared"]
    code, _, said, _ = await command("audit", "prove", "--data", home, "--job", PROVEN, "-o", proof)
    hold(code == 3 and "segment-" in said, f"job {PROVEN} is proven without the archive: {said}")
    _, figures["prove_s"] = await answered(
        "audit", "prove", "--data", home, "--job", PROVEN, "-o", proof, "--archive", archives[0]
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(verify_proof.__file__), "--keys", str(keys), str(proof)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate()
    is_proven = process.returncode == 0 and f" records of job {PROVEN}".encode() in told
    hold(is_proven, f"the proof of job {PROVEN} is refused: {told.decode(errors='replace')[-400:]}")
    figures["proven"] = told.decode().splitlines()[-1]
    say(f"  verified in {figures['verify_s']} s, replayed in {figures['replay_s']} s, job {PROVEN} proven")
