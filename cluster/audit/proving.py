"""Proof of a job's history in a ledger, from a replica's directory alone: last checkpoint, tree and index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forebay.cluster.security.proofs import HistoryCounts, NoteError, ProofError, parse_checkpoint, parse_note
from forebay.cluster.server.tlog import (
    CHECKPOINT_NAME,
    LOG_DIRECTORY,
    CountLeaf,
    LedgerTree,
    NoDisclosureKey,
    history_proven,
    proof_file,
    records_between,
    records_proven,
)
from forebay.replica.messages import jobs_of
from forebay.wal import EntryKind, JobIndex, JobIndexBroken, Ledger, LedgerBroken, decode_batch, kind_of


class NotProven(Exception):
    """This directory provides no proof; the sentence is the cause, `remedy` the correction."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.remedy = remedy


def proof_of(ledger: Ledger, home: Path, job: int, *, progress: Callable[[int, int], None]) -> bytes:
    """Return the proof file of a job from a replica's directory, which is only read.

    Raises:
        NotProven: The directory provides no proof.
        LedgerBroken: The ledger is damaged or altered.
    """
    directory = home / LOG_DIRECTORY
    try:
        note = (directory / CHECKPOINT_NAME).read_text(encoding="utf-8")
        checkpoint = parse_checkpoint(parse_note(note.encode())[0])
    except (OSError, NoteError, UnicodeDecodeError) as error:
        raise NotProven(f"{directory} has no checkpoint ({error})", "ask the cluster, or another replica") from error
    seen = ledger.as_of_now()
    try:
        tree = LedgerTree(lambda: seen, directory, readonly=True)
    except NoDisclosureKey as error:
        raise NotProven(f"nothing can be proven: {error}", "read another replica") from error
    while tree.size < checkpoint.size and tree.step():
        progress(tree.size, checkpoint.size)
    if tree.size < checkpoint.size:
        raise NotProven(
            f"the checkpoint covers {checkpoint.size} entries, but only {tree.size} are held without a gap",
            "read another replica",
        )
    if tree.root(checkpoint.size) != checkpoint.root:
        raise LedgerBroken(checkpoint.size, "the entries up to here differ from those that a majority signed")
    size = checkpoint.size
    try:
        records = records_proven(seen, tree, _revisions(seen, home, job, size), size)
    except LookupError as error:
        raise NotProven(str(error), "name the archive with --archive") from error
    if not records:
        raise NotProven(f"the first {checkpoint.size} entries have no records of job {job}", "see `forebay audit jobs`")

    def leaf(job: int, through: int) -> CountLeaf | None:
        counts = HistoryCounts(tree.disclosure_key)
        for one, count in records_between(seen, 0, through, bounded=False).items():
            counts.add(one, count)
        position = counts.position(job)
        return None if position is None else CountLeaf(position, counts.count(job), counts.path(job))

    try:
        history = history_proven(seen, tree, job, size, leaf)
    except ProofError as error:
        raise LedgerBroken(size, f"the record counts in the ledger do not match its records ({error})") from error
    return proof_file(note, job, records, history)


def _revisions(ledger: Ledger, home: Path, job: int, size: int) -> list[int]:
    """Return a job's revisions from the index if it extends far enough, otherwise by reading the whole ledger."""
    try:
        index = JobIndex(home / "index", readonly=True)
    except (JobIndexBroken, OSError):
        return _read(ledger, job, size)
    try:
        position = index.position
        if position.index >= size and not position.holes and ledger.row_at(position.index).digest == position.digest:
            return [row.revision for row in index.rows(job)]
    except (JobIndexBroken, LedgerBroken):
        pass
    finally:
        index.close()
    return _read(ledger, job, size)


def _read(ledger: Ledger, job: int, size: int) -> list[int]:
    found: list[int] = []
    for entry in ledger.read(1, limit=size):
        if kind_of(entry.data) is not EntryKind.BATCH or entry.revision == entry.base:
            continue
        commands = decode_batch(entry.data).entries
        found += (
            revision
            for revision, command in enumerate(commands, start=entry.base + 1)
            if any(job in jobs_of(event) for event in command.events)
        )
    return found
