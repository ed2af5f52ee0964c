"""Ledger backed by an archive: reads from archive segments the entries that the replica no longer holds.

An archive is accepted only if it has the ledger's cluster ID, and if digest and revision equal the ledger's at the
edges of each gap and at the end of the archive. `segments.archive_from` and `cluster.audit.archive` repeat these checks
before they write or prune.
"""

from forebay.wal.environment import Environment
from forebay.wal.ledger import STEP_MAX_BYTES, Ledger, LedgerBroken, LedgerEntry, _Scan
from forebay.wal.records import ChainRow, Gap
from forebay.wal.segments import Archive, SegmentBroken


class ArchivedLedger(Ledger):
    """Ledger of an Environment combined with an archive. Methods raise the errors of `Ledger` and SegmentBroken."""

    def __init__(self, env: Environment, archive: Archive) -> None:
        """Combine the ledger and the archive.

        Raises:
            SegmentBroken: The archive and the ledger have different histories.
        """
        super().__init__(env)
        self.archive = archive
        if archive.segments and archive.cluster_id != env.identity.cluster_id:
            raise SegmentBroken(
                archive.directory,
                f"the archive belongs to cluster {archive.cluster_id}, but the ledger to {env.identity.cluster_id}",
            )
        self._check_links()

    def as_of_now(self) -> "Ledger":
        """Return the ledger up to the last applied entry; see `Ledger.as_of_now`."""
        return self if self._seen is not None else self._seen_as(super()._scan())

    def as_stored(self) -> "Ledger":
        """Return the ledger up to the last checkpoint; see `Ledger.as_stored`."""
        stored = super().as_stored()._seen
        assert stored is not None
        return self._seen_as(stored)

    @property
    def first_index(self) -> int:
        """Index of the first entry in the replica or the archive."""
        return 1 if self.archive.last_index else super().first_index

    def gaps(self) -> tuple[Gap, ...]:
        """Gaps held by neither the replica nor the archive."""
        return tuple(left for gap in super().gaps() if (left := self._left_of(gap)) is not None)

    def row_at(self, index: int) -> ChainRow:
        """Return the digest and revision after the entry at `index`.

        Raises:
            LedgerBroken: They are not known here.
        """
        if (
            any(gap.first_index <= index < gap.last_index for gap in self._missing())
            and index <= self.archive.last_index
        ):
            return self.archive.row_at(index)
        return super().row_at(index)

    def index_of_revision(self, revision: int) -> int:
        """Return the index of the entry that settled `revision`.

        Raises:
            LookupError: Replica and archive both lack it.
        """
        if any(gap.revision_before < revision <= gap.revision_after for gap in self._missing()):
            return self.archive.index_of_revision(revision)
        return super().index_of_revision(revision)

    def _seen_as(self, scan: _Scan) -> "ArchivedLedger":
        ledger = ArchivedLedger.__new__(ArchivedLedger)
        ledger._env, ledger._seen, ledger.archive = self._env, scan, self.archive
        return ledger

    def _missing(self) -> tuple[Gap, ...]:
        """Return the gaps of the replica alone, without regard to the archive."""
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
        """Compare the archive's digests with the replica's, at the edges of its gaps and at the end of the archive."""
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
                        f"ledger has {known.digest.hex()[:16]} and {known.revision}: their histories differ",
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
            raise LedgerBroken(index, f"it is not available on this replica, nor in the archive: {error}") from error
