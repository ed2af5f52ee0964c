"""A campaign: which seed of its world is the first to find each mutant? `python -m tests.mutants --seeds N`."""

from __future__ import annotations

import argparse
import sys

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


def main() -> int:
    """Look for every mutant, or those that are named; return 1 where one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, metavar="N", help="seeds that are tried of each (default 30)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first of them (default 0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only those in whose sentence this occurs")
    parser.add_argument("--world", default="", help="look in this world instead of in each one's own")
    asked = parser.parse_args()
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
