"""Fault injection into the data mover, which may move the only copy of a file.

Each attack is done to the mover that the agents use, and before that to a reference mover that protects nothing
(reference.py), its negative control: an attack that does not catch that one fails too.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults import faults, kernel
from tests.faults.disks import PACKAGES, TOOLS, probe
from tests.faults.transfers import (
    agents,
    bits,
    disks,
    endings,
    kills,
    late,
    links,
    moves,
    paths,
    refusals,
    resume,
    sources,
    trees,
)  # fmt: skip
from tests.faults.transfers.harness import Broken, Inconclusive

ROUND = "tiny", "small", "full"

MEMORY = Path("/dev/shm")
"""Where it works if nobody says where, if it is there: attacks are many, and a disk would be waited for."""


class Attack(NamedTuple):
    """One way to attack a mover: a function of a directory, a size and a seed that raises Broken."""

    what: str
    run: Callable[..., dict[str, Any]]
    sizes: tuple[Any, Any, Any]
    reference: Any
    """The size at which the reference mover is caught; None: there is nothing that a reference mover would do wrong."""
    mounts: bool = False


ATTACKS = {
    "kills": Attack(
        "killed at every write, sync and rename",
        kills.kills,
        (kills.TINY, kills.SMALL, kills.FULL),
        kills.REFERENCE,
    ),
    "calls": Attack(
        "killed at every call whatsoever",
        kills.calls,
        (kills.TINY, kills.SMALL, kills.FULL),
        kills.REFERENCE,
    ),
    "programs": Attack(
        "killed at every write, sync and rename of rsync and rclone",
        kills.programs,
        (
            kills.TINY._replace(programs=("rsync",)),
            kills.SMALL._replace(stride=150),
            kills.FULL._replace(stride=20),
        ),
        kills.REFERENCE,
    ),
    "cuts": Attack(
        "the power goes at every write, sync and rename, and after the end",
        kills.cuts,
        (
            kills.SMALL._replace(power_stride=100, power_kinds=("ext4",)),
            kills.SMALL._replace(power_stride=30),
            kills.FULL,
        ),
        kills.REFERENCE,
        mounts=True,
    ),
    "links": Attack(
        "names are swapped for links while they are walked",
        links.links,
        (links.TINY, links.SMALL, links.FULL),
        links.REFERENCE,
    ),
    "paths": Attack(
        "paths that a job may write down",
        paths.paths,
        (paths.TINY, paths.SMALL, paths.FULL),
        paths.FULL,
    ),
    "bits": Attack(
        "bits flip in flight, on the way back and at rest",
        bits.bits,
        (bits.TINY, bits.SMALL, bits.FULL),
        bits.TINY,
    ),
    "refusals": Attack(
        "the kernel refuses a call, once or from then on",
        refusals.refusals,
        (refusals.TINY, refusals.SMALL, refusals.FULL),
        refusals.TINY,
    ),
    "late": Attack(
        "an older attempt of another agent goes on when the newer one has ended",
        late.late,
        (late.TINY, late.SMALL, late.FULL),
        late.SMALL,
    ),
    "endings": Attack(
        "cancelled, left by its agent, stopped, stalled and cut down at any call",
        endings.endings,
        (endings.TINY, endings.SMALL, endings.FULL),
        endings.REFERENCE,
    ),
    "agents": Attack(
        "the agent itself is killed or told to end at any call, and starts again",
        agents.agents,
        (agents.TINY, agents.SMALL, agents.FULL),
        None,
    ),
    "disks": Attack(
        "disks are full, read-only, dead or gone, sources missing, unreadable or changing",
        disks.disks,
        (disks.TINY, disks.SMALL, disks.FULL),
        disks.SMALL,
        mounts=True,
    ),
    "sources": Attack(
        "file servers stop answering, and directories are gone while they are moved",
        sources.sources,
        (sources.TINY, sources.SMALL, sources.FULL),
        None,
        mounts=True,
    ),
    "moves": Attack(
        "sources are to go, and something happens",
        moves.moves,
        (moves.TINY, moves.SMALL, moves.FULL),
        moves.TINY,
    ),
    "trees": Attack(
        "names that are no text, 200 levels, a sparse terabyte, hard links, a million files",
        trees.trees,
        (trees.TINY, trees.SMALL, trees.FULL),
        trees.REFERENCE,
    ),
    "resume": Attack(
        "one large file is killed again and again, and goes on where it was",
        resume.resume,
        (resume.TINY, resume.SMALL, resume.FULL),
        resume.REFERENCE,
    ),
}


def attack(name: str, size: int, seed: int, directory: Path, *, control: bool) -> dict[str, Any]:
    """Do one attack to the reference mover and then to the real one; Broken if the one stands or the other falls."""
    chosen = ATTACKS[name]
    found: dict[str, Any] = {}
    for place in ("reference", "real"):
        (directory / place).mkdir(parents=True)
    if control and chosen.reference is not None:
        try:
            chosen.run(directory / "reference", chosen.reference, seed, reference=True)
        except Broken as error:
            print(f"{name}: the reference mover is caught: {error}", flush=True)
            found["reference"] = "caught"
        else:
            raise Inconclusive("its negative control was not caught: a reference mover stands it")
    return {**chosen.run(directory / "real", chosen.sizes[size], seed), **found}


def main() -> int:
    """Do the attacks that are named; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/transfers", description="Attacks on the data mover.")
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--size", choices=ROUND, default="small", help="how much of each is done (default: small)")
    parser.add_argument("--seed", type=int, default=None, help="of whatever is drawn (default: drawn)")
    parser.add_argument("--directory", type=Path, default=None, help="where to work (default: in memory)")
    parser.add_argument("--no-controls", action="store_true", help="leave out the negative controls")
    options = parser.parse_args()
    unknown = [name for name in options.attacks if name not in ATTACKS]
    if unknown:
        parser.error(f"there is no attack {unknown[0]!r}: it is one of {', '.join(ATTACKS)}")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    kernel.end_on_signals()
    where = options.directory or (MEMORY if os.access(MEMORY, os.W_OK) else None)
    directory = Path(tempfile.mkdtemp(prefix="forebay-transfers-", dir=where)).resolve()
    # Workers that became another user pass through it.
    directory.chmod(0o711)
    names = options.attacks or list(ATTACKS)
    summary: dict[str, Any] = {"seed": seed, "size": options.size, "violations": 0, "attacks": {}, "left_out": {}}
    interrupted = False
    began = time.monotonic()
    mounts = ""
    try:
        kernel.require_tools(faults.TOOLS)
        try:
            kernel.require_root("mount file systems of its own")
            kernel.require_tools({**PACKAGES["ext4"], **PACKAGES["xfs"], **TOOLS})
            kernel.enter_private_mounts()
            probe(directory, "ext4")
        except kernel.Unable as unable:
            mounts = str(unable)
        for name in names:
            if ATTACKS[name].mounts and mounts:
                print(f"{name}: left out: {mounts}", file=sys.stderr, flush=True)
                summary["left_out"][name] = mounts
                continue
            started = time.monotonic()
            print(f"{name}: {ATTACKS[name].what}", flush=True)
            try:
                found = attack(name, ROUND.index(options.size), seed, directory / name, control=not options.no_controls)
            except (Broken, Inconclusive) as error:
                summary["violations"] += 1
                found = {"broken": str(error)}
                print(f"{name}: BROKEN: {error}\n{name}: seed {seed}; files: {directory / name}", file=sys.stderr)
            found["seconds"] = round(time.monotonic() - started, 1)
            summary["attacks"][name] = found
            print(f"{name}: {json.dumps(found)}", flush=True)
    except kernel.Unable as unable:
        shutil.rmtree(directory)
        print(f"transfers: unable: {unable}", file=sys.stderr)
        return kernel.EXIT_UNABLE
    except KeyboardInterrupt:
        interrupted = True
        print("transfers: interrupted", file=sys.stderr)
    finally:
        if not summary["violations"] or interrupted:
            shutil.rmtree(directory, ignore_errors=True)
    summary["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(summary))
    if summary["left_out"] and not summary["attacks"]:
        return kernel.EXIT_UNABLE
    return 1 if summary["violations"] or interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
