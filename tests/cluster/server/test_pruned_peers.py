"""A replica that returns after its peers pruned entries that it lacks: it serves, and proves with the archive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.cluster.security.proofs import parse_note
from forebay.cluster.serve import Replica
from forebay.cluster.server import PruneNote, answer_to_note, history_fetch, leave_note, pruning
from forebay.cluster.server.tlog import publish
from forebay.cluster.system.clock import SystemClock
from forebay.wal import Archive, PrunedSegment
from tests.cluster.audit.ledgers import real
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.server.tlog.test_cluster import Three, pools_set, signed_by_all, three
from tests.cluster.test_serve import make

BELOW = 257


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "PERIOD_S", 0.3)
    monkeypatch.setattr(publish, "POLL_S", 0.05)
    monkeypatch.setattr(history_fetch, "POLL_PERIOD_S", 0.1)
    monkeypatch.setattr(pruning, "POLL_PERIOD_S", 0.1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(2 * PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.05)


async def pruned(one: Replica, home: Path, archive: Path) -> None:
    """Let a running replica prune the entries in an archive."""
    controller = one.controller
    await asyncio.wrap_future(controller.save_snapshot())
    await until(lambda: controller.snapshot_index >= BELOW)
    controller.engine.compact_to(controller.snapshot_index)
    controller.journal.flush_hints()
    rows = (segment.manifest for segment in Archive(archive).segments)
    segments = tuple(
        PrunedSegment(row.first_index, row.last_index, row.revision_after, row.last_at or 0) for row in rows
    )
    digest = controller.journal.digest_at(BELOW - 1)
    assert digest is not None
    leave_note(home, PruneNote(controller.config.cluster.id, BELOW, digest.hex(), segments))
    await until(lambda: controller.ledger.whole_from == BELOW)
    assert answer_to_note(home) == ""


def started(them: Three, name: str) -> Replica:
    made = Replica(them.config, name, clock=SystemClock(), fail=them._failing(name))  # type: ignore[arg-type]
    them.replicas[name] = made
    return made


@story
async def test_replica_below_the_prune_point_gets_a_snapshot_and_signs_with_the_archive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make(tmp_path / "site", 3)
    async with three(config) as them:
        await them.until_they_have(await pools_set(config, 3))
        leader = them.leader()
        assert leader is not None
        name = next(one for one in them.replicas if one != leader.controller.name)
        await them.replicas.pop(name).stop()
        homes = {one: config.storage.directory / one for one in (*them.replicas, name)}
        revision = await pools_set(config, 300)
        await them.until_they_have(revision)
        await signed_by_all(them)
        archive = tmp_path / "archive"
        written = await asyncio.to_thread(real, "audit", "archive", archive, "--data", homes[leader.controller.name])
        assert written.returncode == 0, written.stderr
        for one in them.replicas.values():
            await pruned(one, homes[one.controller.name], archive)
        # The lagging replica gets a snapshot and the peers' entries; the rest is requested once.
        laggard = started(them, name)
        await laggard.start()
        await them.until_they_have(revision)
        ledger = laggard.controller.ledger
        await until(lambda: laggard.backfill._hopeless is not None)
        assert [gap.last_index for gap in ledger.missing()] == [BELOW - 1]
        assert ledger.applied_index >= BELOW and ledger.verify().last_index == ledger.applied_index
        assert "were pruned by all peers that answered" in caplog.text
        await them.until_they_have(await pools_set(config, 2))
        assert not them.stopped
        laggard.controller.journal.flush_hints()
        await them.replicas.pop(name).stop()
        restored = await asyncio.to_thread(real, "audit", "restore", "--data", homes[name], "--archive", archive)
        assert restored.returncode == 0, restored.stderr
        laggard = started(them, name)
        await laggard.start()
        await them.until_they_have(await pools_set(config, 2))
        await until(
            lambda: len(parse_note(laggard.publisher.note.encode())[1]) == 3 if laggard.publisher.note else False
        )
        assert laggard.controller.ledger.missing() == () and not them.stopped
