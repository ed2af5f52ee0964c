"""Audits of a real ledger: equal digests for every way of folding, and every damage is found."""

import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgspec
import pytest
from click.testing import Result

from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.api.render.events import BATCH, CONFIGURATION, NO_OP, VOID
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.ledger import LedgerEntryView, SnapshotView
from forebay.replica.fold.apply import apply_batch, apply_entry
from forebay.replica.state.digest import state_digest
from forebay.replica.state.state import EMPTY
from forebay.replica.values.units import Instant
from forebay.snapshots.finalize import write_snapshot
from forebay.snapshots.image import Image
from forebay.wal.codec import encode_batch
from forebay.wal.environment import Environment
from forebay.wal.job_index import JobIndex, JobIndexRow
from forebay.wal.journal import Entry, Journal
from forebay.wal.ledger import Ledger
from forebay.wal.records import (
    CHAIN,
    ENTRIES,
    MARKS_KEY,
    REVISIONS,
    STATE,
    index_key,
    pack_chain,
    pack_marks,
    pack_number,
    unpack_chain,
    unpack_marks,
)
from tests.cluster.audit.ledgers import CLUSTER, MAP_SIZE_BYTES, REPLICA, Made, lived, make, real, typed
from tests.wal.support import edit


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("r1"))


def test_a_full_replay_gives_the_replicas_state_and_digest(made: Made) -> None:
    result = typed("audit", "replay", "--data", made.directory, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = msgspec.json.decode(result.stdout)
    assert found["revision"] == made.state.revision
    assert found["state_digest"] == made.state_digest
    assert found["ledger_digest"] == made.applied_digest
    assert (found["first_index"], found["last_index"], found["entries"]) == (1, len(made.entries), len(made.entries))
    assert (found["no_ops"], found["void_batches"]) == (2, 1)
    assert found["batches"] == len(made.entries) - 3


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_the_digest_does_not_depend_on_the_hash_seed(made: Made, seed: str) -> None:
    found = real("audit", "replay", "--data", made.directory, "--expect", made.state_digest, PYTHONHASHSEED=seed)
    assert (found.returncode, found.stderr) == (0, "")
    assert made.state_digest in found.stdout


def test_replay_at_every_revision_gives_the_state_at_that_revision(made: Made) -> None:
    state = EMPTY
    for batch in lived():
        for record in batch.entries:
            state = apply_entry(state, record, batch.at)
            found = typed("audit", "replay", "--data", made.directory, "--at", state.revision, "--json")
            assert msgspec.json.decode(found.stdout)["state_digest"] == state_digest(state).hex()
    assert state == made.state


def test_a_revision_inside_a_batch_can_be_replayed(tmp_path: Path) -> None:
    batches = lived()
    state = EMPTY
    for batch in batches[:4]:
        state = apply_batch(state, batch) or state
    records = tuple(record for batch in batches[4:6] for record in batch.entries)
    merged = msgspec.structs.replace(batches[4], entries=records, at=batches[4].at)
    middle = apply_entry(state, records[0], merged.at)
    with Environment.open(
        tmp_path / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        journal = Journal(environment)
        journal.set_term(1, REPLICA)
        data = [encode_batch(batch) for batch in [*batches[:4], merged]]
        journal.append([Entry(index, 1, one) for index, one in enumerate(data, start=1)])
        journal.set_commit(len(data))
        revision = 0
        for index, batch in enumerate([*batches[:4], merged], start=1):
            revision += len(batch.entries)
            journal.record_applied(journal.entry(index), revision)
        journal.sync()
    found = typed("audit", "replay", "--data", tmp_path, "--at", middle.revision, "--json")
    assert msgspec.json.decode(found.stdout)["state_digest"] == state_digest(middle).hex()
    assert len(merged.entries) > 1


@pytest.mark.parametrize("at", [999_999, 10**15])
def test_an_unsettled_revision_is_not_found(made: Made, at: int) -> None:
    result = typed("audit", "replay", "--data", made.directory, "--at", at)
    assert result.exit_code == ExitCode.NOT_FOUND
    assert f"the last one is {made.state.revision}" in result.stderr


def test_an_unexpected_digest_fails_verification(made: Made) -> None:
    assert typed("audit", "replay", "--data", made.directory, "--expect", made.state_digest[:16]).exit_code == 0
    result = typed("audit", "replay", "--data", made.directory, "--expect", "00" * 32)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert made.state_digest in result.stderr
    assert typed("audit", "replay", "--data", made.directory, "--expect", "xyz").exit_code == ExitCode.BAD_INPUT


def test_verify_recomputes_the_digest_chain(made: Made) -> None:
    result = typed("audit", "verify", "--data", made.directory / "wal", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = msgspec.json.decode(result.stdout)
    assert found == {
        "verified": True,
        "entries": len(made.entries),
        "first_index": 1,
        "last_index": len(made.entries),
        "revision": made.state.revision,
        "ledger_digest": made.applied_digest,
        "missing": [],
        "pruned": None,
    }


def test_a_rewritten_history_differs_from_a_kept_digest(made: Made) -> None:
    """A rewritten ledger is consistent in itself; only a digest noted elsewhere shows the difference."""

    def verified(*words: str) -> tuple[int, str]:
        result = typed("audit", "verify", "--data", made.directory, *words)
        return result.exit_code, result.stderr

    last = len(made.entries)
    for index, digits in ((last, 64), (4, 64), (4, 8)):
        kept = made.digests[index - 1].hex()[:digits]
        assert verified("--expect", f"{kept.upper()}@{index}", "--cluster", CLUSTER, "--complete") == (0, "")
        other = ("0" if kept[0] != "0" else "1") + kept[1:]
        code, said = verified("--expect", f"{other}@{index}")
        assert (
            code == ExitCode.VERIFICATION_FAILED
            and f"up to entry {index} has digest {made.digests[index - 1].hex()}" in said
        )
    assert verified("--expect", f"{made.applied_digest}@{last + 1}")[0] == ExitCode.NOT_FOUND
    code, said = verified("--cluster", "another")
    assert code == ExitCode.VERIFICATION_FAILED and f"belongs to cluster '{CLUSTER}'" in said
    for wrong in (
        "",
        "@4",
        "abc@4",
        made.applied_digest,
        f"{made.applied_digest}@",
        f"{made.applied_digest}@x",
        "zz" * 32 + "@4",
    ):
        code, said = verified("--expect", wrong)
        assert code == ExitCode.BAD_INPUT and "DIGEST@INDEX" in said


def test_a_wrong_recorded_revision_is_found_from_the_entry(tmp_path: Path) -> None:
    made = make(tmp_path)

    def alter(transaction: lmdb.Transaction, tables: dict[bytes, lmdb._Database]) -> None:
        # Of entries that settle nothing: no row of a revision speaks against it.
        last = len(made.entries)
        key = index_key(last)
        row = unpack_chain(key, transaction.get(key, db=tables[CHAIN]) or b"")
        transaction.put(key, pack_chain(key, row._replace(revision=row.revision + 1)), db=tables[CHAIN])
        transaction.put(
            index_key(row.revision + 1), pack_number(index_key(row.revision + 1), last), db=tables[REVISIONS]
        )
        transaction.delete(index_key(row.revision), db=tables[REVISIONS])
        marks = unpack_marks(transaction.get(MARKS_KEY, db=tables[STATE]) or b"")
        transaction.put(MARKS_KEY, pack_marks(marks._replace(applied_revision=row.revision + 1)), db=tables[STATE])

    edit(tmp_path / "wal", alter)
    result = typed("audit", "verify", "--data", made.directory)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert "its data gives revision" in result.stderr


@pytest.mark.parametrize("command", [["verify"], ["replay"], ["dump"]])
def test_every_command_finds_one_flipped_bit(tmp_path: Path, command: list[str]) -> None:
    made = make(tmp_path)

    def flip(transaction: lmdb.Transaction, tables: dict[bytes, lmdb._Database]) -> None:
        key = index_key(4)
        value = bytearray(transaction.get(key, db=tables[ENTRIES]) or b"")
        value[-1] ^= 1
        transaction.put(key, bytes(value), db=tables[ENTRIES])

    edit(tmp_path / "wal", flip)
    result = typed("audit", *command, "--data", made.directory)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert "entry 4" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_empty_ledger_is_reported_as_empty(tmp_path: Path) -> None:
    Environment.open(
        tmp_path / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=True
    ).close()
    result = typed("audit", "verify", "--data", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "nothing: the ledger is empty" in result.stdout
    assert "1 to 0" not in result.stdout


def test_a_dump_is_one_json_line_per_entry(made: Made) -> None:
    result = typed("audit", "dump", "--data", made.directory)
    rows = [msgspec.json.decode(line, type=LedgerEntryView) for line in result.stdout.splitlines()]
    assert [row.index for row in rows] == list(range(1, len(made.entries) + 1))
    assert [row.kind for row in rows[:6]] == [CONFIGURATION, BATCH, BATCH, BATCH, VOID, NO_OP]
    assert (rows[0].records[0]["change"], rows[0].records[0]["voters"][0]["id"]) == ("found", REPLICA)
    assert rows[-1].digest == made.applied_digest
    assert rows[-1].revision == made.state.revision
    assert rows[1].records[0]["events"][0]["event"] == "cluster_founded"
    refused = [record for row in rows[1:] for record in row.records if record["rejection"] is not None]
    assert [record["command"] for record in refused] == ["submit_job"]


def test_a_dump_has_a_first_entry_and_a_limit(made: Made) -> None:
    whole = typed("audit", "dump", "--data", made.directory).stdout.splitlines()
    assert typed("audit", "dump", "--data", made.directory, "--from", 3, "--limit", 2).stdout.splitlines() == whole[2:4]
    assert typed("audit", "dump", "--data", made.directory, "--from", 999).stdout == ""


def test_a_running_replica_can_be_audited(tmp_path: Path) -> None:
    made = make(tmp_path)
    with Environment.open(
        tmp_path / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=False
    ) as environment:
        assert Journal(environment).applied_index == len(made.entries)
        found = real("audit", "replay", "--data", tmp_path, "--expect", made.state_digest)
        assert (found.returncode, found.stderr) == (0, "")
        assert real("audit", "verify", "--data", tmp_path).returncode == 0


def test_an_audit_does_not_change_the_directory(made: Made) -> None:
    before = (made.directory / "wal" / "data.mdb").read_bytes()
    for command in ("verify", "replay", "dump"):
        assert typed("audit", command, "--data", made.directory).exit_code == 0
    assert (made.directory / "wal" / "data.mdb").read_bytes() == before


def test_missing_history_is_named_and_bridged_by_a_snapshot(made: Made, tmp_path: Path) -> None:
    index = 7
    image = made.image(index)
    with Environment.open(
        tmp_path / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        journal = Journal(environment)
        journal.set_term(2, None)
        journal.reset_to(index, image.term, image.chain_digest, image.state.revision)
        journal.append(made.entries[index:])
        journal.set_commit(len(made.entries))
        for entry, after in zip(made.entries[index:], made.states[index:], strict=True):
            journal.record_applied(entry, after.revision)
        assert journal.applied_digest == made.digests[-1]
        journal.sync()
    refused = typed("audit", "replay", "--data", tmp_path)
    assert refused.exit_code == ExitCode.NOT_FOUND
    assert f"does not hold the entries 1 to {index}" in refused.stderr
    assert "--from-snapshot" in refused.stderr
    verified = typed("audit", "verify", "--data", tmp_path, "--json")
    assert msgspec.json.decode(verified.stdout)["missing"][0]["last_index"] == index
    incomplete = typed("audit", "verify", "--data", tmp_path, "--complete")
    assert (
        incomplete.exit_code == ExitCode.VERIFICATION_FAILED
        and f"entries 1 to {index} are missing" in incomplete.stderr
    )
    (tmp_path / "snapshots").mkdir()
    snapshot = write_snapshot(tmp_path / "snapshots", image)
    bridged = typed("audit", "replay", "--data", tmp_path, "--from-snapshot", snapshot, "--expect", made.state_digest)
    assert (bridged.exit_code, bridged.stderr) == (0, "")
    write_snapshot(tmp_path / "snapshots", made.image(5))
    write_snapshot(tmp_path / "snapshots", made.image(index + 2))
    deep = typed("audit", "verify", "--data", tmp_path, "--deep", "--json")
    assert [(one["index"], one["proven"]) for one in msgspec.json.decode(deep.stdout)["snapshots"]] == [
        (5, False), (index, False), (index + 2, True),
    ]  # fmt: skip
    snapshot.unlink()
    # The next snapshot replaces missing history; without a snapshot, the state is unknown.
    deep = typed("audit", "verify", "--data", tmp_path, "--deep", "--json")
    assert msgspec.json.decode(deep.stdout)["state_digest"] == made.state_digest
    shutil.rmtree(tmp_path / "snapshots")
    deep = typed("audit", "verify", "--data", tmp_path, "--deep")
    assert deep.exit_code == ExitCode.NOT_FOUND and "does not hold the entries 1 to" in deep.stderr


def _with_snapshots(made: Made, directory: Path, *images: Image) -> Path:
    """Return a copy of a replica's directory that has these snapshots."""
    shutil.copytree(made.directory / "wal", directory / "wal")
    (directory / "snapshots").mkdir()
    for image in images:
        write_snapshot(directory / "snapshots", image)
    return directory


def test_each_snapshot_is_compared_with_the_replayed_state(made: Made, tmp_path: Path) -> None:
    last = len(made.entries)
    directory = _with_snapshots(made, tmp_path, made.image(5), made.image(last))
    found = typed("audit", "verify", "--data", directory, "--deep", "--json")
    assert (found.exit_code, found.stderr) == (0, "")
    answer = msgspec.json.decode(found.stdout)
    assert answer["state_digest"] == made.state_digest
    assert [(one["index"], one["proven"]) for one in answer["snapshots"]] == [(5, True), (last, True)]
    shown = typed("audit", "verify", "--data", directory, "--deep").stdout
    assert shown.count("matches the ledger") == 2
    assert "snapshots" not in msgspec.json.decode(typed("audit", "verify", "--data", directory, "--json").stdout)


def _doubled_pool(image: Image) -> Image:
    name, pool = next(iter(image.state.pools.items()))
    pools = image.state.pools.set(name, msgspec.structs.replace(pool, quantity_bytes=2 * pool.quantity_bytes))
    return msgspec.structs.replace(image, state=msgspec.structs.replace(image.state, pools=pools))


def _other_moment(image: Image) -> Image:
    return msgspec.structs.replace(image, state=msgspec.structs.replace(image.state, at=Instant(image.state.at + 1)))


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        (_doubled_pool, "does not match the ledger: its state digest is"),
        (_other_moment, "does not match the ledger: its state digest is"),
        (lambda image: msgspec.structs.replace(image, chain_digest=bytes(32)), "belongs to another ledger"),
    ],
)
def test_a_forged_snapshot_with_valid_checksums_is_found(
    made: Made, tmp_path: Path, forged: Callable[[Image], Image], why: str
) -> None:
    directory = _with_snapshots(made, tmp_path, made.image(5), forged(made.image(7)))
    assert typed("audit", "verify", "--data", directory).exit_code == 0
    result = typed("audit", "verify", "--data", directory, "--deep")
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert "fails at entry 7" in result.stderr and "snapshot-00000000000000000007" in result.stderr
    assert why in result.stderr


def test_a_snapshot_of_a_nonexistent_entry_is_found(made: Made, tmp_path: Path) -> None:
    last = len(made.entries)
    beyond = msgspec.structs.replace(made.image(last), index=last + 3)
    result = typed("audit", "verify", "--data", _with_snapshots(made, tmp_path, beyond), "--deep")
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert f"is of entry {last + 3}, but the ledger ends here" in result.stderr


def test_a_snapshot_of_another_history_is_rejected(made: Made, tmp_path: Path) -> None:
    image = made.image(7)
    snapshot = write_snapshot(tmp_path, msgspec.structs.replace(image, chain_digest=bytes(32)))
    result = typed("audit", "replay", "--data", made.directory, "--from-snapshot", snapshot)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert "belongs to another ledger" in result.stderr


def test_inspect_shows_the_free_capacity_of_a_snapshot(made: Made, tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, made.image(len(made.entries)))
    for words in ([], ["--check"]):
        result = typed("backup", "inspect", path, "--json", *words)
        assert (result.exit_code, result.stderr) == (0, "")
        view = msgspec.json.decode(result.stdout, type=SnapshotView)
        assert (view.index, view.revision, view.jobs) == (len(made.entries), made.state.revision, len(made.state.jobs))
        free = {name: pool.usable_bytes - made.state.held_bytes.get(name, 0) for name, pool in made.state.pools.items()}
        assert {pool.name: pool.free_bytes for pool in view.pools} == free
    shown = typed("backup", "inspect", path)
    assert f"Revision      {made.state.revision}" in shown.stdout
    assert "\nLedgerDigest  " in shown.stdout and "\nDigest" not in shown.stdout


def test_a_damaged_snapshot_fails_verification_and_a_missing_one_is_not_found(made: Made, tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, made.image(7))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    damaged = typed("backup", "inspect", path)
    assert damaged.exit_code == ExitCode.VERIFICATION_FAILED
    assert str(path) in damaged.stderr
    assert typed("backup", "inspect", tmp_path / "none").exit_code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ([], ExitCode.BAD_INPUT, "--data"),
        (["--data", "x", "--name", "r1"], ExitCode.BAD_INPUT, "either"),
        (["--data", "/nonexistent/r1"], ExitCode.NOT_FOUND, "there is no ledger"),
    ],
)
def test_a_missing_ledger_is_reported_as_an_error(words: list[str], code: ExitCode, expected: str) -> None:
    for command in ("verify", "replay", "dump"):
        result = typed("audit", command, *words)
        assert result.exit_code == code
        assert expected in result.stderr
        assert "Traceback" not in result.stderr


def test_a_configured_replica_is_found_by_name(tmp_path: Path) -> None:
    assert real("cluster", "init", tmp_path / "c").returncode == 0
    config = tmp_path / "c" / "forebay.toml"
    made = make(tmp_path / "c" / "r1")
    found = real("--config", config, "audit", "verify", "--name", "r1")
    assert (found.returncode, found.stderr) == (0, "")
    assert made.applied_digest in found.stdout
    unknown = real("--config", config, "audit", "verify", "--name", "r9")
    assert unknown.returncode == ExitCode.BAD_INPUT
    assert "there is no replica 'r9'" in unknown.stderr


def test_an_index_that_contradicts_the_ledger_fails_verification(tmp_path: Path) -> None:
    made = make(tmp_path)

    def deep() -> Result:
        return typed("audit", "verify", "--data", tmp_path, "--deep", "--json")

    assert msgspec.json.decode(deep().stdout)["job_index"] is None
    index = JobIndex(tmp_path / "index")
    with Environment.open_readonly(tmp_path / "wal") as environment:
        follower = Follower(Ledger(environment), snapshots=tmp_path / "snapshots", index=index, monotonic_s=lambda: 0.0)
        while follower.step():
            pass
        follower.write()
    index.close()
    found = msgspec.json.decode(deep().stdout)["job_index"]
    assert found == {"index": len(made.entries), "revision": made.state.revision}
    index = JobIndex(tmp_path / "index")
    position = index.position
    index.add({2: [JobIndexRow(int(made.state.revision), b"a note too many")]}, position)
    index.close()
    result = deep()
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert "contradicts the ledger about job 2" in result.stderr and "rebuilds it" in result.stderr
    index.begin_anew()
    index.add({}, position._replace(digest=bytes(32)))
    index.close()
    assert "belongs to another ledger" in deep().stderr
    (tmp_path / "index" / "data.mdb").write_bytes(b"nothing of the kind")
    assert deep().exit_code == ExitCode.VERIFICATION_FAILED
