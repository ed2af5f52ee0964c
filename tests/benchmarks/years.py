"""Years of a replica, in minutes: a wave of jobs each day, and each month what a timer does, `forebay audit retain`.

The clock goes on by a day between two waves. What must not grow is looked at after each month's pruning: the state,
its kept answers and finished jobs, how full the journal is, its file. In the second half of the years none of them may
come higher than it was in the first, but for a tenth.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from tests.benchmarks.archive import DayClock, answered, hold, say, settled
from tests.benchmarks.past import Maker, cluster_in, founded

YEARS_MAX = 20

DAYS_A_MONTH, MONTHS_A_YEAR = 30, 12

JOBS_A_DAY = 32
"""Jobs of a day's one wave, count."""

DAY_S = 86_000
"""A little less than what the agents that this process plays are missed after, seconds."""

KEEP_DAYS = 60

FINISHED_KEPT = 500
"""Finished jobs that the site keeps, count: less than a month has, so that the bound is reached in the first year."""

MAP_BYTES = 256 << 20

SNAPSHOT_EVERY = 400

GROWTH_MAX = 1.1
"""What the second half of the years may have more of than the first, as a ratio: pages that are not full."""


async def run(directory: Path, years: int) -> dict[str, Any]:
    """Live through all of it; return the figures. VerificationFailed."""
    clock = DayClock()
    config = cluster_in(directory)
    keys, archives = directory / "keys", [directory / name for name in ("a", "b")]
    storage = msgspec.structs.replace(config.storage, snapshot_every_entries=SNAPSHOT_EVERY, map_size_bytes=MAP_BYTES)
    policy = msgspec.structs.replace(config.policy, finished_jobs_kept=FINISHED_KEPT)
    config = msgspec.structs.replace(config, storage=storage, policy=policy)
    with config.file.open("a") as file:
        named = ", ".join(f'"{one}"' for one in archives)
        file.write(f'\n[retention]\narchives = [{named}]\nkeys = "{keys}"\nkeep_days = {KEEP_DAYS}\n')
    replica = await founded(config, clock)
    controller, began_s = replica.controller, time.perf_counter()
    months: list[dict[str, float]] = []
    try:
        maker = Maker(replica, JOBS_A_DAY, clock)
        for month in range(1, years * MONTHS_A_YEAR + 1):
            days = iter(range(DAYS_A_MONTH))

            def over(days: Any = days) -> bool:
                clock.advance(DAY_S)
                return next(days, None) is None

            await maker.make(over)
            await settled(replica, clock, JOBS_A_DAY)
            found = await replica.publisher.keys()
            keys.write_text("".join(f"{key}\n" for key in found.values()))
            kept, retain_s = await answered("--config", config.file, "audit", "retain", "--name", "r1", "--json")
            snapshots = sorted(config.snapshot_directory("r1").glob("*"), key=lambda path: path.stat().st_mtime)
            state = controller.state
            months.append(
                {
                    "fill": round(controller.journal_fill, 4),
                    "data_file_bytes": (config.wal_directory("r1") / "data.mdb").stat().st_blocks * 512,
                    "snapshot_bytes": snapshots[-1].stat().st_size,
                    "answers": len(state.receipts),
                    "jobs": len(state.jobs),
                    "retain_s": retain_s,
                }
            )
            if month % MONTHS_A_YEAR == 0:
                say(f"  year {month // MONTHS_A_YEAR}: revision {state.revision}, {months[-1]}")
        hold(kept["pruned_below"], f"nothing was pruned: {kept}")
    finally:
        await replica.stop()
    middle = len(months) // 2
    for what in ("fill", "data_file_bytes", "snapshot_bytes", "answers", "jobs"):
        first, second = (max(one[what] for one in half) for half in (months[:middle], months[middle:]))
        hold(second <= first * GROWTH_MAX, f"{what} grows: {first} in the first half, {second} in the second")
    return {
        "years": years,
        "jobs": int(controller.state.next_job) - 1,
        "entries": controller.applied_index,
        "revisions": int(controller.state.revision),
        "took_s": round(time.perf_counter() - began_s, 1),
        "most": {what: max(one[what] for one in months) for what in months[0]},
        "last": months[-1],
    }
