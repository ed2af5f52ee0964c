"""Types each row of docs/operate/tasks.md on three machines during jobs. Run by scripts/day2.

Machines are network namespaces with a forebay.toml, keys and a disk each. After each row: what was acknowledged is
there, jobs have completed once with right results, the cluster is whole, its replicas hold one state, and what the row
promises is so.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults import faults, kernel, verify
from tests.faults.day2.day import Day
from tests.faults.day2.exercises import EXERCISES
from tests.faults.day2.load import Load
from tests.faults.day2.site import BITS, FOURTH, PREFIX, Site
from tests.faults.ending import perform
from tests.faults.hosts import CLIENTS, enter
from tests.faults.local_cluster import REPLICAS
from tests.faults.network import Network


class Rows:
    """The rows that are exercised, and what came of each."""

    def __init__(self, directory: Path, net: Network, seed: int) -> None:
        self.site = Site(directory, net)
        self.seed = seed
        self.load: Load | None = None
        self.done: dict[str, dict[str, Any]] = {}

    async def run(self, names: list[str]) -> None:
        """Exercise each of them on one cluster, in the order of EXERCISES."""
        site = self.site
        kernel.enter_network(CLIENTS)
        await site.found_machines()
        self.load = load = Load(site, seed=self.seed)
        day = Day(site, load)
        async with load.at_work():
            for name in names:
                began_s = time.monotonic()
                await load.commits()
                day.task = EXERCISES[name].task
                said = await EXERCISES[name].run(day)
                await load.commits()
                await site.whole(name)
                kept = await load.settle()
                async with load.paused():
                    async with site.client() as client:
                        same, _ = await verify.same_digest(site, client)
                took_s = round(time.monotonic() - began_s, 1)
                self.done[name] = {"seconds": took_s, "checked": said}
                print(f"{name:<12} {took_s:6.1f} s  {said}; {kept}; {same}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/day2", description=__doc__.splitlines()[0])
    parser.add_argument("--row", action="append", choices=list(EXERCISES), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=None, help="of the jobs' input (default: drawn)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    kernel.end_on_signals()
    try:
        net = enter((*REPLICAS, FOURTH, CLIENTS), prefix=PREFIX, bits=BITS)
        kernel.require_tools(faults.TOOLS)
        directory = Path(tempfile.mkdtemp(prefix="forebay-day2-")).resolve()
        rows = Rows(directory, net, seed)
    except kernel.Unable as unable:
        print(f"day2: unable: {unable}", file=sys.stderr)
        return kernel.EXIT_UNABLE
    wanted = [name for name in EXERCISES if name in (options.row or EXERCISES)]
    ended = perform("day2", rows.run(wanted), release=rows.site.stop_everybody, directory=directory, seed=seed)
    load = rows.load
    return ended.report(
        rows=rows.done,
        left=[name for name in wanted if name not in rows.done],
        acknowledged=load.acknowledged if load is not None else 0,
        jobs_completed=load.completed if load is not None else 0,
        lost_as_announced=load.lost if load is not None else 0,
    )


if __name__ == "__main__":
    sys.exit(main())
