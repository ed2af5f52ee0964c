"""Any path in a job's request: nothing is read or written outside the roots."""

import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.buffers import Transfer, TransferKind
from tests.faults.transfers.harness import STAGES, Broken, Harness, said
from tests.faults.transfers.loop import SECRET, contents, secret_in
from tests.faults.transfers.refusals import check_words


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


def set_up(harness: Harness) -> tuple[str, ...]:
    """Make what may be moved, what may not, and links between them; return the directories that nobody may change."""
    harness.clear()
    shutil.rmtree(harness.outside)
    (harness.outside / "tree").mkdir(parents=True)
    for path in (harness.outside / "file", harness.outside / "tree" / "file", harness.directory / "file"):
        path.write_bytes(SECRET)
    shutil.rmtree(harness.source)
    for base in (harness.source, harness.buffer):
        (base / "tree" / "a").mkdir(parents=True)
        (base / "a").mkdir()
        for name in ("file", "tree/file", "tree/a/file", "a/file", "é"):
            (base / name).write_bytes(b"harmless")
        (base / "link-out").symlink_to(harness.outside)
        (base / "a" / "link-out").symlink_to(harness.outside / "file")
        (base / "link-in").symlink_to(base / "a")
        (base / "link-up").symlink_to("..")
    (harness.destination / "link-out").symlink_to(harness.outside)
    (harness.destination / "a").mkdir()
    (harness.destination / "a" / "file").symlink_to(harness.outside / "file")
    return tuple(str(path) for path in (harness.outside, harness.outside / "tree"))


def draw(harness: Harness, chance: random.Random, stage: str) -> Transfer:
    """Draw a transfer of which neither end, one or both are what they should be."""
    root = harness.source if stage == "stage_in" else harness.destination
    outside_head = chance.choice(
        (str(root), str(root), f"{root}/../{root.name}", str(harness.outside), "/", "", f"/{root}")
    )
    tails = ["/".join(chance.choices(PARTS, k=chance.randrange(4))) for _ in range(2)]
    easy = chance.choice(("tree", "file", "a", "a/file"))
    outside = f"{outside_head}/{easy if stage == 'stage_in' and chance.random() < 0.3 else tails[0]}"
    inside_tail = easy if stage == "stage_out" and chance.random() < 0.3 else tails[1]
    inside = f"{chance.choice(HEADS[:3] if chance.random() < 0.8 else HEADS)}/{inside_tail}"
    return Transfer(chance.choice(list(TransferKind)), outside, inside)


def plain(harness: Harness, chance: random.Random, stage: str) -> Transfer:
    """Draw a transfer for the reference mover, which is kept inside the harness: it does as told, anywhere."""
    root = harness.source if stage == "stage_in" else harness.destination
    outside = chance.choice((f"{root}/../outside/tree", f"{root}/link-out/tree", f"{root}/tree"))
    return Transfer(TransferKind.DIRECTORY, outside, "$DW_JOB_STRIPED/tree")


def paths(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Try paths; Broken at the first that leads out."""
    harness = Harness(directory / "paths", reference=reference)
    chance = random.Random(seed)
    found = {"paths": 0, "done": 0, "rejected": 0}
    try:
        for number in range(size.paths):
            stage = STAGES[number % 2]
            watched = set_up(harness)
            guarded = (contents(watched), sorted(os.listdir(harness.directory)))
            transfer = plain(harness, chance, stage) if reference else draw(harness, chance, stage)
            outcome = harness.operate(stage, [transfer])
            for place in (harness.buffer.parent, harness.destination):
                if leak := secret_in(str(place)):
                    raise Broken(f"{transfer}: {leak} holds what lies outside; it {said(outcome)}")
            if (contents(watched), sorted(os.listdir(harness.directory))) != guarded:
                raise Broken(f"{transfer}: something was written outside; it {said(outcome)}")
            if isinstance(outcome, OperationFailed) and not reference:
                check_words(outcome)
            found["paths"] += 1
            found["done" if isinstance(outcome, OperationDone) else "rejected"] += 1
            if (number + 1) % 200 == 0:
                print(f"paths: {found}", file=sys.stderr, flush=True)
    finally:
        harness.close()
    return found
