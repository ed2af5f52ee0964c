"""Applied entries are read in order from memory, from LMDB, or from the sync log."""

from pathlib import Path

import pytest

from forebay.cluster.server import applied_log as applied_log_module
from forebay.cluster.server.applied_log import AppliedEntry, AppliedLog, Transition
from forebay.cluster.system.eventloop.slices import Slices
from forebay.replica.state import EMPTY
from forebay.replica.values.units import Revision
from forebay.wal import Environment, Journal
from forebay.wal.codec import NO_OP
from forebay.wal.journal import Entry
from forebay.wal.ledger import Ledger
from tests.cluster.harness import story
from tests.wal.support import open_env


def applied_to(applied_log: AppliedLog, journal: Journal, last: int) -> None:
    """Append, sync and apply entries that settle nothing, as the controller does."""
    for index in range(journal.last_index + 1, last + 1):
        entry = Entry(index, 1, NO_OP)
        journal.append([entry])
        journal.sync()
        digest = journal.record_applied(entry, 0)
        entry = AppliedEntry(index, 1, digest, Revision(0), Revision(0), None, False, 1)
        applied_log.applied(Transition(EMPTY, EMPTY, entry))


@story
@pytest.mark.parametrize("recent", [1, 3, 100])
async def test_entries_since_the_last_checkpoint_are_read_beyond_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent: int
) -> None:
    monkeypatch.setattr(applied_log_module, "RECENT_ENTRIES_MAX", recent)
    env: Environment = open_env(tmp_path)
    with env:
        journal = Journal(env)
        journal.set_term(1, "r1")
        applied_log = AppliedLog(journal, Ledger(env), index=0, revision=Revision(0))
        for last in (5, 6, 20):
            applied_to(applied_log, journal, last)
            assert Ledger(env).applied_index < last, "LMDB lacks it"
            for first in (1, last - 4, last):
                found = [one async for one in applied_log.walk(first, 100, Slices().work("test"))]
                assert [one.index for one in found] == list(range(first, last + 1))
                assert [one.digest for one in found] == [journal.digest_at(index) for index in range(first, last + 1)]
            applied_to(applied_log, journal, last + 1)
        applied_log.close()
