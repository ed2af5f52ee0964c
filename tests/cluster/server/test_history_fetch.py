"""A replica that received a snapshot fetches the replaced history, and verifies every peer's entries."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from forebay.cluster.client import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.schemas.ledger import HandedAnswer, HandedView
from forebay.cluster.server.history_fetch import JOURNAL_FILL_MAX, PRUNED, Backfill
from forebay.cluster.server.storage import Storage, open_storage
from forebay.wal import BrokenInvariant, authorise
from forebay.wal import ledger as ledgers
from forebay.wal.ledger import HistoryEntry
from forebay.wal.records import Gap, PrunedRange
from tests.cluster.harness import Harness, placed, story, until

BEFORE, MISSED, AFTER = 3, 40, 2
"""Jobs before the replica's absence, during it, and after the snapshot."""


class Away:
    """Replica that was absent and caught up by a snapshot, and the leader."""

    def __init__(self, leader: Harness, storage: Storage) -> None:
        self.leader = leader
        self.storage = storage
        self.asked: list[tuple[str, int]] = []
        self.fill = 0.0
        self.spoil: dict[str, Any] = {}
        """Wrong entries that peer r2 returns."""

    def fail(self, error: BaseException) -> NoReturn:
        raise error

    async def ask(self, peer: str, last: int) -> Iterable[HandedView]:
        self.asked.append((peer, last))
        if peer == "r9":
            raise OSError("the peer is not running")
        answer = await self.leader.ask("GET", f"/v1/ledger/history?last={last}", who="r1")
        assert answer.status == 200, answer
        entries = msgspec.convert(answer.body, HandedAnswer).entries
        if peer == "r2" and self.spoil:
            return [msgspec.structs.replace(entries[0], **self.spoil), *entries[1:]]
        return entries

    def backfill(self, *peers: str) -> Backfill:
        return Backfill(
            self.storage.ledger,
            fill=lambda gap, handed: ledgers.fill(self.storage.environment, gap, handed),
            journal_fill=lambda: self.fill,
            peers=lambda: peers,
            ask=self.ask,
            fail=self.fail,
        )


@asynccontextmanager
async def away(config: Config, directory: Path, *, knew: bool = True) -> AsyncIterator[Away]:
    source, copy = placed(config, directory / "source"), placed(config, directory / "copy")
    async with Harness(source) as leader:
        for _ in range(BEFORE):
            assert (await leader.submit(hold=True)).status == 201
        await leader.close()
        if knew:
            shutil.copytree(directory / "source", directory / "copy", dirs_exist_ok=True)
        await leader.open()
        for _ in range(MISSED):
            assert (await leader.submit(hold=True)).status == 201
        journal = leader.controller.journal
        storage = open_storage(copy, "r1")
        digest = journal.digest_at(journal.applied_index)
        assert digest is not None
        storage.journal.reset_to(journal.applied_index, journal.term, digest, journal.applied_revision)
        storage.journal.sync()
        for _ in range(AFTER):
            assert (await leader.submit(hold=True)).status == 201
        try:
            yield Away(leader, storage)
        finally:
            storage.close()


@story
@pytest.mark.parametrize("knew", [True, False])
async def test_gap_of_a_snapshot_is_filled_by_any_peer_that_has_the_entries(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, knew: bool
) -> None:
    monkeypatch.setattr(
        ledgers.export_history, "__kwdefaults__", {"entries_max": 7, "bytes_max": ledgers.HANDED_BYTES_MAX}
    )
    caplog.set_level(logging.DEBUG)
    async with away(config, tmp_path, knew=knew) as case:
        ledger = case.storage.ledger
        (gap,) = ledger.gaps()
        assert (gap.first_index == 1) is not knew and gap.last_index == ledger.applied_index
        backfill = case.backfill("r9", "r1")
        steps = 0
        while await backfill.step():
            steps += 1
            assert ledger.verify().digest == ledger.applied_digest
        assert steps == -(-(gap.last_index - gap.first_index + 1) // 7) and ledger.gaps() == ()
        assert case.asked[:2] == [("r9", gap.last_index), ("r1", gap.last_index)]
        entries = list(ledger.read(1, limit=1000))
        theirs = list(case.leader.storage.ledger.read(1, limit=len(entries)))
        assert entries == theirs and len(entries) == gap.last_index
        assert [ledger.index_of_revision(at) for at in range(1, ledger.applied_revision + 1)] == [
            case.leader.storage.ledger.index_of_revision(at) for at in range(1, ledger.applied_revision + 1)
        ]
        said = [line.getMessage() for line in caplog.records if "which a snapshot skipped" in line.getMessage()]
        assert said == [
            f"entries {gap.first_index} to {gap.last_index}, which a snapshot skipped, are fetched from r1",
            f"entries {gap.first_index} to {gap.last_index}, which a snapshot skipped, are complete",
        ]


@story
@pytest.mark.parametrize(
    "spoil",
    [{"data": b"\x00"}, {"revision_before": 1}, {"digest_before": "zz"}, {"digest_before": "00" * 32}, {"index": 5000}],
)
async def test_peer_with_another_history_is_named_and_the_next_is_asked(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: dict[str, Any]
) -> None:
    async with away(config, tmp_path) as case:
        case.spoil = spoil
        (gap,) = case.storage.ledger.gaps()
        assert not await case.backfill("r2").step()
        assert case.storage.ledger.gaps() == (gap,)
        assert f"r2 returned another history up to entry {gap.last_index}" in caplog.text
        assert await case.backfill("r2", "r1").step()
        assert case.storage.ledger.gaps() == ()


@story
async def test_replica_whose_own_history_differs_from_the_clusters_stops(config: Config, tmp_path: Path) -> None:
    async with away(config, tmp_path) as case:
        stopped: list[BaseException] = []

        def another_history(gap: Gap, handed: Sequence[HistoryEntry]) -> Gap | None:
            raise BrokenInvariant(f"the history up to entry {gap.first_index - 1} is not the cluster's")

        backfill = Backfill(
            case.storage.ledger,
            fill=another_history,
            journal_fill=lambda: 0.0,
            peers=lambda: ("r1",),
            ask=case.ask,
            fail=stopped.append,  # type: ignore[arg-type]  # a process would end here
        )
        backfill.start()
        await until(lambda: bool(stopped))
        await backfill.stop()
        assert isinstance(stopped[0], BrokenInvariant)


@story
async def test_history_waits_for_space_in_the_journal(config: Config, tmp_path: Path) -> None:
    async with away(config, tmp_path) as case:
        case.fill = JOURNAL_FILL_MAX + 0.01
        assert not await case.backfill("r1").step() and case.asked == []
        case.fill = JOURNAL_FILL_MAX
        assert await case.backfill("r1").step()


@story
async def test_range_pruned_by_all_peers_is_not_requested_repeatedly(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with away(config, tmp_path) as case:
        asked: list[str] = []
        peers = ["r2", "r3"]
        answers = {"r2": ApiError(410, PRUNED, "it was pruned"), "r3": ApiError(404, "not_held", "not held")}

        async def ask(peer: str, last: int) -> Iterable[HandedView]:
            asked.append(peer)
            raise answers[peer]

        backfill = Backfill(
            case.storage.ledger,
            fill=lambda gap, handed: None,
            journal_fill=lambda: 0.0,
            peers=lambda: tuple(peers),
            ask=ask,
            fail=case.fail,
        )
        # A peer may get the entries again.
        for _ in range(2):
            assert not await backfill.step()
        assert asked == ["r2", "r3"] * 2 and "were pruned by all" not in caplog.text
        answers["r3"] = answers["r2"]
        for _ in range(3):
            assert not await backfill.step()
        assert asked == ["r2", "r3"] * 3
        (gap,) = case.storage.ledger.gaps()
        said = f"entries {gap.first_index} to {gap.last_index} were pruned by all peers that answered"
        assert caplog.text.count(said) == 1 and "`forebay audit restore`" in caplog.text
        # A new peer may have the entries.
        peers.append("r4")
        answers["r4"] = ApiError(404, "not_held", "not held")
        assert not await backfill.step()
        assert asked[-1] == "r4"


@story
async def test_entries_pruned_by_the_replica_itself_are_not_fetched_again(config: Config, tmp_path: Path) -> None:
    async with away(config, tmp_path) as case:
        ledger, environment = case.storage.ledger, case.storage.environment
        (gap,) = ledger.gaps()
        below = gap.first_index + 10
        case.storage.journal.flush_hints()
        authorise(environment, PrunedRange(below, ()))
        backfill = case.backfill("r1")
        while await backfill.step():
            pass
        assert [(one.first_index, one.last_index) for one in ledger.gaps()] == [(gap.first_index, below - 1)]
        assert ledger.missing() == () and ledger.whole_from == below
        assert ledger.verify().digest == ledger.applied_digest
        asked = len(case.asked)
        assert not await backfill.step() and len(case.asked) == asked


@story
async def test_only_replicas_get_stored_entries_and_missing_ones_are_reported(config: Config) -> None:
    async with Harness(config) as harness:
        for who in ("operator", "alice", "n1"):
            assert (await harness.ask("GET", "/v1/ledger/history?last=1", who=who)).status == 403
        last = harness.controller.applied_index
        missing = await harness.ask("GET", f"/v1/ledger/history?last={last + 1}", who="r1")
        assert (missing.status, missing.code) == (404, "not_held")
        assert (await harness.ask("GET", "/v1/ledger/history", who="r1")).status in (400, 404)
        assert (await harness.ask("GET", "/v1/ledger/history?last=0", who="r1")).status == 400
