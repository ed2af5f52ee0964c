"""`scripts/archive`: a day of work archived, pruned, verified, replayed and proven, or years with their pruning."""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.benchmarks import archive, years
from tests.benchmarks.load import VerificationFailed


def main() -> int:
    """Run it; print the figures as the last line."""
    parser = argparse.ArgumentParser(prog="scripts/archive", description=__doc__)
    parser.add_argument(
        "--jobs", type=int, default=archive.JOBS, help=f"jobs of the day (default {archive.JOBS}; full size 100000)"
    )
    parser.add_argument("--years", type=int, default=0, help="go through so many years instead, some minutes each")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave everything in this directory, made anew")
    asked = parser.parse_args()
    if not 0 <= asked.years <= years.YEARS_MAX:
        parser.error(f"--years {asked.years}: write at most {years.YEARS_MAX}")
    if asked.jobs < archive.JOBS_MIN:
        parser.error(f"--jobs {asked.jobs}: write at least {archive.JOBS_MIN}")
    directory = asked.keep or Path(tempfile.mkdtemp(prefix="forebay-archive-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        figures = uvloop.run(years.run(directory, asked.years) if asked.years else archive.run(directory, asked.jobs))
    except VerificationFailed as error:
        print(json.dumps({"passed": False, "why": str(error)}))
        return 1
    finally:
        if asked.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps({"passed": True, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
