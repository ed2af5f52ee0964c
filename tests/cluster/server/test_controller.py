"""Controller: restarts, snapshots, installations, and stopping for entries that no correct leader makes."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.consensus import SnapshotSink
from forebay.cluster.server.storage import StorageRefused, open_storage
from forebay.replica.messages.commands import CONTROLLER
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.messages.events import JobReleased, NodeResumed
from forebay.replica.state.digest import state_digest
from forebay.replica.values.errors import LedgerViolation
from forebay.replica.values.units import Revision
from forebay.snapshots import Image, SnapshotFailed, load_snapshot
from forebay.wal import BrokenInvariant
from forebay.wal.codec import CodecError, encode_batch
from tests.cluster.harness import PATIENCE_S, Harness, placed, story, until


def small_snapshots(config: Config, every: int) -> Config:
    storage = msgspec.structs.replace(config.storage, snapshot_every_entries=every)
    return msgspec.structs.replace(config, storage=storage)


async def installed(sink: SnapshotSink) -> None:
    """Verify and install the received snapshot, as consensus does."""
    verified = asyncio.Event()
    sink.verify(verified.set)
    await verified.wait()
    sink.finish()


async def submit_many(harness: Harness, count: int) -> None:
    for _ in range(count):
        assert (await harness.submit(hold=True)).status == 201


async def submit_until(harness: Harness, condition: Callable[[], bool]) -> None:
    """Submit jobs until the condition holds, waiting for each save, so that a slow disk skips no snapshot."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await submit_many(harness, 1)
            await until(lambda: not harness.controller.snapshots.saving)


@story
async def test_restart_rebuilds_the_same_state_from_the_ledger_alone(config: Config) -> None:
    async with Harness(config) as harness:
        await submit_many(harness, 10)
        before, digest = harness.controller.state, harness.controller.applied_digest
        await harness.restart()
        assert state_digest(harness.controller.state) == state_digest(before)
        assert harness.storage.state == before
        assert harness.storage.journal.digest_at(harness.storage.index) == digest


@story
async def test_snapshots_compact_the_journal_and_shorten_the_restart(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.server.controller.COMPACTION_MARGIN_ENTRIES", 2)
    async with Harness(small_snapshots(config, 5)) as harness:
        await submit_until(harness, lambda: bool(harness.engine.compacted))
        assert harness.storage.journal.base_index > 0
        before = harness.controller.state
        await harness.restart()
        assert harness.storage.replayed < 10
        assert state_digest(harness.storage.state) == state_digest(before)
        # Compacted entries are still in the history.
        history = await harness.ask("GET", "/v1/jobs/1/history", who="alice")
        assert history.body["rows"][0]["event"] == "job_submitted"
        assert (await harness.ask("GET", "/v1/ledger?from=1&limit=2")).body["entries"][0]["index"] == 1


@story
async def test_damaged_snapshot_is_skipped_and_all_entries_are_folded(config: Config) -> None:
    async with Harness(config) as harness:
        await submit_many(harness, 5)
        saved = await harness.ask("POST", "/v1/snapshots")
        before = harness.controller.state
        await harness.close()
        path = Path(saved.body["path"])
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
        await harness.open()
        assert harness.storage.replayed == harness.storage.index
        assert state_digest(harness.storage.state) == state_digest(before)


@story
async def test_leader_with_only_damaged_snapshots_makes_one_for_a_peer(config: Config) -> None:
    """Found by the simulator, seed 3003362: a peer that needed compacted entries waited forever."""
    async with Harness(small_snapshots(config, 5)) as harness:
        for _ in range(3):
            await harness.submit()
        await until(lambda: harness.controller.snapshot_index > 0 and not harness.controller.snapshots.saving)
    for path in config.snapshot_directory("r1").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    async with Harness(config) as harness:
        assert harness.controller.newest_snapshot() is None
        await until(lambda: harness.controller.newest_snapshot() is not None)
        made = harness.controller.newest_snapshot()
        assert made is not None and load_snapshot(made.path).state == harness.controller.state


@story
async def test_snapshot_of_another_history_is_skipped(config: Config, tmp_path: Path) -> None:
    other = placed(config, tmp_path / "other")
    async with Harness(other) as harness:
        await submit_many(harness, 3)
        await harness.ask("POST", "/v1/snapshots")
    async with Harness(config) as harness:
        await submit_many(harness, 6)
        before = harness.controller.state
        await harness.close()
        shutil.copytree(other.snapshot_directory("r1"), config.snapshot_directory("r1"), dirs_exist_ok=True)
        await harness.open()
        assert harness.storage.replayed == harness.storage.index
        assert state_digest(harness.storage.state) == state_digest(before)


@story
async def test_lost_journal_beside_snapshots_is_rejected(config: Config) -> None:
    async with Harness(config) as harness:
        await submit_many(harness, 3)
        await harness.ask("POST", "/v1/snapshots")
        await harness.close()
        kept = config.wal_directory("r1").with_name("kept")
        config.wal_directory("r1").rename(kept)
        with pytest.raises(StorageRefused):
            open_storage(config, "r1")
        shutil.rmtree(config.wal_directory("r1"), ignore_errors=True)
        kept.rename(config.wal_directory("r1"))
        await harness.open()


@story
async def test_installed_snapshot_replaces_the_state_and_leaves_a_gap(config: Config, tmp_path: Path) -> None:
    source = placed(config, tmp_path / "source")
    async with Harness(source) as leader:
        await submit_many(leader, 20)
        saved = await leader.ask("POST", "/v1/snapshots")
        await submit_many(leader, 2)
        data = Path(saved.body["path"]).read_bytes()
        async with Harness(config) as harness:
            await submit_many(harness, 1)
            own = harness.controller.state.revision
            harness.engine.depose(None)
            waiting = asyncio.ensure_future(harness.controller.wait_applied(saved.body["index"]))
            sink = harness.controller.begin_install(saved.body["index"], saved.body["term"])
            for offset in range(0, len(data), 1000):
                sink.write(offset, data[offset : offset + 1000])
            await installed(sink)
            await waiting
            assert harness.controller.applied_index == saved.body["index"]
            assert harness.controller.state.revision == saved.body["revision"]
            assert len(harness.controller.state.jobs) == 20
            newest = harness.controller.newest_snapshot()
            assert newest is not None and newest.index == saved.body["index"]
            before = harness.controller.state.revision - 1
            why = await harness.ask("GET", f"/v1/jobs/1/why?at={before}&stale=ok")
            assert (why.status, why.code) == (410, "history_not_held")
            # The history continues with the leader's next entries.
            for applied in await leader.applied(harness.controller.applied_index + 1):
                assert applied.batch is not None
                harness.storage.journal.set_term(
                    max(applied.term, harness.storage.journal.term), harness.storage.journal.voted_for
                )
                entry = leader.storage.journal.entry(applied.index)
                harness.storage.journal.append([entry])
                harness.controller.apply(entry.index, entry.term, entry.data)
            assert harness.controller.applied_digest == leader.controller.applied_digest
            assert state_digest(harness.controller.state) == state_digest(leader.controller.state)
            await harness.restart()
            assert len(harness.controller.state.jobs) == 22
            status = await harness.ask("GET", "/v1/ledger")
            assert status.body["entries"][0]["index"] <= saved.body["index"] + 1
            gap = await harness.ask("GET", f"/v1/events?from={own}", who="alice")
            assert (gap.status, gap.code) == (410, "history_not_held")
            # A reader that reaches the gap is told so, and gets no entries after it.
            stream = await harness.ask("GET", f"/v1/events?from={own - 1}", who="alice")
            events, comment = stream.body.decode().rsplit("\n\n: ", 1)
            assert [line for line in events.splitlines() if line.startswith("id: ")] == [f"id: {own}"]
            assert comment == f"revisions after {own} are not held here; ask another replica\n\n"
            # No entry after the gap counts as void, which the base check would have caused.
            entries = await harness.applied()
            assert not any(applied.void for applied in entries)
            assert entries[-1].revision == harness.controller.state.revision
            why = await harness.ask("GET", f"/v1/jobs/1/why?at={own + 1}", who="alice")
            assert (why.status, why.code) == (410, "history_not_held")


@story
async def test_lost_snapshot_before_a_ledger_gap_is_rejected_at_start(config: Config, tmp_path: Path) -> None:
    source = placed(config, tmp_path / "source")
    async with Harness(source) as leader:
        await submit_many(leader, 5)
        saved = await leader.ask("POST", "/v1/snapshots")
        data = Path(saved.body["path"]).read_bytes()
    async with Harness(config) as harness:
        harness.engine.depose(None)
        sink = harness.controller.begin_install(saved.body["index"], saved.body["term"])
        sink.write(0, data)
        await installed(sink)
        await harness.close()
        (path,) = config.snapshot_directory("r1").iterdir()
        kept = path.read_bytes()
        path.write_bytes(kept[:-10])
        with pytest.raises(StorageRefused, match="restore it"):
            open_storage(config, "r1")
        path.write_bytes(kept)
        await harness.open()


@story
async def test_replica_killed_before_installation_starts_from_the_older_snapshot(
    config: Config, tmp_path: Path
) -> None:
    """The file is ahead of the applied mark, and the ledger has a gap, so the older snapshot must be used."""
    source = placed(config, tmp_path / "source")
    async with Harness(source) as leader:
        saved = []
        for _ in range(2):
            await submit_many(leader, 5)
            saved.append((await leader.ask("POST", "/v1/snapshots")).body)
        files = [Path(one["path"]).read_bytes() for one in saved]
    async with Harness(config) as harness:
        harness.engine.depose(None)
        sink = harness.controller.begin_install(saved[0]["index"], saved[0]["term"])
        sink.write(0, files[0])
        await installed(sink)
        receiver = harness.controller.snapshots.receive(saved[1]["index"], saved[1]["term"])
        receiver.write(0, files[1])
        receiver.verify()
        receiver.finalize()
        await harness.close()
        assert len(list(config.snapshot_directory("r1").iterdir())) == 2
        await harness.open()
        assert harness.storage.index == saved[0]["index"]
        assert len(harness.storage.state.jobs) == 5


@story
async def test_replica_answers_while_a_received_snapshot_is_verified(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = placed(config, tmp_path / "source")
    async with Harness(source) as leader:
        await submit_many(leader, 20)
        saved = await leader.ask("POST", "/v1/snapshots")
        data = Path(saved.body["path"]).read_bytes()
    reached, go = threading.Event(), threading.Event()

    def slowly() -> None:
        reached.set()
        assert go.wait(30)

    async with Harness(config) as harness:
        await submit_many(harness, 1)
        monkeypatch.setattr(harness.controller.snapshots, "_breathe", slowly)
        sink = harness.controller.begin_install(saved.body["index"], saved.body["term"])
        sink.write(0, data)
        verified = asyncio.Event()
        sink.verify(verified.set)
        await asyncio.to_thread(reached.wait, 30)
        for _ in range(3):
            assert (await harness.ask("GET", "/v1/jobs?stale=ok")).status == 200
        assert not verified.is_set() and len(harness.controller.state.jobs) == 1
        go.set()
        await verified.wait()
        harness.engine.depose(None)
        sink.finish()
        assert len(harness.controller.state.jobs) == 20


@story
async def test_received_part_of_a_snapshot_is_not_received_again_after_a_restart(
    config: Config, tmp_path: Path
) -> None:
    source = placed(config, tmp_path / "source")
    async with Harness(source) as leader:
        await submit_many(leader, 20)
        saved = await leader.ask("POST", "/v1/snapshots")
        data = Path(saved.body["path"]).read_bytes()
    async with Harness(config) as harness:
        harness.engine.depose(None)
        sink = harness.controller.begin_install(saved.body["index"], saved.body["term"])
        assert sink.received_bytes == 0
        sink.write(0, data[:-40])
        await harness.close()
        await harness.open()
        harness.engine.depose(None)
        sink = harness.controller.begin_install(saved.body["index"], saved.body["term"])
        assert 0 < sink.received_bytes <= len(data) - 40
        sink.write(sink.received_bytes, data[sink.received_bytes :])
        await installed(sink)
        assert len(harness.controller.state.jobs) == 20


@story
async def test_failed_snapshot_is_logged_and_the_replica_continues(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(image: Image) -> Future[Path]:
        failed: Future[Path] = Future()
        failed.set_exception(SnapshotFailed("no space left on the device"))
        return failed

    async with Harness(small_snapshots(config, 3), raises=False) as harness:
        monkeypatch.setattr(harness.controller.snapshots, "save_in_background", refuse)
        await submit_many(harness, 8)
        answer = await harness.ask("POST", "/v1/snapshots")
        assert (answer.status, answer.code) == (507, "snapshot_failed")
        await until(lambda: harness.controller.snapshots_failed > 1)
        # The next attempt follows after a whole snapshot period, not with the next entry.
        assert harness.controller.snapshots_failed <= 4
        assert harness.controller.snapshot_index == 0
        await submit_many(harness, 1)


@story
async def test_broken_installation_is_rejected_and_the_replica_continues(config: Config, tmp_path: Path) -> None:
    async with Harness(config) as harness:
        await submit_many(harness, 1)
        before = harness.controller.state
        sink = harness.controller.begin_install(100, 3)
        sink.write(0, b"not a snapshot" * 100)
        with pytest.raises(Exception, match="snapshot"):
            await installed(sink)
        assert harness.controller.state is before
        assert (await harness.submit()).status == 201


def batch_of(harness: Harness, *events: object, base: int | None = None) -> bytes:
    state = harness.controller.state
    entry = Entry(b"", CONTROLLER, "test", events)  # type: ignore[arg-type]
    return encode_batch(Batch(Revision(state.revision if base is None else base), state.at, (entry,)))


@story
async def test_impossible_entry_stops_the_apply_path_and_changes_nothing(config: Config) -> None:
    async with Harness(config) as harness:
        state, index = harness.controller.state, harness.controller.applied_index
        term = harness.engine.term
        for number, data, error in (
            (index + 1, b"", CodecError),
            (index + 1, b"\x07unknown", CodecError),
            (index + 1, b"\x01\x01garbage", CodecError),
            (index + 1, b"\x00" + b"r" * 129, CodecError),
            (index + 1, batch_of(harness, JobReleased(99)), LedgerViolation),
            (index + 1, batch_of(harness, NodeResumed("nobody")), LedgerViolation),
            (index + 2, b"\x00", BrokenInvariant),
            (index, b"\x00", BrokenInvariant),
        ):
            with pytest.raises(error):
                harness.controller.apply(number, term, data)
            assert harness.controller.state is state
            assert harness.controller.applied_index == index


@story
async def test_batch_with_another_base_is_void_on_every_replica(config: Config) -> None:
    async with Harness(config) as harness:
        await submit_many(harness, 1)
        state = harness.controller.state
        harness.engine.propose(batch_of(harness, NodeResumed("nobody"), base=state.revision - 1))
        await until(lambda: harness.engine.uncommitted == 0)
        assert harness.controller.state == state
        assert harness.controller.entries_void == 1
        await submit_many(harness, 1)
        entries = (await harness.ask("GET", "/v1/ledger?limit=1000")).body["entries"]
        assert [entry["kind"] for entry in entries].count("void") == 1
        await harness.restart()
        entries_after = (await harness.ask("GET", "/v1/ledger?limit=1000")).body["entries"]
        assert entries_after[: len(entries)] == entries


@story
async def test_idle_replica_writes_nothing(config: Config) -> None:
    async with Harness(config) as harness:
        await submit_many(harness, 2)
        harness.storage.journal.flush_hints()
        last = harness.storage.environment._environment.info()["last_txnid"]  # type: ignore[union-attr]
        await harness.ask("GET", "/v1/jobs/1", who="alice")
        await harness.ask("GET", "/v1/jobs/1/history", who="alice")
        await asyncio.sleep(0.05)
        assert harness.storage.environment._environment.info()["last_txnid"] == last  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["data.mdb", "sync.log", "lock.mdb"])
@story
async def test_idle_replica_stops_when_its_files_are_replaced(
    config: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A restart would not find its later promises."""
    monkeypatch.setattr("forebay.cluster.server.duties.POLL_PERIOD_S", 0.05)
    async with Harness(config) as harness:
        await submit_many(harness, 1)
        await asyncio.sleep(0.2)
        assert not harness.failures
        file = config.wal_directory("r1") / name
        copy = file.with_name("copy")
        copy.write_bytes(file.read_bytes())
        copy.replace(file)
        await until(lambda: bool(harness.failures))
        assert f"{file} is not the file that this replica has open" in str(harness.failures[0])
        monkeypatch.setattr("forebay.cluster.server.duties.POLL_PERIOD_S", 60.0)
        # The next check is already scheduled, and precedes the end of this sleep.
        await asyncio.sleep(0.2)
        harness.failures.clear()
