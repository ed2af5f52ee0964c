"""A replica finds damage in its old history, and repairs it with a peer's entries, once these are proven."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from forebay.cluster.api.metrics.families import prometheus_text
from forebay.cluster.client import Client
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import PoolRequest
from forebay.cluster.serve import Replica
from forebay.cluster.server import history_fetch
from forebay.cluster.server.history_fetch import SCRUB_AGAIN_S, SCRUB_ROUND_S, Scrub, ScrubResults
from forebay.cluster.server.storage import Storage, open_storage
from forebay.cluster.system.clock import SystemClock
from forebay.wal import LedgerBroken, records, revision_after
from forebay.wal import ledger as ledgers
from forebay.wal.records import ChainRow, Entry
from tests.cluster.harness import PATIENCE_S, Harness, placed, story
from tests.cluster.server.test_history_fetch import Away
from tests.cluster.test_serve import make
from tests.wal.support import flip_value_in_file

JOBS = 20
CRC_BYTES = 4
AT = 7
"""Index of the damaged entry."""

Damage = Callable[[Storage], None]


@asynccontextmanager
async def copied(config: Config, directory: Path) -> AsyncIterator[Away]:
    """Yield a leader and a replica with the same history."""
    async with Harness(placed(config, directory / "source")) as leader:
        for _ in range(JOBS):
            assert (await leader.submit(hold=True)).status == 201
        await leader.close()
        shutil.copytree(directory / "source", directory / "copy", dirs_exist_ok=True)
        await leader.open()
        storage = open_storage(placed(config, directory / "copy"), "r1")
        try:
            yield Away(leader, storage)
        finally:
            storage.close()


def scrub_of(case: Away, found: ScrubResults, *peers: str) -> Scrub:
    return Scrub(
        case.storage.ledger,
        found=found,
        mend=lambda stretch, handed: ledgers.replace_damaged(case.storage.environment, stretch, handed),
        peers=lambda: peers,
        ask=case.ask,
        clock=SystemClock(),
        fail=case.fail,
    )


async def whole_round(scrub: Scrub) -> float:
    """Run a round; return the pause at its end."""
    while (rest_s := await scrub.step()) < SCRUB_AGAIN_S:
        pass
    return rest_s


def is_whole(storage: Storage) -> bool:
    try:
        storage.ledger.verify(revision_after=revision_after)
    except LedgerBroken:
        return False
    return True


def stored(storage: Storage, table: bytes, number: int) -> tuple[bytes, bytes]:
    key = records.index_key(number)
    with storage.environment.read() as transaction:
        value = transaction.get(key, db=storage.environment.table(table))
    assert value is not None
    return key, value


def flipped(table: bytes, *numbers: int) -> Damage:
    """Return a damage: flip one bit of a stored row, without the knowledge of the process that has the file open."""

    def damage(storage: Storage) -> None:
        for number in numbers:
            key, value = stored(storage, table, number)
            flip_value_in_file(storage.environment.directory, key, value[CRC_BYTES:])

    return damage


def put(table: bytes, number: int, value: Callable[[Storage, bytes], bytes | None]) -> Damage:
    """Return a damage: alter a row with a valid checksum, or delete it."""

    def damage(storage: Storage) -> None:
        key = records.index_key(number)
        made = value(storage, key)
        with storage.environment.write() as transaction:
            if made is None:
                transaction.delete(key, db=storage.environment.table(table))
            else:
                transaction.put(key, made, db=storage.environment.table(table))

    return damage


def both(*damages: Damage) -> Damage:
    def damage(storage: Storage) -> None:
        for one in damages:
            one(storage)

    return damage


def chain_row(revision: int) -> Callable[[Storage, bytes], bytes]:
    def value(storage: Storage, key: bytes) -> bytes:
        row = records.unpack_chain(key, stored(storage, records.CHAIN, records.key_index(key))[1])
        return records.pack_chain(key, ChainRow(row.digest, row.revision + revision))

    return value


def other_digest(storage: Storage, key: bytes) -> bytes:
    row = records.unpack_chain(key, stored(storage, records.CHAIN, records.key_index(key))[1])
    return records.pack_chain(key, ChainRow(bytes(records.DIGEST_BYTES), row.revision))


DAMAGES: dict[str, Damage] = {
    "entry flipped": flipped(records.ENTRIES, AT),
    "first entry flipped": flipped(records.ENTRIES, 1),
    "entries flipped in a row": flipped(records.ENTRIES, AT, AT + 1, AT + 2),
    "entries flipped apart": flipped(records.ENTRIES, AT, AT + 5),
    "entry deleted": put(records.ENTRIES, AT, lambda storage, key: None),
    "entry another": put(records.ENTRIES, AT, lambda storage, key: records.pack_entry(key, Entry(AT, 1, b"\x00"))),
    "entry unreadable": put(
        records.ENTRIES, AT, lambda storage, key: records.pack_entry(key, Entry(AT, 1, b"\x01\x01?"))
    ),
    "digest flipped": flipped(records.CHAIN, AT),
    "digests flipped": flipped(records.CHAIN, AT, AT + 1),
    "digest another": put(records.CHAIN, AT, other_digest),
    "digest deleted": put(records.CHAIN, AT, lambda storage, key: None),
    "revision of an entry another": put(records.CHAIN, AT, chain_row(revision=1)),
    "entry and digest flipped": both(flipped(records.ENTRIES, AT), flipped(records.CHAIN, AT)),
    "entry and digest before it flipped": both(flipped(records.ENTRIES, AT), flipped(records.CHAIN, AT - 1)),
    "revision flipped": flipped(records.REVISIONS, AT),
    "revision deleted": put(records.REVISIONS, AT, lambda storage, key: None),
    "revision redirected": put(records.REVISIONS, AT, lambda storage, key: records.pack_number(key, 3)),
}


@story
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_damage_in_old_history_is_repaired_from_a_peer_and_read_again(
    config: Config, tmp_path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    async with copied(config, tmp_path) as case:
        ledger, found = case.storage.ledger, ScrubResults()
        before = list(ledger.read(1, limit=1_000))
        revisions = [ledger.index_of_revision(at) for at in range(1, ledger.applied_revision + 1)]
        damage(case.storage)
        assert not is_whole(case.storage)
        assert await whole_round(scrub_of(case, found, "r9", "r1")) == SCRUB_ROUND_S
        assert is_whole(case.storage)
        assert list(ledger.read(1, limit=1_000)) == before
        assert [ledger.index_of_revision(at) for at in range(1, ledger.applied_revision + 1)] == revisions
        assert (found.damaged, found.verified_index) == ({}, ledger.applied_index)
        assert 0 < found.mended <= 5 and found.round_ended_s is not None
        assert "the ledger is broken at entry" in caplog.text and "were repaired" in caplog.text


@story
async def test_intact_ledger_is_checked_in_slices_without_requests(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_fetch, "SCRUB_ENTRIES", 4)
    async with copied(config, tmp_path) as case:
        found, seen = ScrubResults(), []
        scrub = scrub_of(case, found, "r1")
        while await scrub.step() < SCRUB_AGAIN_S:
            seen.append(found.verified_index)
        last = case.storage.ledger.applied_index
        assert seen == [*range(4, last, 4), last]
        assert (found.mended, found.damaged, case.asked) == (0, {}, [])


@story
async def test_damage_without_a_source_stays_named_until_a_peer_has_the_entries(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with copied(config, tmp_path) as case:
        flipped(records.ENTRIES, AT)(case.storage)
        found = ScrubResults()
        alone = scrub_of(case, found, "r9")
        for _ in range(2):
            assert await whole_round(alone) == SCRUB_AGAIN_S
            assert (found.damaged, found.damaged_entries, found.mended) == ({AT: AT}, 1, 0)
            assert found.verified_index == case.storage.ledger.applied_index, "later entries must still be checked"
        named = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert len(named) == 1, "logged once, not in each round"
        assert f"broken at entry {AT}" in named[0] and f"no peer returned entries {AT} to {AT}" in named[0]
        with pytest.raises(LedgerBroken):
            list(case.storage.ledger.read(AT, limit=1))
        assert await whole_round(scrub_of(case, found, "r1")) == SCRUB_ROUND_S
        assert (found.damaged, found.mended) == ({}, 1) and is_whole(case.storage)


@story
@pytest.mark.parametrize(
    "spoil",
    [{"data": b"\x00"}, {"revision_before": 1}, {"digest_before": "zz"}, {"digest_before": "00" * 32}, {"index": 5000}],
)
async def test_unproven_entries_of_a_peer_are_not_accepted(
    config: Config, tmp_path: Path, spoil: dict[str, Any]
) -> None:
    async with copied(config, tmp_path) as case:
        flipped(records.ENTRIES, AT)(case.storage)
        case.spoil, found = spoil, ScrubResults()
        assert await whole_round(scrub_of(case, found, "r2")) == SCRUB_AGAIN_S
        assert found.damaged == {AT: AT} and not is_whole(case.storage)
        assert await whole_round(scrub_of(case, found, "r2", "r1")) == SCRUB_ROUND_S
        assert is_whole(case.storage)


@story
async def test_two_replicas_with_different_damage_repair_each_other(config: Config, tmp_path: Path) -> None:
    async with copied(config, tmp_path) as case:
        flipped(records.ENTRIES, AT)(case.storage)
        flipped(records.ENTRIES, AT - 2)(case.leader.storage)
        assert await whole_round(scrub_of(case, ScrubResults(), "r1")) == SCRUB_ROUND_S
        assert is_whole(case.storage) and not is_whole(case.leader.storage)


@story
async def test_status_and_metrics_report_the_damage(config: Config, tmp_path: Path) -> None:
    async with Harness(placed(config, tmp_path / "alone")) as harness:
        for damaged, count in (({}, 0), ({3: 3, 7: 9}, 4)):
            harness.controller.scrubbed.damaged.update(damaged)
            harness.controller.scrubbed.round_ended_s = harness.clock.monotonic_s()
            answer = await harness.ask("GET", "/v1/status", who="r1")
            assert answer.body["damaged_entries"] == count
            text = (await harness.ask("GET", "/metrics", who="r1")).body.decode()
            assert f"forebay_ledger_damaged_entries {count}.0" in text
            assert "forebay_ledger_verified_age_seconds 0." in text


def test_damaged_file_of_a_running_replica_is_repaired_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_fetch, "SCRUB_PAUSE_S", 0.01)
    monkeypatch.setattr(history_fetch, "SCRUB_ROUND_S", 0.05)
    config = make(tmp_path / "site", 3)

    def fail(error: BaseException) -> NoReturn:
        raise AssertionError("a replica stopped") from error

    async def story() -> None:
        replicas = [Replica(config, one.name, clock=SystemClock(), fail=fail) for one in config.replicas]
        victim = replicas[1].controller
        try:
            for replica in replicas:
                await replica.start()
            async with Client.from_config(config, "operator") as client, asyncio.timeout(PATIENCE_S):
                for number in range(5):
                    request = PoolRequest(
                        command_id=client.new_command_id(), quantity=f"{100 + number}MiB", granularity="1MiB"
                    )
                    revision = (await client.call(ops.SET_POOL, request, name="fast")).revision
                while victim.state.revision < revision:
                    await asyncio.sleep(0.01)
                victim.journal.flush_hints()
                index = victim.ledger.index_of_revision(2)
                held = list(victim.ledger.read(index, limit=1))
                flipped(records.ENTRIES, index)(victim._storage)
                with pytest.raises(LedgerBroken):
                    list(victim.ledger.read(index, limit=1))
                while not victim.scrubbed.mended:
                    await asyncio.sleep(0.01)
                assert list(victim.ledger.read(index, limit=1)) == held
                service = replicas[1].service
                text = prometheus_text(service.metrics.families(), service.metrics.pid).decode()
                assert "forebay_ledger_repaired_entries_total 1.0" in text
                assert "forebay_ledger_damaged_entries 0.0" in text
        finally:
            for replica in replicas:
                await replica.stop()

    asyncio.run(story())
