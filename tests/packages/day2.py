"""Rows of "Day 2: what to type", typed at machines whose replicas and agent are systemd's: scripts/day2 --systemd.

Three machines have a replica each, the first one an agent and a gateway, too. At the fourth sits the operator; it is
the machine that may be added. Each is a Debian 12 in systemd-nspawn with the packages of this tree. A user submits jobs
all the time; after each row what was acknowledged is there, and a job that stages has its result.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.packages.build import build, committed_at
from tests.packages.campaign import NEEDED
from tests.packages.day2_rows import EXERCISES
from tests.packages.day2_site import DESK, PREFIX, UnitSite
from tests.packages.machine import Machine, StepFailed, debian
from tests.packages.network import NETWORK, ip, networks

EXIT_UNABLE: Final = 77
VERSIONS: Final = ("1.0.0~1", "1.0.0")
"""Installed at first, and upgraded to."""

FETCHED: Final = "python3"
"""What the packages depend on: it is in the machines from the beginning, since they reach no archive."""


class Unable(Exception):
    """These machines cannot be had here; the message says why."""


def base_of(tarball: Path, debs: Path, work: Path) -> Path:
    """Return a directory with a Debian in which the packages of the first version are installed; Unable."""
    try:
        if not tarball.exists():
            debian(tarball, FETCHED, "iproute2")
        machine = Machine(work / "base", tarball)
        shutil.copytree(debs, machine.root / "var/tmp/debs")
        machine.prepare("sh", "-ec", f"dpkg -i /var/tmp/debs/*_{VERSIONS[0]}_*.deb >/dev/null")
    except (StepFailed, subprocess.CalledProcessError) as error:
        raise Unable(f"no Debian 12 with the packages can be made: {error}") from error
    return machine.root


@contextlib.contextmanager
def booted(work: Path, base: Path) -> Iterator[dict[int, Machine]]:
    """Yield four machines that run, by number; Unable."""
    name = f"fb{os.getpid()}-"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(networks(name, DESK))
            machines = {number: Machine(work / f"m{number}", base) for number in range(1, DESK + 1)}
            for number, machine in machines.items():
                # Where a row moves a replica to; a route to all of them comes with it.
                ip("-n", f"{name}{number}", "address", "add", f"{PREFIX}.1.0.{number}/8", "dev", "host0")
                stack.enter_context(machine.booted(f"{name}{number}"))
        except (StepFailed, subprocess.CalledProcessError, FileNotFoundError) as error:
            raise Unable(f"systemd-nspawn does not boot here: {error}") from error
        yield machines
        for machine in machines.values():  # all at once; each is waited for where its block ends
            machine.run("systemctl", "--no-block", "poweroff")


def main() -> int:
    """Type the rows that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/day2 --systemd", description=__doc__.splitlines()[0])
    parser.add_argument("--systemd", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--row", action="append", choices=list(EXERCISES), help="only this one; may be repeated")
    parser.add_argument("--sample", type=int, metavar="N", help="as many rows, drawn by the seed")
    parser.add_argument("--seed", type=int, default=None, help="of the sample (default: drawn)")
    parser.add_argument("--base", type=Path, help="a tar of the bare Debian 12 of this script, made if missing")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    missing = [program for program in (*NEEDED, *NETWORK) if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        print(f"day2: skipped: {'missing: ' + ', '.join(missing) if missing else 'it needs root'}", file=sys.stderr)
        return EXIT_UNABLE
    wanted = [name for name in EXERCISES if name in (options.row or EXERCISES)]
    if options.sample is not None:
        drawn = random.Random(seed).sample(wanted, min(options.sample, len(wanted)))
        wanted = [name for name in wanted if name in drawn]
    work, done, failed = Path(tempfile.mkdtemp(prefix="forebay-units-")), dict[str, float](), ""
    began_s = time.monotonic()
    try:
        (work / "debs").mkdir()
        for version in VERSIONS if "upgrade" in wanted else VERSIONS[:1]:
            build(work / "debs", work / "tree", version=version, at=committed_at(), compression=("-Znone",))
        base = base_of((options.base or work / "base.tar").resolve(), work / "debs", work)
        with booted(work, base) as machines:
            site = UnitSite(machines, VERSIONS[1])
            site.found()
            print(f"{time.monotonic() - began_s:7.1f} s  three machines with packages and units run", flush=True)
            for name in wanted:
                row_s = time.monotonic()
                try:
                    with site.load():
                        said = EXERCISES[name](site)
                        site.whole()
                except (StepFailed, AssertionError):
                    print(site.journals(), file=sys.stderr)
                    raise
                done[name] = round(time.monotonic() - row_s, 1)
                print(f"{done[name]:7.1f} s  {name}: {said}; {site.settled}", flush=True)
    except Unable as error:
        print(f"day2: skipped: {error}", file=sys.stderr)
        return EXIT_UNABLE
    except (StepFailed, AssertionError) as error:
        failed = str(error)
        print(f"day2: FAILED: {error}\nday2: again with --seed {seed}", file=sys.stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    left = [name for name in wanted if name not in done]
    print(json.dumps({"rows": done, "left": left, "failed": int(bool(failed)), "seed": seed,
                      "seconds": round(time.monotonic() - began_s, 1)}))  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
