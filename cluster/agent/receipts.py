"""The receipt lines that an agent keeps on its disk: found, proven by their digest, and compared with what storage has
now."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, cast

from cluster.agent.files import BUFFERS, PathRefused, Target, inside_target
from cluster.agent.processes import persistent_variables
from cluster.agent.transfer import (
    RECEIPTS,
    STAGES,
    Algorithm,
    Difference,
    Item,
    Kind,
    Place,
    hasher,
    raw_lines,
    read_places,
    recheck,
)
from cluster.system import closing, open_directory

ALGORITHMS: Final = ("xxh3-128", "blake3")

_NAME: Final = re.compile(rf"([0-9]{{1,19}})\.([0-9]{{1,19}})\.({'|'.join(STAGES)})", re.ASCII)
_PERSISTENT: Final = re.compile(r"\$\{?DW_PERSISTENT_STRIPED_([^/}]+)\}?")


class Kept(NamedTuple):
    """One file of receipts."""

    job: int
    attempt: int
    stage: str


def kept(home: Path, job: int) -> list[Kept]:
    """Return the receipts that the agent of a directory keeps of a job, oldest first. OSError."""
    try:
        names = os.listdir(home / RECEIPTS)
    except FileNotFoundError:
        return []
    matches = (_NAME.fullmatch(name) for name in names)
    found = [Kept(int(match[1]), int(match[2]), match[3]) for match in matches if match is not None]
    return sorted(one for one in found if one.job == job)


@contextlib.contextmanager
def opened(home: Path, which: Kept) -> Iterator[int]:
    """Give the open file. OSError."""
    with closing(open_directory(home / RECEIPTS)) as receipts:
        name = f"{which.job}.{which.attempt}.{which.stage}"
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=receipts)
    with closing(descriptor):
        yield descriptor


def algorithm_of(digest: str) -> Algorithm:
    """Return the algorithm of a digest such as `xxh3-128:0123…`. ValueError if it is none."""
    name, _, rest = digest.partition(":")
    if name not in ALGORITHMS or re.fullmatch(r"(?:[0-9a-f]{2}){16,32}", rest) is None:
        raise ValueError(
            f"{digest!r} is no digest of receipts; write {' or '.join(f'{one}:HEX' for one in ALGORITHMS)}"
        )
    return cast(Algorithm, name)


def digest_of_lines(descriptor: int, algorithm: Algorithm) -> str:
    """Return the digest over the lines of an open file, as receipts have it. OSError."""
    taken = hasher(algorithm)
    for _, line in raw_lines(descriptor):
        taken.update(line)
    return f"{algorithm}:{taken.digest().hex()}"


def differences(
    home: Path, which: Kept, descriptor: int, algorithm: Algorithm, advanced: Callable[[int, int], None]
) -> Iterator[Difference]:
    """Yield each file that is not at its destination as the open file of receipts says, read from storage.

    ValueError if the receipts are damaged or do not say where the files went, PathRefused if a destination cannot be
    opened, OSError.
    """
    paths = read_places(descriptor)
    if not paths:
        raise ValueError("the receipts do not say where the files went: an earlier release wrote them")
    with contextlib.ExitStack() as held:
        anchors: dict[str, Target] = {}
        items = [_item(home, which.job, place, anchors, held) for place in paths]
        yield from recheck(descriptor, items, algorithm, advanced)


def _item(home: Path, job: int, place: Place, anchors: dict[str, Target], held: contextlib.ExitStack) -> Item:
    anchor = anchors.get(place.root)
    if anchor is None:
        anchor = anchors[place.root] = _anchor(home, job, place.root)
        held.callback(os.close, anchor.anchor)
    parts = tuple(os.fsdecode(part) for part in bytes.fromhex(place.path_hex).split(b"/") if part)
    target = anchor._replace(parts=(*anchor.parts, *parts))
    return Item(Kind(place.kind), target, target)


def _anchor(home: Path, job: int, root: str) -> Target:
    if not root.startswith("$"):
        try:
            # As when it was moved there: the root itself is the administrator's word.
            return Target(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), root, ())
        except OSError as error:
            raise PathRefused(f"the destination {root} cannot be opened on this node: {error.strerror}") from error
    match = _PERSISTENT.fullmatch(root)
    lakes = persistent_variables(str(home), () if match is None else (match[1],))
    try:
        buffer = open_directory(home / BUFFERS / str(job)) if match is None else open_directory("/")
    except OSError as error:
        raise PathRefused(f"the buffer of job {job} is not on this node: {error.strerror}") from error
    with closing(buffer):
        return inside_target(buffer, root, lakes)
