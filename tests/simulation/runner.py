"""The command line of the simulator, `scripts/simulate`: the last line is JSON, the exit code 1 after a violation."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.simulation import deep
from tests.simulation.faults import PROFILE_NAMES
from tests.simulation.world import Outcome, simulate

FIVE_EVERY = 4
"""Without --replicas each seed that this divides has five replicas, the others three."""

PROGRESS_S = 10.0
"""How often it is said on standard error how far it is, seconds."""

CHUNK_SEEDS = 5
"""Seeds that a process takes at a time, count: few enough that none is left over alone for long."""


def replicas_of(seed: int, asked: int | None) -> int:
    """Return how many replicas a seed has."""
    return asked or (5 if seed % FIVE_EVERY == 0 else 3)


def run_one(job: tuple[int, int, str]) -> Outcome:
    """Run one seed in this process."""
    seed, replicas, profile = job
    return simulate(seed, replicas=replicas, profile=profile)


def run_all(jobs: Iterable[tuple[int, int, str]], processes: int, chunk: int) -> Iterator[Outcome]:
    """Run seeds in so many processes, each so many at a time; give each outcome in the order of the seeds."""
    if processes == 1:
        yield from map(run_one, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(run_one, jobs, chunksize=chunk)


def replay_command(outcome: Outcome) -> str:
    """Return the command that shows what happened in a seed."""
    return (
        f"scripts/simulate --start {outcome.seed} --count 1 --replicas {outcome.replicas} "
        f"--profile {outcome.profile} --transcript"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Runs whole clusters under a virtual clock, each from one seed, and checks what they promise.",
    )
    parser.add_argument("--start", type=int, default=1, metavar="S", help="the first seed (default 1)")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="how many seeds (default 100)")
    parser.add_argument("--replicas", type=int, choices=(3, 5), help="default: 3, and 5 in every fourth seed")
    parser.add_argument("--profile", choices=PROFILE_NAMES, default="all", help="what goes wrong (default all)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="P", help="processes (default: all cores)"
    )
    parser.add_argument("--transcript", action="store_true", help="show what happens, one line an event")
    parser.add_argument("--traces", action="store_true", help="print the hash of what happened in each seed")
    asked = parser.parse_args(given)
    if asked.count < 1 or asked.jobs < 1 or asked.start < 0:
        parser.error("--count and --jobs must be 1 or more, --start 0 or more")
    return asked


def main(given: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    asked = arguments(given)
    began_s = time.monotonic()
    jobs = [
        (seed, replicas_of(seed, asked.replicas), asked.profile)
        for seed in range(asked.start, asked.start + asked.count)
    ]
    if asked.transcript:
        outcomes: Iterable[Outcome] = (
            simulate(seed, replicas=replicas, profile=profile, show=print) for seed, replicas, profile in jobs
        )
    else:
        chunk = 1 if asked.profile == deep.PROFILE else CHUNK_SEEDS
        outcomes = run_all(jobs, min(asked.jobs, max(1, len(jobs) // chunk)), chunk)
    counts: Counter[str] = Counter()
    failed: list[int] = []
    acknowledged, virtual_s = 0, 0.0
    told_s = began_s
    for done, outcome in enumerate(outcomes, start=1):
        now_s = time.monotonic()
        if now_s - told_s >= PROGRESS_S:
            told_s = now_s
            rate = done / (now_s - began_s)
            left_s = (len(jobs) - done) / rate
            print(
                f"{done} of {len(jobs)} seeds, {len(failed)} with violations, {rate:.1f} seeds/s, {left_s:.0f} s to go",
                file=sys.stderr,
                flush=True,
            )
        counts.update(outcome.counts)
        acknowledged += outcome.acknowledged
        virtual_s += outcome.virtual_s
        if asked.traces:
            print(f"seed {outcome.seed} {outcome.trace}")
        if outcome.violations:
            failed.append(outcome.seed)
            print(f"seed {outcome.seed}, {outcome.replicas} replicas, profile {outcome.profile}:")
            for sentence in outcome.violations:
                print(f"  {sentence}")
            print(f"  replay it: {replay_command(outcome)}", flush=True)
    seconds = time.monotonic() - began_s
    print(
        json.dumps(
            {
                "seeds": len(jobs),
                "violations": len(failed),
                "acknowledged": acknowledged,
                "crashes": counts["crashes"],
                "elections": counts["elections"],
                "seconds": round(seconds, 1),
                "seeds_per_hour": round(3600 * len(jobs) / max(seconds, 0.001)),
                "virtual_seconds": round(virtual_s, 1),
                "start": asked.start,
                "profile": asked.profile,
                "failed": failed[:100],
                "counts": {name: counts[name] for name in sorted(counts)},
            }
        )
    )
    return 1 if failed else 0
