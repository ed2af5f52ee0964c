"""How long writes stop when the leader is killed or hangs: Forebay beside etcd, at the same election settings.

The same rows as `scripts/bench --sections failover`, with a choice of timings and faults; how they are measured, and
what is done so that neither system is at an advantage, stands in tests/benchmarks/failover.py. All rows take about a
quarter of a minute for each of --count. The last line is JSON: the machine, and for each row p50, p99, maximum,
every single time, and their ratios to etcd's.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import machine, report
from tests.benchmarks.processes import ServerFailed

COUNT_MAX = 1000

SECONDS_EACH = {"0.15-0.3": 3.0, "1-2": 5.5}
"""What it takes to lose and replace the leaders of both systems once, with each timing, seconds: for the estimate."""


def arguments() -> argparse.Namespace:
    """Return the command line's options, checked."""
    parser = argparse.ArgumentParser(prog="scripts/failover", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=20, help="leaders lost per row (default: 20)")
    parser.add_argument("--timings", nargs="+", choices=("0.15-0.3", "1-2"), default=["0.15-0.3", "1-2"])
    parser.add_argument("--faults", nargs="+", choices=("kill", "hang"), default=["kill", "hang"])
    parser.add_argument("--only", choices=("forebay", "etcd"), help="measure one of the two alone")
    parser.add_argument("--directory", type=Path, help="where the data goes (default: a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line, which is always JSON")
    options = parser.parse_args()
    if not 1 <= options.count <= COUNT_MAX:
        parser.error(f"--count must be from 1 to {COUNT_MAX}")
    return options


def main() -> int:
    """Measure and print."""
    options = arguments()
    # SIGTERM ends the run as Ctrl-C does: the servers are ended and their data is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    try:
        with tempfile.TemporaryDirectory(prefix="forebay-failover-", dir=options.directory) as directory:
            place = Path(directory)
            facts = machine.facts(place)
            estimate_s = len(options.faults) * options.count * sum(SECONDS_EACH[one] for one in options.timings)
            say(f"{facts['cores']} cores, load {facts['load_before']}; this takes about {estimate_s / 60:.0f} minutes")
            systems = [options.only] if options.only else ["forebay", "etcd"]
            rows = report.failovers(systems, options.count, place, say, options.timings, options.faults)
    except (ServerFailed, RuntimeError) as error:
        print(f"failover: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("failover: interrupted", file=sys.stderr)
        return 1
    facts["load_after"] = round(os.getloadavg()[0], 2)
    print(json.dumps({"machine": facts, "failovers": rows}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
