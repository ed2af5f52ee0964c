"""Look for mutants: those of the table in their worlds, or random ones of a package with the nearest tests.

Without `--package`, print the first seed of its world that finds each mutant of the table. With `--package`, plant
random one-place faults in private copies of the tree, run the nearest tests, and print which faults they notice.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from tests.mutants.campaign import PACKAGES, TREE, Limits, draw, row_of, run, summary
from tests.mutants.hunts import hunt
from tests.mutants.planting import Mutant, planted
from tests.mutants.table import MUTANTS


def first_found(mutant: Mutant, seeds: range, world: str = "") -> tuple[int, str] | None:
    """Return the first of these seeds that finds a mutant, and as what; None if none does."""
    with planted(mutant):
        for seed in seeds:
            if what := hunt(world or mutant.hunt, seed):
                return seed, what
    return None


def campaign(asked: argparse.Namespace) -> int:
    """Run a campaign over packages; return 1 if a fault survived."""
    packages = PACKAGES if asked.package == ["all"] else [name.replace(".", "/").rstrip("/") for name in asked.package]
    limits = Limits(asked.workers, asked.limit_s, 2 * asked.limit_s)
    faults = draw(TREE, packages, asked.count, asked.seed)
    results = run(TREE, faults, limits, lambda result: print(row_of(result), file=sys.stderr, flush=True))
    print(summary(results), file=sys.stderr)
    if asked.json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    return 1 if any(result.outcome in ("survived", "untested") for result in results) else 0


def main() -> int:
    """Look for every mutant, or those that are named; return 1 where one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    random_ones = parser.add_argument_group("random faults")
    random_ones.add_argument(
        "--package", action="append", help="plant faults in this package or module, such as cluster/agent; all: in each"
    )
    random_ones.add_argument("--count", type=int, default=20, metavar="N", help="faults to plant (default 20)")
    random_ones.add_argument("--seed", type=int, default=0, metavar="S", help="which faults are drawn (default 0)")
    random_ones.add_argument("--workers", type=int, default=1, metavar="N", help="private copies to use (default 1)")
    random_ones.add_argument(
        "--limit-s", type=float, default=120, metavar="T", help="seconds for the nearest tests of a fault (default 120)"
    )
    random_ones.add_argument("--json", action="store_true", help="print the table as JSON on standard output")
    parser.add_argument("--seeds", type=int, default=30, metavar="N", help="seeds that are tried of each (default 30)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first of them (default 0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only those in whose sentence this occurs")
    parser.add_argument("--world", default="", help="look in this world instead of in each one's own")
    asked = parser.parse_args()
    if asked.package:
        return campaign(asked)
    missed = 0
    for mutant in MUTANTS:
        if asked.only not in mutant.sentence:
            continue
        found = first_found(mutant, range(asked.start, asked.start + asked.seeds), asked.world)
        missed += found is None
        seed, what = found or ("NOT FOUND", "")
        print(
            f"{mutant.sentence!r}, {asked.world or mutant.hunt}, {seed}: {what.splitlines()[0][:150] if what else ''}"
        )
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
