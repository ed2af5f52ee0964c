"""A replica whose old entries were pruned: it says where they are, proves what it holds, and hides what was private."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cluster.cli.text import timeline
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import HistoryAnswer
from forebay.cluster.security.proofs import parse_note
from forebay.cluster.server import PruneNote, Pruner
from forebay.cluster.system import format_instant
from forebay.replica.messages import commands as c
from forebay.replica.state.digest import state_digest
from forebay.replica.values import Instant
from forebay.wal import Archive, BrokenInvariant
from tests.cluster.api.test_history_service_process import WHO, configure, history, jobs_over, purge
from tests.cluster.harness import Harness, compared, placed, story, until
from tests.repo.tree import ROOT

JOBS = 80
"""Enough for a tile of entries, and some."""

PURGED, GONE = 20, 30
"""Jobs whose entries are pruned, all behind the first ones that are kept; the first is purged as well."""


async def command(*words: object) -> Any:
    """What an audit command prints, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forebay.cluster.cli", *map(str, words)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    return json.loads(printed)


class Pruned:
    """A replica that runs, with archives of what it has pruned."""

    def __init__(self, harness: Harness, directory: Path) -> None:
        self.harness = harness
        self.home = harness.config.storage.directory / "r1"
        self.archives = directory / "a", directory / "b"
        self.keys = directory / "keys"
        self.below = 0

    async def bind(self) -> None:
        """Save a snapshot, have the ledger say what it is of, and let consensus forget what is before it."""
        harness = self.harness
        assert (await harness.ask("POST", "/v1/snapshots")).status in (200, 201)
        state = harness.controller.state
        await harness.controller.submit(
            c.Request(b"", c.CONTROLLER, c.RecordStateDigest(state.revision, state_digest(state)))
        )
        harness.engine.compact_to(harness.controller.snapshot_index)
        harness.controller.journal.flush_hints()

    async def prune(self) -> None:
        harness = self.harness
        await self.bind()
        assert await harness.service.publisher.publish()
        listed = (await harness.ask("GET", "/v1/tlog/keys", who="auditor")).body
        self.keys.write_text("".join(f"{one['key']}\n" for one in listed["keys"]))
        last = harness.controller.snapshot_index
        await until(lambda: harness.service.past.progress.index >= last)
        await harness.service.past.stop()  # it writes what it has noted
        named = [word for one in self.archives for word in ("--archive", one)]
        await command("audit", "archive", self.archives[0], "--data", self.home, "--json")
        shutil.copytree(*self.archives)
        pruner = Pruner(
            self.home,
            authorise=harness.controller.authorise_pruning,
            prune_some=harness.controller.prune_some,
            fail=harness.fail,
        )
        pruner.start()
        found = await command(
            *("audit", "prune", "--data", self.home, "--below", last, *named, "--keys", self.keys, "--yes", "--json")
        )
        await pruner.stop()
        assert found["removed"] == "by the running replica"
        self.below = found["last_index"] + 1


@pytest.fixture(scope="module")
def made(founded: Config, tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    """One that ran, pruned what was old, and was stopped."""
    directory = tmp_path_factory.mktemp("made")

    @story
    async def run() -> None:
        async with Harness(placed(founded, directory)) as harness:
            await jobs_over(harness, JOBS)
            purge(harness.controller, harness, PURGED)
            await until(lambda: PURGED not in harness.controller.state.jobs)
            made = Pruned(harness, directory)
            await made.prune()
            found.append(made)

    found: list[Pruned] = []
    run()
    return found[0]


@asynccontextmanager
async def pruned(config: Config, made: Pruned) -> AsyncIterator[Harness]:
    """The same, started again, with a directory of its own."""
    shutil.copytree(made.home, config.storage.directory / "r1", dirs_exist_ok=True)
    (config.storage.directory / "r1" / "first-start").unlink(missing_ok=True)
    async with Harness(config) as harness:
        yield harness


@story
async def test_what_was_pruned_is_said_to_be_in_its_segments_and_what_is_held_is_told(
    config: Config, made: Pruned
) -> None:
    async with pruned(config, made) as harness:
        segments = [path.name for path in sorted(made.archives[0].iterdir())]
        controller = harness.controller
        assert controller.ledger.missing() == () and controller.ledger.whole_from == made.below
        for again in (False, True):
            if again:
                await harness.restart()
            gone = (await history(harness, GONE)).body
            assert gone["rows"] == [] and not gone["complete"]
            assert gone["archived"]["commands"] == 4 and gone["archived"]["segments"] == segments
            assert gone["archived"]["first_revision"] < gone["archived"]["last_revision"]
            held = (await compared(lambda: history(harness, JOBS))).body
            assert held["archived"] is None and held["complete"] and len(held["rows"]) == 4
            revision = gone["archived"]["first_revision"]
            moment = await harness.ask("GET", f"/v1/jobs/{GONE}/why?at={revision}")
            assert (moment.status, moment.code) == (410, "history_not_held")
            assert f"it was pruned, and is in the archive: {segments[0]}" in moment.sentence
            listed = await harness.ask("GET", f"/v1/jobs?at={revision}")
            assert listed.status == 410 and segments[0] in listed.sentence
            told = await harness.ask("GET", f"/v1/history?from={revision}")
            assert told.status == 410 and segments[0] in told.sentence
            proof = await harness.ask("GET", f"/v1/jobs/{GONE}/proof")
            assert proof.status == 404 and segments[0] in proof.sentence
            assert (await harness.ask("GET", f"/v1/jobs/{JOBS}/proof")).status == 200
            assert (await harness.ask("GET", "/v1/jobs?at=" + str(controller.state.revision))).status == 200
            handed = await harness.ask("GET", f"/v1/ledger/history?last={made.below - 1}", who="r1")
            assert (handed.status, handed.code) == (410, "pruned") and segments[0] in handed.sentence
            assert (await harness.ask("GET", f"/v1/ledger/history?last={made.below}", who="r1")).status == 200
            metrics = str((await harness.ask("GET", "/metrics")).body)
            assert f"forebay_ledger_oldest_entry {float(made.below)}" in metrics
            assert f"forebay_ledger_pruned_below {float(made.below)}" in metrics
            assert "forebay_ledger_missing_entries 0.0" in metrics
        # By time, too; and everything goes on.
        manifest = Archive(made.archives[0]).segments[0].manifest
        assert manifest.first_at is not None
        by_time = await harness.ask("GET", f"/v1/jobs/{GONE}/why?at=" + _time(manifest.first_at + 1))
        assert by_time.status == 410 and segments[0] in by_time.sentence
        await jobs_over(harness, 1)
        assert len((await history(harness, JOBS + 1)).body["rows"]) == 4
        assert await harness.service.publisher.publish()
        size = int(parse_note(harness.service.publisher.note.encode())[0].splitlines()[1])
        assert size == controller.applied_index or size > made.below


def _time(at: int) -> str:
    return str(format_instant(Instant(at)))


@story
async def test_a_purged_job_stays_private_when_it_was_archived(config: Config, made: Pruned) -> None:
    async with pruned(config, made) as harness:
        await configure(harness, "PrivateData")
        # Of one that is purged and pruned nobody knows any more whose it was; the other one is in the state.
        for job, expected in ((PURGED, (403, 403, 200)), (GONE, (200, 403, 200))):
            for path in ("history", "proof"):
                found = [(await harness.ask("GET", f"/v1/jobs/{job}/{path}", who=who)).status for who in WHO]
                if path == "history":
                    assert found == list(expected), job
                else:
                    assert found[1] == 403, job


@story
async def test_an_index_that_is_lost_after_pruning_is_made_anew_from_what_is_held(config: Config, made: Pruned) -> None:
    async with pruned(config, made) as harness:
        await harness.close()
        for path in (config.storage.directory / "r1" / "index").glob("*.mdb"):
            path.unlink()
        await harness.open()
        gone = (await history(harness, GONE)).body
        assert (gone["rows"], gone["complete"], gone["archived"]) == ([], False, None)
        await jobs_over(harness, 1)
        held = (await history(harness, JOBS + 1)).body
        assert held["complete"] and len(held["rows"]) == 4


@story
async def test_a_note_that_would_cost_a_replica_its_life_is_refused(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 10)
        controller = harness.controller
        index = controller.applied_index
        digest = (controller.journal.digest_at(index) or b"").hex()
        for note, why in (
            (PruneNote("another", index + 1, digest, ()), "differs from the entry in the pruning request"),
            (PruneNote(config.cluster.id, index, digest, ()), "differs from the entry in the pruning request"),
            (PruneNote(config.cluster.id, index + 1, digest, ()), "the newest snapshot is of entry 0"),
        ):
            with pytest.raises(BrokenInvariant, match=why):
                controller.authorise_pruning(note)
        assert (await harness.ask("POST", "/v1/snapshots")).status in (200, 201)
        with pytest.raises(BrokenInvariant, match="but consensus needs 1 and later"):
            controller.authorise_pruning(PruneNote(config.cluster.id, index + 1, digest, ()))
        assert controller.ledger.pruned_range() is None


def test_people_are_told_where_a_pruned_history_is() -> None:
    archived = {"commands": 4, "first_revision": 10, "last_revision": 14, "segments": ["segment-1-2.fbl"]}
    answer = msgspec.convert(
        {"revision": 99, "job_id": 3, "rows": [], "complete": False, "archived": archived}, HistoryAnswer
    )
    words = str(timeline(answer, now=0))  # type: ignore[arg-type]
    assert "4 commands of revisions 10 to 14 were pruned" in words and "segment-1-2.fbl" in words
    assert "forebay audit dump --job 3 --archive DIR" in words
