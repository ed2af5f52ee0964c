"""Runs the table of manipulations and prints the detectors and delays of each.

The exit code is 0 only if each led to what is written down of it. usage: python -m tests.faults.manipulations [ID...]
[--size small|full] [--own-periods] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import uvloop

from tests.faults.kernel import end_on_signals
from tests.faults.manipulations.detectors import Then, look
from tests.faults.manipulations.expected import EXPECTED, FINDERS
from tests.faults.manipulations.live import live, live_under_a_leader, short_periods
from tests.faults.manipulations.site import Case, Site, found_site
from tests.faults.manipulations.table import ROWS, Manipulation

SIZES = "small", "full"
PATIENCE_S = 20.0
"""How long replicas run if nothing is expected to be found, with short periods; ten times as long with their own."""
FOUND_S = 180.0
"""How long they run at most if something is expected to be found: a busy machine must not make it unseen."""


def tried(site: Site, row: Manipulation) -> dict[str, Any]:
    """Have everybody look at what was altered."""
    directory, began_s = site.directory / "case", time.monotonic()
    try:
        case = Case(site, directory, row.on, row.notes)
        row.do(case)
        outcome, expected = look(case), EXPECTED[row.id]
    finally:
        shutil.rmtree(directory)
    then = Then.GOES_ON if expected.then is Then.HARMLESS else expected.then
    found = [finder for finder in FINDERS if finder in outcome.found]
    return {
        "found_by": found,
        "said": outcome.found,
        "then": expected.then if outcome.then is then else outcome.then,
        "as_expected": tuple(found) == expected.finders and outcome.then is then,
        "seconds": round(time.monotonic() - began_s, 2),
    }


def run(site: Site, row: Manipulation, *, own_periods: bool) -> dict[str, Any]:
    """Have replicas run on what was altered, until one of them has found it."""
    directory, expected = site.directory / "case", EXPECTED[row.id]
    patience_s = (FOUND_S if expected.is_seen else PATIENCE_S) * (10 if own_periods else 1)
    try:
        case = Case(site, directory, row.on, row.notes)
        with nullcontext() if own_periods else short_periods():
            if row.leads:
                seen = uvloop.run(live_under_a_leader(case, row.do, patience_s=patience_s))
            else:
                row.do(case)
                seen = uvloop.run(live(case, patience_s=patience_s))
    finally:
        shutil.rmtree(directory)
    if seen is None:
        return {"found_by": [], "said": {}, "as_expected": not expected.is_seen}
    return {
        "found_by": [seen.finder],
        "said": {seen.finder: seen.sentence},
        "then": seen.then,
        "stopped": seen.stopped,
        "as_expected": seen.finder in expected.finders,
        "seconds": round(seen.seconds, 2),
    }


def _line(row: Manipulation, how: str, found: dict[str, Any]) -> str:
    by = ",".join(found["found_by"]) or "unseen"
    odd = "" if found["as_expected"] else "  NOT AS EXPECTED"
    seconds = f"{found['seconds']:.1f} s" if "seconds" in found else ""
    return f"{row.id:4} {how:8} {row.what[:58]:58} {by:32} {seconds:>7}  {found.get('then', '')}{odd}"


def main() -> int:
    """Try what is named; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.manipulations", description=__doc__.split("\n")[0])
    parser.add_argument("ids", nargs="*", metavar="ID", help="of the table, A1 to J4 (default: all)")
    parser.add_argument("--size", choices=SIZES, default="small", help="full: replicas run on each, too")
    parser.add_argument("--own-periods", action="store_true", help="they look as often as in production (some hours)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parser.parse_args()
    if unknown := set(options.ids) - set(EXPECTED):
        parser.error(f"there is no manipulation {min(unknown)!r}: they are A1 to J4")
    end_on_signals()
    logging.disable(logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(prefix="forebay-manipulations-"))
    found: dict[str, dict[str, Any]] = {}
    try:
        site = found_site(directory)
        for row in ROWS:
            if options.ids and row.id not in options.ids:
                continue
            ways = [] if row.leads else [("stopped", lambda row=row: tried(site, row))]
            if options.size == "full" or row.leads:
                ways.append(("running", lambda row=row: run(site, row, own_periods=options.own_periods)))
            for how, way in ways:
                found.setdefault(row.id, {"what": row.what})[how] = one = way()
                print(_line(row, how, one), file=sys.stderr if options.json else sys.stdout, flush=True)
    finally:
        shutil.rmtree(directory)
    each = [one for ways in found.values() for one in ways.values() if isinstance(one, dict)]
    odd = sum(not one["as_expected"] for one in each)
    unseen = sum(not one["found_by"] for one in each)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{len(found)} manipulations; {unseen} times nobody found anything; {odd} times not as expected")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
