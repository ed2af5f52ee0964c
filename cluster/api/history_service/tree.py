"""Merkle tree of the ledger, built in the history service and queried by the replica."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.api.history_service.frames import (
    NO_JOB,
    NOT_HELD,
    ConsistencyQuery,
    CountsQuery,
    CountsReply,
    ProofQuery,
    QueryFailure,
    RootQuery,
    TileQuery,
    TreeQuery,
    TreeReply,
)
from forebay.cluster.api.history_service.record_counts import CountUnavailable, RecordCounts
from forebay.cluster.security.proofs import ProofError, TileError, parse_path
from forebay.cluster.server.tlog import LedgerTree, NoDisclosureKey, NotInTree, history_proven, records_proven
from forebay.cluster.system import about
from forebay.wal import Gap, Ledger, LedgerBroken

LOGGER = logging.getLogger(__name__)


CHECK_PAUSE_S = 0.25
"""Interval of tile verification steps, seconds: a hundredth of a processor, a million one-command entries in half an
hour.
"""

CHECK_ROUND_S = 600.0
"""Interval between two verification rounds, seconds."""


class Tree:
    """Builds the tree, or waits until that is possible."""

    def __init__(
        self, ledger: Ledger, directory: Path, histories: RecordCounts, monotonic_s: Callable[[], float]
    ) -> None:
        self._ledger = ledger
        self._histories = histories
        self._directory = directory
        self._monotonic_s = monotonic_s
        self._check_due_s = monotonic_s()
        self._tree: LedgerTree | None = None
        self._why_not = ""
        self._tried: tuple[int, tuple[Gap, ...]] | None = None
        """End and gaps of the ledger at the last attempt to open a tree."""

    @property
    def progress(self) -> tuple[int, int]:
        """Entries in the tree, and rebuilt files."""
        return (0, 0) if self._tree is None else (self._tree.size, self._tree.made_again)

    def step(self) -> bool:
        """Extend the tree, or verify a part of it; return True if it can still be extended."""
        if self._tree is None and not self._begin():
            return False
        assert self._tree is not None
        if self._tree.step():
            return True
        now_s = self._monotonic_s()
        if now_s >= self._check_due_s:
            self._check_due_s = now_s + (CHECK_PAUSE_S if self._tree.check() else CHECK_ROUND_S)
        return False

    def answer(self, asked: TreeQuery, follower: Follower) -> TreeReply | CountsReply | QueryFailure | None:
        """Return the reply; None if more of the tree or the index is needed first."""
        tree = self._tree
        if self._tried is None:
            return None
        if tree is None:
            return QueryFailure(asked.number, NOT_HELD, 0, f"this replica has no proofs yet: {self._why_not}")
        try:
            if isinstance(asked, TileQuery):
                return TreeReply(asked.number, tree.tile(parse_path(asked.path)))
            if tree.size < asked.size:
                return None
            if isinstance(asked, RootQuery):
                return self._root(tree, asked)
            if isinstance(asked, ConsistencyQuery):
                return TreeReply(asked.number, b"".join(tree.consistency(asked.old_size, asked.size)))
            if follower.index < asked.size:
                return None
            if isinstance(asked, CountsQuery):
                counted = self._histories.count_first(asked.size)
                return CountsReply(
                    asked.number, counted.jobs, counted.root, self._histories.last_recorded_root(asked.size)
                )
            revisions = [row.revision for row in follower.rows(asked.job)]
            found = records_proven(follower.ledger, tree, revisions, asked.size)
        except (TileError, CountUnavailable, LookupError, LedgerBroken) as error:
            return QueryFailure(asked.number, NOT_HELD, 0, str(error))
        if not found:
            sentence = f"the first {asked.size} entries have no record of job {asked.job}"
            return QueryFailure(asked.number, NO_JOB, 0, sentence)
        return TreeReply(asked.number, found, self._history(tree, asked, follower))

    def _root(self, tree: LedgerTree, asked: RootQuery) -> TreeReply | QueryFailure | None:
        """Return a root, unless the recorded counts are unverified or differ from this replica's.

        A replica signs every root it returns.
        """
        before = self._histories.ends_before
        if before is not None and before <= asked.size:
            sentence = f"the record counts in entry {before} differ from this replica's"
            return QueryFailure(asked.number, NOT_HELD, 0, sentence)
        unchecked = self._histories.first_unchecked
        if unchecked is not None and unchecked <= asked.size:
            return None
        return TreeReply(asked.number, tree.root(asked.size))

    def _history(self, tree: LedgerTree, asked: ProofQuery, follower: Follower) -> bytes:
        """Return the proof that a job's records are complete; empty if unavailable."""
        try:
            return history_proven(follower.ledger, tree, asked.job, asked.size, self._histories.leaf)
        except (NotInTree, CountUnavailable, LedgerBroken, ProofError) as error:
            LOGGER.info(
                "the proof of job %d cannot show that its records are complete: %s",
                asked.job,
                error,
                extra=about(job=asked.job),
            )
            return b""

    def _begin(self) -> bool:
        stored = self._ledger.as_stored()
        found = stored.applied_index, stored.gaps()
        if found == self._tried:
            return False
        self._tried = found
        try:
            self._tree = LedgerTree(self._ledger.as_stored, self._directory)
        except (NoDisclosureKey, LedgerBroken) as error:
            if str(error) != self._why_not:
                LOGGER.warning("the ledger cannot be proven yet: %s", error)
            self._why_not = str(error)
            return False
        return True
