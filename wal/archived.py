"""A ledger that is read with its archive: what is not held by the replica comes from the segments, each proven.

What an archive has of a gap is believed once it leads from the digest before the gap to the digest behind it, which
the replica kept.
"""

from pathlib import Path

from wal.environment import Environment
from wal.ledger import STEP_MAX_BYTES, Ledger, LedgerBroken, LedgerEntry, _Scan
from wal.records import ChainRow, Gap
from wal.segments import Archive, SegmentBroken


class ArchivedLedger(Ledger):
    """The ledger of an Environment together with an archive; what `Ledger` says of errors, and SegmentBroken."""

    def __init__(self, env: Environment, archive: Archive) -> None:
        """SegmentBroken where the archive is of another history than the ledger."""
        super().__init__(env)
        self.archive = archive
        if archive.segments and archive.cluster_id != env.identity.cluster_id:
            raise SegmentBroken(
                archive.directory, f"it is of the cluster {archive.cluster_id}, the ledger of {env.identity.cluster_id}"
            )
        self._check_links()

    def as_of_now(self) -> "Ledger":
        """The ledger up to what is applied now, as `Ledger.as_of_now` has it."""
        return self if self._seen is not None else self._seen_as(super()._scan())

    def as_stored(self) -> "Ledger":
        """The ledger up to what LMDB was given, as `Ledger.as_stored` has it."""
        stored = super().as_stored()._seen
        assert stored is not None
        return self._seen_as(stored)

    @property
    def first_index(self) -> int:
        """The first entry that is held, here or in the archive."""
        return 1 if self.archive.last_index else super().first_index

    def gaps(self) -> tuple[Gap, ...]:
        """What is held neither here nor in the archive."""
        return tuple(left for gap in super().gaps() if (left := self._left_of(gap)) is not None)

    def row_at(self, index: int) -> ChainRow:
        """Digest up to the entry at `index`, and revision after it; LedgerBroken where they are not known here."""
        if (
            any(gap.first_index <= index < gap.last_index for gap in self._missing())
            and index <= self.archive.last_index
        ):
            return self.archive.row_at(index)
        return super().row_at(index)

    def index_of_revision(self, revision: int) -> int:
        """The entry that settled `revision`; LookupError where it is held neither here nor in the archive."""
        if any(gap.revision_before < revision <= gap.revision_after for gap in self._missing()):
            return self.archive.index_of_revision(revision)
        return super().index_of_revision(revision)

    def _seen_as(self, scan: _Scan) -> "ArchivedLedger":
        ledger = ArchivedLedger.__new__(ArchivedLedger)
        ledger._env, ledger._seen, ledger.archive = self._env, scan, self.archive
        return ledger

    def _missing(self) -> tuple[Gap, ...]:
        """What this replica does not hold now, whatever the archive has."""
        with self._env.read() as transaction:
            return self._gaps(transaction)

    def _left_of(self, gap: Gap) -> Gap | None:
        last = self.archive.last_index
        if last < gap.first_index:
            return gap
        if last >= gap.last_index:
            return None
        return Gap(last + 1, gap.last_index, self.archive.end.revision, gap.revision_after)

    def _check_links(self) -> None:
        """Hold the archive's digests against those that the replica has: beside its gaps, and at the archive's end."""
        archive = self.archive
        held = {gap.first_index - 1 for gap in self._missing()} | {gap.last_index for gap in self._missing()}
        missing = [range(gap.first_index, gap.last_index) for gap in self._missing()]
        if archive.last_index <= self.applied_index and not any(archive.last_index in gap for gap in missing):
            held.add(archive.last_index)
        for index in sorted(held):
            if 0 < index <= archive.last_index:
                row, known = archive.row_at(index), super().row_at(index)
                if row != known:
                    raise SegmentBroken(
                        archive.directory,
                        f"its entry {index} leads to digest {row.digest.hex()[:16]} and revision {row.revision}; the "
                        f"ledger has {known.digest.hex()[:16]} and {known.revision}: they are not of one history",
                    )

    def _step(self, scan: _Scan, first: int, limit: int, bytes_max: int = STEP_MAX_BYTES) -> list[LedgerEntry]:
        index, last = max(first, 1), scan.view.marks.applied_index
        missing = self._missing()
        gap = next((gap for gap in missing if gap.first_index <= index <= gap.last_index), None)
        if gap is None:
            following = min((one.first_index for one in missing if one.first_index > index), default=last + 1)
            return super()._step(scan, index, min(limit, following - index), bytes_max) if following > index else []
        end = min(gap.last_index, self.archive.last_index, last)
        if index > end:
            return self._step(scan, gap.last_index + 1, limit, bytes_max) if gap.last_index < last else []
        try:
            return self.archive.read_some(index, entries_max=min(limit, end - index + 1), bytes_max=bytes_max)
        except SegmentBroken as error:
            raise LedgerBroken(index, f"it is not held here, and the archive does not give it: {error}") from error


def archived(env: Environment, directory: Path | None) -> Ledger:
    """The ledger of an environment, with the archive of a directory if one is given; SegmentBroken."""
    return Ledger(env) if directory is None else ArchivedLedger(env, Archive(directory))
