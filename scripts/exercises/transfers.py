"""Attacks on the data mover: everything that can go wrong while the only copy of something is moved. Run by
scripts/transfers.

Each attack is done to the mover that the agents use, and before that to a naive one (transfers_naive.py), which it must
catch: an attack without teeth fails too.
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

from exercises import (
    disks,
    faults,
    kernel,
    transfers_agents,
    transfers_bits,
    transfers_disks,
    transfers_endings,
    transfers_kills,
    transfers_late,
    transfers_links,
    transfers_moves,
    transfers_paths,
    transfers_refusals,
    transfers_resume,
    transfers_sources,
    transfers_trees,
)
from exercises.transfers_rig import Broken, Unfit

ROUND = "tiny", "small", "full"

MEMORY = Path("/dev/shm")
"""Where it works if nobody says where, if it is there: attacks are many, and a disk would be waited for."""


class Attack(NamedTuple):
    """One way to attack a mover: a function of a directory, a size and a seed that raises Broken."""

    what: str
    run: Callable[..., dict[str, Any]]
    sizes: tuple[Any, Any, Any]
    naive: Any
    """The size at which the naive mover is caught; None: there is nothing that a naive mover would do wrong."""
    mounts: bool = False


ATTACKS = {
    "kills": Attack(
        "killed at every write, sync and rename",
        transfers_kills.kills,
        (transfers_kills.TINY, transfers_kills.SMALL, transfers_kills.FULL),
        transfers_kills.NAIVE,
    ),
    "calls": Attack(
        "killed at every call whatsoever",
        transfers_kills.calls,
        (transfers_kills.TINY, transfers_kills.SMALL, transfers_kills.FULL),
        transfers_kills.NAIVE,
    ),
    "programs": Attack(
        "killed at every write, sync and rename of rsync and rclone",
        transfers_kills.programs,
        (
            transfers_kills.TINY._replace(programs=("rsync",)),
            transfers_kills.SMALL._replace(stride=150),
            transfers_kills.FULL._replace(stride=20),
        ),
        transfers_kills.NAIVE,
    ),
    "cuts": Attack(
        "the power goes at every write, sync and rename, and after the end",
        transfers_kills.cuts,
        (
            transfers_kills.SMALL._replace(power_stride=100, power_kinds=("ext4",)),
            transfers_kills.SMALL._replace(power_stride=30),
            transfers_kills.FULL,
        ),
        transfers_kills.NAIVE,
        mounts=True,
    ),
    "links": Attack(
        "names are swapped for links while they are walked",
        transfers_links.links,
        (transfers_links.TINY, transfers_links.SMALL, transfers_links.FULL),
        transfers_links.NAIVE,
    ),
    "paths": Attack(
        "paths that a job may write down",
        transfers_paths.paths,
        (transfers_paths.TINY, transfers_paths.SMALL, transfers_paths.FULL),
        transfers_paths.FULL,
    ),
    "bits": Attack(
        "bits flip in flight, on the way back and at rest",
        transfers_bits.bits,
        (transfers_bits.TINY, transfers_bits.SMALL, transfers_bits.FULL),
        transfers_bits.TINY,
    ),
    "refusals": Attack(
        "the kernel refuses a call, once or from then on",
        transfers_refusals.refusals,
        (transfers_refusals.TINY, transfers_refusals.SMALL, transfers_refusals.FULL),
        transfers_refusals.TINY,
    ),
    "late": Attack(
        "an older attempt of another agent goes on when the newer one has ended",
        transfers_late.late,
        (transfers_late.TINY, transfers_late.SMALL, transfers_late.FULL),
        transfers_late.SMALL,
    ),
    "endings": Attack(
        "cancelled, left by its agent, stopped, stalled and cut down at any call",
        transfers_endings.endings,
        (transfers_endings.TINY, transfers_endings.SMALL, transfers_endings.FULL),
        transfers_endings.NAIVE,
    ),
    "agents": Attack(
        "the agent itself is killed or told to end at any call, and starts again",
        transfers_agents.agents,
        (transfers_agents.TINY, transfers_agents.SMALL, transfers_agents.FULL),
        None,
    ),
    "disks": Attack(
        "disks are full, read-only, dead or gone, sources missing, unreadable or changing",
        transfers_disks.disks,
        (transfers_disks.TINY, transfers_disks.SMALL, transfers_disks.FULL),
        transfers_disks.SMALL,
        mounts=True,
    ),
    "sources": Attack(
        "file servers stop answering, and directories are gone while they are moved",
        transfers_sources.sources,
        (transfers_sources.TINY, transfers_sources.SMALL, transfers_sources.FULL),
        None,
        mounts=True,
    ),
    "moves": Attack(
        "sources are to go, and something happens",
        transfers_moves.moves,
        (transfers_moves.TINY, transfers_moves.SMALL, transfers_moves.FULL),
        transfers_moves.TINY,
    ),
    "trees": Attack(
        "names that are no text, 200 levels, a sparse terabyte, hard links, a million files",
        transfers_trees.trees,
        (transfers_trees.TINY, transfers_trees.SMALL, transfers_trees.FULL),
        transfers_trees.NAIVE,
    ),
    "resume": Attack(
        "one large file is killed again and again, and goes on where it was",
        transfers_resume.resume,
        (transfers_resume.TINY, transfers_resume.SMALL, transfers_resume.FULL),
        transfers_resume.NAIVE,
    ),
}


def attack(name: str, size: int, seed: int, directory: Path, *, teeth: bool) -> dict[str, Any]:
    """Do one attack to the naive mover and then to the real one; Broken if the one stands or the other falls."""
    chosen = ATTACKS[name]
    found: dict[str, Any] = {}
    for place in ("naive", "real"):
        (directory / place).mkdir(parents=True)
    if teeth and chosen.naive is not None:
        try:
            chosen.run(directory / "naive", chosen.naive, seed, naive=True)
        except Broken as error:
            print(f"{name}: the naive mover is caught: {error}", flush=True)
            found["naive"] = "caught"
        else:
            raise Unfit("it has no teeth: a naive mover stands it")
    return {**chosen.run(directory / "real", chosen.sizes[size], seed), **found}


def main() -> int:
    """Do the attacks that are named; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/transfers", description="Attacks on the data mover.")
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--size", choices=ROUND, default="small", help="how much of each is done (default: small)")
    parser.add_argument("--seed", type=int, default=None, help="of whatever is drawn (default: drawn)")
    parser.add_argument("--directory", type=Path, default=None, help="where to work (default: in memory)")
    parser.add_argument("--no-teeth", action="store_true", help="leave the naive mover in peace")
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
            kernel.require_tools({**disks.PACKAGES["ext4"], **disks.PACKAGES["xfs"], **disks.TOOLS})
            kernel.enter_private_mounts()
            disks.probe(directory, "ext4")
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
                found = attack(name, ROUND.index(options.size), seed, directory / name, teeth=not options.no_teeth)
            except (Broken, Unfit) as error:
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
