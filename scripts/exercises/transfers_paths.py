"""Paths that a job may write down: whatever they are, nothing comes from outside the roots and nothing goes there."""

import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from exercises.transfers_loop import SECRET, contents, secret_in
from exercises.transfers_refusals import check_words
from exercises.transfers_rig import STAGES, Broken, Rig, said
from replica.messages.commands import OperationDone, OperationFailed
from replica.model.buffers import Transfer, TransferKind


class Size(NamedTuple):
    """How much is done."""

    paths: int


TINY = Size(paths=3)
SMALL = Size(paths=30)
FULL = Size(paths=500)

PARTS = (
    "..", ".", "", "a", "b", "tree", "file", "out", "in", "../outside", "../../outside/file", "link-out", "link-in",
    "link-up", "~", "$HOME", "${FOREBAY_JOB_DIR}", "%u", "*", "a\nb", "x" * 255, "x" * 256, ".forebay-alone-7",
    "node", "..\0", "...", " ", "-", "proc/self/cwd", "proc/self/root", "dev/stdin", "é",
)  # fmt: skip
HEADS = (
    "$DW_JOB_STRIPED",
    "${DW_JOB_STRIPED}",
    "$FOREBAY_JOB_DIR",
    "$DW_JOB_PRIVATE",
    "$HOME",
    "$",
    "${",
    "",
    "/",
    "..",
)


def set_up(rig: Rig) -> tuple[str, ...]:
    """Make what may be moved, what may not, and links between them; return the directories that nobody may change."""
    rig.clear()
    shutil.rmtree(rig.outside)
    (rig.outside / "tree").mkdir(parents=True)
    for path in (rig.outside / "file", rig.outside / "tree" / "file", rig.directory / "file"):
        path.write_bytes(SECRET)
    shutil.rmtree(rig.source)
    for base in (rig.source, rig.buffer):
        (base / "tree" / "a").mkdir(parents=True)
        (base / "a").mkdir()
        for name in ("file", "tree/file", "tree/a/file", "a/file", "é"):
            (base / name).write_bytes(b"harmless")
        (base / "link-out").symlink_to(rig.outside)
        (base / "a" / "link-out").symlink_to(rig.outside / "file")
        (base / "link-in").symlink_to(base / "a")
        (base / "link-up").symlink_to("..")
    (rig.destination / "link-out").symlink_to(rig.outside)
    (rig.destination / "a").mkdir()
    (rig.destination / "a" / "file").symlink_to(rig.outside / "file")
    return tuple(str(path) for path in (rig.outside, rig.outside / "tree"))


def draw(rig: Rig, chance: random.Random, stage: str) -> Transfer:
    """Draw a transfer of which neither end, one or both are what they should be."""
    root = rig.source if stage == "stage_in" else rig.destination
    outside_head = chance.choice(
        (str(root), str(root), f"{root}/../{root.name}", str(rig.outside), "/", "", f"/{root}")
    )
    tails = ["/".join(chance.choices(PARTS, k=chance.randrange(4))) for _ in range(2)]
    easy = chance.choice(("tree", "file", "a", "a/file"))
    outside = f"{outside_head}/{easy if stage == 'stage_in' and chance.random() < 0.3 else tails[0]}"
    inside_tail = easy if stage == "stage_out" and chance.random() < 0.3 else tails[1]
    inside = f"{chance.choice(HEADS[:3] if chance.random() < 0.8 else HEADS)}/{inside_tail}"
    return Transfer(chance.choice(list(TransferKind)), outside, inside)


def plain(rig: Rig, chance: random.Random, stage: str) -> Transfer:
    """Draw a transfer for a naive mover, which is kept inside the rig: it would do what the others say, anywhere."""
    root = rig.source if stage == "stage_in" else rig.destination
    outside = chance.choice((f"{root}/../outside/tree", f"{root}/link-out/tree", f"{root}/tree"))
    return Transfer(TransferKind.DIRECTORY, outside, "$DW_JOB_STRIPED/tree")


def paths(directory: Path, size: Size, seed: int, *, naive: bool = False) -> dict[str, Any]:
    """Try paths; Broken at the first that leads out."""
    rig = Rig(directory / "paths", naive=naive)
    chance = random.Random(seed)
    found = {"paths": 0, "done": 0, "refused": 0}
    try:
        for number in range(size.paths):
            stage = STAGES[number % 2]
            watched = set_up(rig)
            guarded = (contents(watched), sorted(os.listdir(rig.directory)))
            transfer = plain(rig, chance, stage) if naive else draw(rig, chance, stage)
            outcome = rig.operate(stage, [transfer])
            for place in (rig.buffer.parent, rig.destination):
                if leak := secret_in(str(place)):
                    raise Broken(f"{transfer}: {leak} holds what lies outside; it {said(outcome)}")
            if (contents(watched), sorted(os.listdir(rig.directory))) != guarded:
                raise Broken(f"{transfer}: something was written outside; it {said(outcome)}")
            if isinstance(outcome, OperationFailed) and not naive:
                check_words(outcome)
            found["paths"] += 1
            found["done" if isinstance(outcome, OperationDone) else "refused"] += 1
            if (number + 1) % 200 == 0:
                print(f"paths: {found}", file=sys.stderr, flush=True)
    finally:
        rig.close()
    return found
