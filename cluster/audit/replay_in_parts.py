"""A replay in parts, each folded by a process of its own, which begins with a state that the replica keeps.

A state is believed once the part before it has led to it: digests of state and ledger are compared at each seam, so the
whole is proven as if it had been folded in one. Whatever is not as it must be, in a part or at a seam, is looked for
again by a replay in one, and that one's word counts.

`python -m cluster.audit.replay_in_parts PARENT DIRECTORY LAST [STATE]` is the process of a part: JSON lines to standard
output, of how far it is and at last what it came to.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from cluster.audit.deep import snapshots_in
from cluster.audit.replay import (
    READ_ENTRIES,
    EntryCounts,
    Progress,
    ReplayFailed,
    ReplayFold,
    ReplayRefused,
    finish_replay,
    fold,
    from_image,
    from_nothing,
    replay,
)
from cluster.system import collect_for_a_reader, die_with_parent
from replica.messages import ReleaseNeeded
from replica.state import StateDiffers
from snapshots import SnapshotRefused, load_snapshot
from wal import Environment, Ledger, LedgerBroken, StorageFailed

PART_COMMANDS: Final = 50_000
"""Commands that are worth a process, count: a second of folding."""

PARTS_MAX: Final = 64

STEP_ENTRIES: Final = 8_192
"""Entries between two lines that a part writes, count."""

BEHIND_ENTRIES: Final = 16_384
"""Entries behind a part in which the digest of one of its states is looked for, count."""

BESIDE: Final = 10
"""How much nicer than its parent the process of a part is."""

FAILURES: Final = (
    SnapshotRefused,
    ReplayFailed,
    ReplayRefused,
    StateDiffers,
    LedgerBroken,
    StorageFailed,
    ReleaseNeeded,
    OSError,
)
"""How a part can fail."""


class StateFile(NamedTuple):
    """A state that the replica keeps in a file: of entry `index`, after `revision`."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    revision: int
    path: Path


class _PartFailed(Exception):
    """A part did not come to its end, or not to what the next one begins with."""


def states_beside(directory: Path) -> list[tuple[int, Path]]:
    """Return the states kept beside a ledger's directory, with the entries they are of; OSError."""
    home = directory.parent
    return snapshots_in(home / "index" / "states") + snapshots_in(home / "snapshots")


def seams(ledger: Ledger, states: Sequence[tuple[int, Path]], *, first: int, last: int, parts: int) -> list[StateFile]:
    """Return the states at which a fold of the revisions `first` to `last` is cut into so many parts at most, in their
    order: those nearest to parts of one size, and none that would make a part too small to be worth a process.
    """
    known: dict[int, StateFile] = {}
    for index, path in states:
        try:
            revision = ledger.row_at(index).revision if 0 < index <= ledger.applied_index else 0
        except LedgerBroken:
            continue
        if first + PART_COMMANDS <= revision <= last - PART_COMMANDS:
            known[revision] = StateFile(index, revision, path)
    parts = min(parts, PARTS_MAX, (last - first) // PART_COMMANDS)
    found: list[StateFile] = []
    for number in range(1, parts):
        wanted = first + (last - first) * number // parts
        nearest = min(known, key=lambda revision: abs(revision - wanted), default=None)
        if nearest is not None and (not found or nearest - found[-1].revision >= PART_COMMANDS):
            found.append(known[nearest])
    return found


def replay_in_parts(
    ledger: Ledger,
    directory: Path,
    *,
    start: Path | None = None,
    at_revision: int | None = None,
    processes: int,
    progress: Progress | None = None,
    doubt: Callable[[str], None],
) -> ReplayFold:
    """Do what `replay` does of the ledger in a directory, in so many processes at most; `start`: a snapshot's file.

    `doubt` is called with why it is folded again in one. Raises what `replay` raises, and SnapshotRefused.
    """
    ledger = ledger.as_of_now()
    image = None if start is None else load_snapshot(start)
    first = 0 if image is None else image.state.revision
    last = ledger.applied_revision if at_revision is None else at_revision
    cuts = [] if ledger.gaps() else seams(ledger, states_beside(directory), first=first, last=last, parts=processes)
    if cuts:
        try:
            return _in_parts(ledger, directory, start, cuts, at_revision, progress)
        except (_PartFailed, *FAILURES) as error:
            doubt(str(error))
    return replay(ledger, start=image, at_revision=at_revision, progress=progress)


def _in_parts(
    ledger: Ledger,
    directory: Path,
    start: Path | None,
    cuts: Sequence[StateFile],
    at_revision: int | None,
    progress: Progress | None,
) -> ReplayFold:
    """Fold the last part here and the others in processes; raises _PartFailed, and what `replay` raises."""
    begins = [start, *(cut.path for cut in cuts[:-1])]
    with _started(directory, [(begin, cut.index) for begin, cut in zip(begins, cuts, strict=True)]) as parts:
        shown = None if progress is None else _Shown(progress, parts, cuts[-1].index)
        replaying = from_image(ledger, load_snapshot(cuts[-1].path), at_revision)
        own = _stand(replaying)
        fold(ledger, replaying, ledger.applied_index, shown)
        ends = [part.wait(shown) for part in parts]
        for cut, end, following in zip(cuts, ends, [*(end["begin"] for end in ends[1:]), own], strict=True):
            if end["end"] != following:
                raise _PartFailed(f"the state in {cut.path} is not what the ledger comes to")
        for end in ends:
            replaying.add(EntryCounts(**end["counts"]))
        return finish_replay(ledger, replaying)


class _Part:
    """A part that is folded by a process of its own."""

    def __init__(self, directory: Path, begin: Path | None, last: int) -> None:
        words = [str(os.getpid()), str(directory), str(last), *([] if begin is None else [str(begin)])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.folded = 0
        """Entries, so far."""
        self._said: dict[str, Any] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                said = json.loads(line)
                self.folded = said["folded"]
                self._said = said if "end" in said else None

    def wait(self, shown: "_Shown | None") -> dict[str, Any]:
        """Return what it came to; _PartFailed."""
        while self._reader.is_alive():
            self._reader.join(0.2)
            if shown is not None:
                shown.show()
        if self._process.wait() or self._said is None:
            raise _PartFailed(f"the process of a part ended with status {self._process.returncode}")
        return self._said

    def end(self) -> None:
        """End the process, if it has not come to its end by itself."""
        self._process.kill()
        self._process.wait()
        self._reader.join()


@contextmanager
def _started(directory: Path, spans: Sequence[tuple[Path | None, int]]) -> Iterator[list[_Part]]:
    """The processes of parts, which end with the block at the latest."""
    parts: list[_Part] = []
    try:
        for begin, last in spans:
            parts.append(_Part(directory, begin, last))
        yield parts
    finally:
        for part in parts:
            part.end()


class _Shown:
    """The progress of all parts together."""

    def __init__(self, progress: Progress, parts: Sequence[_Part], before: int) -> None:
        """`before`: the entry before the part that is folded here."""
        self._progress, self._parts, self._before = progress, parts, before
        self._here, self._last = 0, 0

    def __call__(self, index: int, last: int) -> None:
        """Show that the part here has come to an entry."""
        self._here, self._last = index - self._before, last
        self.show()

    def show(self) -> None:
        """Show how far all are."""
        self._progress(self._here + sum(part.folded for part in self._parts), self._last)


def _stand(replaying: ReplayFold) -> list[str | int]:
    """Return what two parts must agree on where they meet: entry, digest of the ledger, digest of the state."""
    return [replaying.last_index, replaying.ledger_digest.hex(), replaying.state_digest.hex()]


def fold_part(ledger: Ledger, last: int, start: Path | None) -> Iterator[dict[str, Any]]:
    """Fold a ledger from the state in a file, or from nothing, up to an entry; yield how far it is, and what it came
    to. Raises what `replay` raises, and SnapshotRefused.
    """
    replaying = from_nothing() if start is None else from_image(ledger, load_snapshot(start))
    first, begin = replaying.last_index, _stand(replaying)
    while replaying.last_index < last:
        fold(ledger, replaying, min(last, replaying.last_index + STEP_ENTRIES))
        yield {"folded": replaying.last_index - first}
    end, counts, folded = _stand(replaying), replaying.counts(), replaying.last_index - first
    # Digests are recorded some seconds behind their states: those of the last states here are in the next part.
    digests, behind = replaying.digests, min(last + BEHIND_ENTRIES, ledger.applied_index)
    digests.hold_no_more(replaying.state)
    while digests.awaited and replaying.last_index < behind:
        fold(ledger, replaying, min(behind, replaying.last_index + READ_ENTRIES))
    digests.finish()
    counts = counts._replace(compared=digests.compared)
    yield {"folded": folded, "begin": begin, "end": end, "counts": counts._asdict()}


def main(arguments: Sequence[str]) -> int:
    """Fold a part; return the exit code."""
    parent, directory, last, *start = arguments
    die_with_parent(int(parent))
    os.nice(BESIDE)  # a replica may run here
    collect_for_a_reader()
    try:
        with Environment.open_readonly(Path(directory)) as environment:
            ledger = Ledger(environment).as_of_now()
            for said in fold_part(ledger, int(last), Path(start[0]) if start else None):
                print(json.dumps(said), flush=True)
    except FAILURES as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
