"""Parallel replay: separate processes fold parts of a ledger, each starting from a state that the replica keeps.

At each seam between two parts, the result of the earlier part must equal the initial state of the later part, in the
digests of state and ledger. So the parallel replay proves as much as a single fold. After any mismatch or failure, one
process replays the whole ledger, and its result is used.

`python -m cluster.audit.replay_in_parts PARENT DIRECTORY LAST [STATE]` is the process of a part. It writes its progress
and result as JSON lines to standard output.
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

from forebay.cluster.audit.deep import snapshots_in
from forebay.cluster.audit.replay import (
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
from forebay.cluster.system import collect_for_a_reader, die_with_parent
from forebay.replica.messages import ReleaseNeeded
from forebay.replica.state import StateDigestMismatch
from forebay.snapshots import SnapshotRefused, load_snapshot
from forebay.wal import Environment, Ledger, LedgerBroken, StorageFailed

PART_COMMANDS: Final = 50_000
"""Minimum number of commands for a separate process: a second of folding."""

PARTS_MAX: Final = 64

STEP_ENTRIES: Final = 8_192
"""Number of entries after which a part writes a progress line."""

BEHIND_ENTRIES: Final = 16_384
"""Number of entries after a part that are searched for a digest of a state in the part."""

BESIDE: Final = 10
"""Niceness of a part's process relative to its parent."""

FAILURES: Final = (
    SnapshotRefused,
    ReplayFailed,
    ReplayRefused,
    StateDigestMismatch,
    LedgerBroken,
    StorageFailed,
    ReleaseNeeded,
    OSError,
)
"""Possible failures of a part."""


class StateFile(NamedTuple):
    """File in which the replica keeps its state after entry `index`, at `revision`."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    revision: int
    path: Path


class _PartFailed(Exception):
    """Part that did not finish, or whose result differs from the initial state of the next part."""


def states_beside(directory: Path) -> list[tuple[int, Path]]:
    """Return the states kept beside a ledger's directory, with their entries.

    Raises:
        OSError: The directory cannot be read.
    """
    home = directory.parent
    return snapshots_in(home / "index" / "states") + snapshots_in(home / "snapshots")


def seams(ledger: Ledger, states: Sequence[tuple[int, Path]], *, first: int, last: int, parts: int) -> list[StateFile]:
    """Return the states at which to cut a fold of the revisions `first` to `last` into at most `parts` parts.

    The parts are as equal as possible, and none is too small for a process.
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
    """Replay the ledger in a directory with several processes; `start` is the file of a snapshot.

    If a part fails, `doubt` is called with the cause, and one process replays the whole ledger. Exceptions of `replay`
    also propagate.

    Raises:
        SnapshotRefused: The snapshot is not sound.
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
    """Fold the last part here and the others in processes. Exceptions of `replay` also propagate.

    Raises:
        _PartFailed: A part did not finish, or its result differs from the initial state of the next part.
    """
    begins = [start, *(cut.path for cut in cuts[:-1])]
    with _start_parts(directory, [(begin, cut.index) for begin, cut in zip(begins, cuts, strict=True)]) as parts:
        shown = None if progress is None else _TotalProgress(progress, parts, cuts[-1].index)
        replaying = from_image(ledger, load_snapshot(cuts[-1].path), at_revision)
        own = _seam_values(replaying)
        fold(ledger, replaying, ledger.applied_index, shown)
        ends = [part.wait(shown) for part in parts]
        for cut, end, following in zip(cuts, ends, [*(end["begin"] for end in ends[1:]), own], strict=True):
            if end["end"] != following:
                raise _PartFailed(f"the state in {cut.path} does not match the ledger")
        for end in ends:
            replaying.add(EntryCounts(**end["counts"]))
        return finish_replay(ledger, replaying)


class _Part:
    """Part folded by a separate process."""

    def __init__(self, directory: Path, begin: Path | None, last: int) -> None:
        words = [str(os.getpid()), str(directory), str(last), *([] if begin is None else [str(begin)])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.folded = 0
        """Entries folded so far."""
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

    def wait(self, shown: "_TotalProgress | None") -> dict[str, Any]:
        """Return the part's result.

        Raises:
            _PartFailed: The process ended without one.
        """
        while self._reader.is_alive():
            self._reader.join(0.2)
            if shown is not None:
                shown.show()
        if self._process.wait() or self._said is None:
            raise _PartFailed(f"the process of a part ended with status {self._process.returncode}")
        return self._said

    def end(self) -> None:
        """End the process, unless it has already ended."""
        self._process.kill()
        self._process.wait()
        self._reader.join()


@contextmanager
def _start_parts(directory: Path, spans: Sequence[tuple[Path | None, int]]) -> Iterator[list[_Part]]:
    """Start the processes of parts, and end them on exit."""
    parts: list[_Part] = []
    try:
        for begin, last in spans:
            parts.append(_Part(directory, begin, last))
        yield parts
    finally:
        for part in parts:
            part.end()


class _TotalProgress:
    """Combined progress of all parts."""

    def __init__(self, progress: Progress, parts: Sequence[_Part], before: int) -> None:
        """Create it; `before`: the entry before the part that is folded here."""
        self._progress, self._parts, self._before = progress, parts, before
        self._here, self._last = 0, 0

    def __call__(self, index: int, last: int) -> None:
        """Update the progress of the part folded here."""
        self._here, self._last = index - self._before, last
        self.show()

    def show(self) -> None:
        """Report the total progress."""
        self._progress(self._here + sum(part.folded for part in self._parts), self._last)


def _seam_values(replaying: ReplayFold) -> list[str | int]:
    """Return the values that must be equal at a seam: entry, ledger digest, state digest."""
    return [replaying.last_index, replaying.ledger_digest.hex(), replaying.state_digest.hex()]


def fold_part(ledger: Ledger, last: int, start: Path | None) -> Iterator[dict[str, Any]]:
    """Fold a ledger from the state in a file, or from its start, up to an entry; yield progress and the result.

    Exceptions of `replay` also propagate.

    Raises:
        SnapshotRefused: The state's file is not sound.
    """
    replaying = from_nothing() if start is None else from_image(ledger, load_snapshot(start))
    first, begin = replaying.last_index, _seam_values(replaying)
    while replaying.last_index < last:
        fold(ledger, replaying, min(last, replaying.last_index + STEP_ENTRIES))
        yield {"folded": replaying.last_index - first}
    end, counts, folded = _seam_values(replaying), replaying.counts(), replaying.last_index - first
    # A digest is recorded some seconds after its state, so the digests of the last states are in the next part.
    digests, behind = replaying.digests, min(last + BEHIND_ENTRIES, ledger.applied_index)
    digests.stop_holding(replaying.state)
    while digests.awaits_record and replaying.last_index < behind:
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
