"""Attacks on a real cluster, from outside: by users, by an operator, by a clock. Run by scripts/attacks.

Each of them once succeeded. The exit code is 0 only if all of them failed; the last line says in JSON what was tried.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from forebay.cluster.client import ApiError
from tests.faults import faults, kernel
from tests.faults.attacks import clocks, connections, jobs, journal, sites, users
from tests.faults.local_cluster import RunFailed

SIZES = "small", "full"

WORDS_MAX = 3
"""Last lines of each log that are repeated where an attack succeeded, count."""


class Attack(NamedTuple):
    """One way to attack: a coroutine of a cluster, as `site` makes it in a directory, and a size."""

    what: str
    run: Callable[[Any, int], Awaitable[dict[str, int]]]
    site: Callable[[Path], Any]
    sizes: tuple[int, int]
    needs_root: str = ""
    """Why it says nothing without root; empty: it does."""


ATTACKS = {
    "mail": Attack("mail addresses that are commands and files", users.mail, sites.replicas, (1, 50)),
    "ids": Attack("ids of commands from another time, of a user and of an agent", users.ids, sites.replicas, (5, 500)),
    "bodies": Attack("bodies that trickle in or are cut off", connections.bodies, sites.replicas, (20, 500)),
    "heads": Attack("malformed request heads", connections.heads, sites.replicas, (20, 2_000)),
    "certificates": Attack(
        "certificates that expired or were revoked: on open connections, by tickets, anew",
        connections.certificates, sites.replicas, (1, 10),
    ),
    "streams": Attack(
        "four streams of all history at a time, in a storm of clients", connections.streams, sites.replicas,
        (12_000, 200_000),
    ),
    "journal": Attack("journals filled with one user's updates", journal.journal, sites.small_journals, (5, 200)),
    "clocks": Attack("a leader's wall clock, an hour ahead and half a minute behind", clocks.clocks, clocks.settable,
                     (1, 10)),
    "keys": Attack(
        "a job that tries all that is not its user's, in a newly founded cluster", jobs.keys, sites.whole,
        (1, 5), "without root jobs run as the account of the cluster, which init says",
    ),
    "capacity": Attack("jobs that write more than their buffers may hold", jobs.capacity, sites.whole, (2, 40)),
    "watch": Attack(
        "many files in one buffer, while another job writes over its capacity", jobs.watch, sites.whole,
        (20_000, 400_000),
    ),
    "names": Attack("a buffer that was cleared, made again by its name", jobs.names, sites.whole, (1, 10)),
    "results": Attack("results with links that lead out, and modes that hide and change", jobs.results, sites.whole,
                      (1, 20)),
    "programs": Attack(
        "an operator who names the text of a user's job as the site's programs", jobs.programs, sites.whole, (1, 5),
    ),
}  # fmt: skip
"""In this order; those in a row that have the same kind of cluster share one."""


async def attack(name: str, site: Any, size: int) -> dict[str, Any]:
    """Do one attack; return what it did, with `succeeded` where it did."""
    began_s = time.monotonic()
    try:
        found: dict[str, Any] = dict(await ATTACKS[name].run(site, size))
    except (RunFailed, ApiError, TimeoutError, OSError) as error:
        found = {"succeeded": str(error) or type(error).__name__}
        print(f"{name}: SUCCEEDED: {found['succeeded']}", file=sys.stderr)
        for log in sorted((site.directory / "logs").glob("*.log")):
            for line in log.read_text(errors="replace").splitlines()[-WORDS_MAX:]:
                print(f"{name}: {log.name}: {line}", file=sys.stderr)
    found["seconds"] = round(time.monotonic() - began_s, 1)
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


async def attacks_on(site: Any, names: list[str], size: int) -> dict[str, dict[str, Any]]:
    """Do attacks on one cluster, one after the other."""
    found = {}
    for name in names:
        print(f"{name}: {ATTACKS[name].what}", flush=True)
        found[name] = await attack(name, site, ATTACKS[name].sizes[size])
    return found


def main() -> int:
    """Do the attacks that are named; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/attacks", description="Attacks on a cluster from outside.")
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--size", choices=SIZES, default="small", help="how much of each is done (default: small)")
    options = parser.parse_args()
    unknown = [name for name in options.attacks if name not in ATTACKS]
    if unknown:
        parser.error(f"there is no attack {unknown[0]!r}: it is one of {', '.join(ATTACKS)}")
    kernel.end_on_signals()
    os.environ[jobs.SECRET_VARIABLE] = "secret"
    directory = Path(tempfile.mkdtemp(prefix="forebay-attacks-")).resolve()
    # Jobs of another user pass through it to their buffers.
    directory.chmod(0o711)
    summary: dict[str, Any] = {"size": options.size, "attacks": {}, "left_out": {}}
    for name, chosen in ATTACKS.items():
        if chosen.needs_root and not sites.IS_ROOT:
            summary["left_out"][name] = chosen.needs_root
    names = [name for name in ATTACKS if name in (options.attacks or ATTACKS) and name not in summary["left_out"]]
    interrupted, began_s = False, time.monotonic()
    try:
        for number, (found, group) in enumerate(itertools.groupby(names, lambda name: ATTACKS[name].site)):
            same = list(group)
            try:
                if "clocks" in same:
                    kernel.require_tools(faults.TOOLS)
                site = found(directory / str(number))
            except kernel.Unable as unable:
                summary["left_out"] |= dict.fromkeys(same, str(unable))
                continue
            try:
                summary["attacks"] |= asyncio.run(attacks_on(site, same, SIZES.index(options.size)))
            finally:
                site.stop_all()
    except KeyboardInterrupt:
        interrupted = True
        print("attacks: interrupted", file=sys.stderr)
    succeeded = [name for name, found in summary["attacks"].items() if "succeeded" in found]
    if succeeded and not interrupted:
        print(f"attacks: logs and data: {directory}", file=sys.stderr)
    else:
        shutil.rmtree(directory, ignore_errors=True)
    for name, why in summary["left_out"].items():
        print(f"{name}: left out: {why}", file=sys.stderr)
    summary |= {"succeeded": len(succeeded), "seconds": round(time.monotonic() - began_s, 1)}
    print(json.dumps(summary))
    if not summary["attacks"]:
        return kernel.EXIT_UNABLE
    return 1 if succeeded or interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
