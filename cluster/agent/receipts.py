"""Receipt files of an agent or mover: find them, check their digest, and compare them with the files in storage.

An agent keeps them on its disk, a mover on the shared filesystem.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

from forebay.cluster.agent.files import (
    BUFFERS,
    PERSISTENT,
    RECEIPTS,
    PathRefused,
    Target,
    filesystems,
    inside_target,
    variable_of,
)
from forebay.cluster.agent.transfer import (
    STAGES,
    Algorithm,
    ItemKind,
    ReceiptDifference,
    ReceiptItem,
    TransferItem,
    hasher,
    raw_lines,
    read_places,
    recheck,
)
from forebay.cluster.system import closing, open_directory
from forebay.replica.model import PERSISTENT_PREFIX, persistent_variable

ALGORITHMS: Final = ("xxh3-128", "blake3")

_NAME: Final = re.compile(rf"([0-9]{{1,19}})\.([0-9]{{1,19}})\.({'|'.join(STAGES)})", re.ASCII)


class ReceiptSource(NamedTuple):
    """Location of a job's receipts, and the roots of the paths in them."""

    directory: Path
    """Parent of the receipts directory."""
    buffer: Path
    persistent: Callable[[str], str]
    """Return the directory of the persistent buffer for a variable, or raise PathRefused."""


class StoredReceipt(NamedTuple):
    """Stored receipt file."""

    job: int
    attempt: int
    stage: str
    source: ReceiptSource


def node_sources(home: Path, job: int) -> list[ReceiptSource]:
    """Return the location of a job's receipts in an agent's state directory."""

    def persistent(variable: str) -> str:
        return _only_one(variable, ((path.name, path) for path in (home / PERSISTENT).glob("*")), home / PERSISTENT)

    return [ReceiptSource(home, home / BUFFERS / str(job), persistent)]


def place_sources(path: Path, cluster: str, job: int) -> list[ReceiptSource]:
    """Return the locations of a job's receipts on the shared filesystem at `path`.

    Raises:
        FilesystemRefused: The path is not a marked shared filesystem.
        OSError: The path cannot be read.
    """
    buffers = path / cluster

    def persistent(variable: str) -> str:
        # Directory names are NAME.JOB.EPOCH.
        return _only_one(variable, ((path.name.rsplit(".", 2)[0], path) for path in buffers.glob("*")), buffers)

    found = filesystems.records_of(str(path), cluster, job)
    return [ReceiptSource(Path(found[epoch]), buffers / f"{job}.{epoch}", persistent) for epoch in sorted(found)]


def _only_one(variable: str, named: Iterable[tuple[str, Path]], directory: Path) -> str:
    """Return the only persistent buffer that a variable may refer to.

    Raises:
        PathRefused: None or several match.
    """
    found = [path for name, path in named if persistent_variable(name) == variable]
    if len(found) != 1:
        raise PathRefused(f"{directory} has {len(found)} persistent buffers for ${variable}; expected one")
    return str(found[0])


def list_receipts(sources: Sequence[ReceiptSource], job: int) -> list[StoredReceipt]:
    """Return the receipts of a job, oldest first.

    Raises:
        OSError: A directory cannot be read.
    """
    found: list[StoredReceipt] = []
    for source in sources:
        with contextlib.suppress(FileNotFoundError):
            matches = (_NAME.fullmatch(name) for name in os.listdir(source.directory / RECEIPTS))
            found += [
                StoredReceipt(int(match[1]), int(match[2]), match[3], source) for match in matches if match is not None
            ]
    return sorted((one for one in found if one.job == job), key=lambda one: one[:3])


@contextlib.contextmanager
def open_receipt(which: StoredReceipt) -> Iterator[int]:
    """Open a receipt file.

    Raises:
        OSError: The file cannot be read.
    """
    with closing(open_directory(which.source.directory / RECEIPTS)) as receipts:
        name = f"{which.job}.{which.attempt}.{which.stage}"
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=receipts)
    with closing(descriptor):
        yield descriptor


def algorithm_of(digest: str) -> Algorithm:
    """Return the algorithm of a digest such as `xxh3-128:0123…`.

    Raises:
        ValueError: `digest` has another form.
    """
    name, _, rest = digest.partition(":")
    if name not in ALGORITHMS or re.fullmatch(r"(?:[0-9a-f]{2}){16,32}", rest) is None:
        raise ValueError(f"{digest!r} is not a receipt digest; use {' or '.join(f'{one}:HEX' for one in ALGORITHMS)}")
    return cast(Algorithm, name)


def digest_of_lines(descriptor: int, algorithm: Algorithm) -> str:
    """Return the digest over the lines of an open file, in the form receipts use.

    Raises:
        OSError: The file cannot be read.
    """
    taken = hasher(algorithm)
    for _, line in raw_lines(descriptor):
        taken.update(line)
    return f"{algorithm}:{taken.digest().hex()}"


def differences(
    which: StoredReceipt, descriptor: int, algorithm: Algorithm, advanced: Callable[[int, int], None]
) -> Iterator[ReceiptDifference]:
    """Yield each destination file that differs from the open receipt file, reading from storage.

    Raises:
        ValueError: The receipts are damaged or lack the destinations.
        PathRefused: A destination cannot be opened.
        OSError: A file cannot be read.
    """
    paths = read_places(descriptor)
    if not paths:
        raise ValueError("the receipts lack the destinations: an earlier release wrote them")
    with contextlib.ExitStack() as held:
        anchors: dict[str, Target] = {}
        items = [_item(which, place, anchors, held) for place in paths]
        yield from recheck(descriptor, items, algorithm, advanced)


def _item(
    which: StoredReceipt, place: ReceiptItem, anchors: dict[str, Target], held: contextlib.ExitStack
) -> TransferItem:
    anchor = anchors.get(place.root)
    if anchor is None:
        anchor = anchors[place.root] = _anchor(which, place.root)
        held.callback(os.close, anchor.anchor)
    parts = tuple(os.fsdecode(part) for part in bytes.fromhex(place.path_hex).split(b"/") if part)
    target = anchor._replace(parts=(*anchor.parts, *parts))
    return TransferItem(ItemKind(place.kind), target, target)


def _anchor(which: StoredReceipt, root: str) -> Target:
    if not root.startswith("$"):
        try:
            # Follow links in the root itself, as the transfer did: the administrator configured it.
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
