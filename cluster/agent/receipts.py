"""The receipt lines that an agent keeps on its disk, and a mover in its place: found, proven by their digest, and
compared with what storage has now."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

from cluster.agent.files import BUFFERS, PERSISTENT, RECEIPTS, PathRefused, Target, inside_target, places, variable_of
from cluster.agent.transfer import (
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
from replica.model import PERSISTENT_PREFIX, persistent_variable

ALGORITHMS: Final = ("xxh3-128", "blake3")

_NAME: Final = re.compile(rf"([0-9]{{1,19}})\.([0-9]{{1,19}})\.({'|'.join(STAGES)})", re.ASCII)


class Source(NamedTuple):
    """Where receipts of a job are kept, and what the paths in them begin with."""

    directory: Path
    """What their directory is in."""
    buffer: Path
    persistent: Callable[[str], str]
    """The directory of the persistent buffer that a variable points to; PathRefused."""


class Kept(NamedTuple):
    """One file of receipts."""

    job: int
    attempt: int
    stage: str
    source: Source


def on_node(home: Path, job: int) -> list[Source]:
    """Return where the agent of a directory keeps the receipts of a job."""

    def persistent(variable: str) -> str:
        return _only_one(variable, ((path.name, path) for path in (home / PERSISTENT).glob("*")), home / PERSISTENT)

    return [Source(home, home / BUFFERS / str(job), persistent)]


def in_place(path: Path, cluster: str, job: int) -> list[Source]:
    """Return where movers keep the receipts of a job in the place at a path. PlaceRefused, OSError."""
    buffers = path / cluster

    def persistent(variable: str) -> str:
        # NAME.JOB.EPOCH
        return _only_one(variable, ((path.name.rsplit(".", 2)[0], path) for path in buffers.glob("*")), buffers)

    found = places.records_of(str(path), cluster, job)
    return [Source(Path(found[epoch]), buffers / f"{job}.{epoch}", persistent) for epoch in sorted(found)]


def _only_one(variable: str, named: Iterable[tuple[str, Path]], directory: Path) -> str:
    """Return the only persistent buffer that a variable may point to; PathRefused if there are none or several."""
    found = [path for name, path in named if persistent_variable(name) == variable]
    if len(found) != 1:
        raise PathRefused(f"{directory} has {len(found)} persistent buffers for ${variable}, not one")
    return str(found[0])


def kept(sources: Sequence[Source], job: int) -> list[Kept]:
    """Return the receipts that are kept of a job there, oldest first. OSError."""
    found: list[Kept] = []
    for source in sources:
        with contextlib.suppress(FileNotFoundError):
            matches = (_NAME.fullmatch(name) for name in os.listdir(source.directory / RECEIPTS))
            found += [Kept(int(match[1]), int(match[2]), match[3], source) for match in matches if match is not None]
    return sorted((one for one in found if one.job == job), key=lambda one: one[:3])


@contextlib.contextmanager
def opened(which: Kept) -> Iterator[int]:
    """Give the open file. OSError."""
    with closing(open_directory(which.source.directory / RECEIPTS)) as receipts:
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
    which: Kept, descriptor: int, algorithm: Algorithm, advanced: Callable[[int, int], None]
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
        items = [_item(which, place, anchors, held) for place in paths]
        yield from recheck(descriptor, items, algorithm, advanced)


def _item(which: Kept, place: Place, anchors: dict[str, Target], held: contextlib.ExitStack) -> Item:
    anchor = anchors.get(place.root)
    if anchor is None:
        anchor = anchors[place.root] = _anchor(which, place.root)
        held.callback(os.close, anchor.anchor)
    parts = tuple(os.fsdecode(part) for part in bytes.fromhex(place.path_hex).split(b"/") if part)
    target = anchor._replace(parts=(*anchor.parts, *parts))
    return Item(Kind(place.kind), target, target)


def _anchor(which: Kept, root: str) -> Target:
    if not root.startswith("$"):
        try:
            # As when it was moved there: the root itself is the administrator's word.
            return Target(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), root, ())
        except OSError as error:
            raise PathRefused(f"the destination {root} cannot be opened on this node: {error.strerror}") from error
    variable, source = variable_of(root), which.source
    is_persistent = variable.startswith(PERSISTENT_PREFIX)
    lakes = {variable: source.persistent(variable)} if is_persistent else {}
    try:
        buffer = open_directory("/") if is_persistent else open_directory(source.buffer)
    except OSError as error:
        raise PathRefused(f"the buffer of job {which.job} is not on this node: {error.strerror}") from error
    with closing(buffer):
        return inside_target(buffer, root, lakes)
