"""A witness cosigns only continuations of its last checkpoint, after they are recorded on disk."""

from __future__ import annotations

import base64
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.security.proofs import (
    SIZE_TYPE,
    AddCheckpoint,
    NoteError,
    WitnessRequestError,
    cosignature_in,
    parse_key,
    parse_request,
    parse_signer,
    parse_size,
    write_signer,
)
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.witness import (
    CheckpointStore,
    CheckpointWitness,
    SeenCheckpoint,
    WitnessError,
    WitnessResponse,
    log_of,
    logs_in,
    make_key,
    read_key,
)
from forebay.cluster.witness import checkpoint_store as store_module
from forebay.replica.values.units import Instant
from tests.cluster.witness.logs import ORIGIN, PRIVATE, MemoryLog, keys_of

SOUND = MemoryLog(300)
AT_S = 1_800_000_000


class Standing(SystemClock):
    def now(self) -> Instant:
        return Instant(AT_S * 1_000_000)


class Kept:
    """Witness with its files, which can be reopened."""

    def __init__(self, directory: Path, replicas: int = 3) -> None:
        self.key_file, self.db = directory / "key", directory / "key.db"
        self.public = make_key(self.key_file, "witness.example/w1")
        CheckpointStore.create(self.db, str(self.public))
        self.replicas = replicas
        self.witness = self.opened()

    def opened(self) -> CheckpointWitness:
        name, private = read_key(self.key_file)
        seen = CheckpointStore(self.db, str(self.public))
        return CheckpointWitness(name, private, [log_of(ORIGIN, keys_of(self.replicas))], seen, Standing())

    def asked(self, log: MemoryLog, old_size: int, size: int, signers: int = 3) -> WitnessResponse:
        answer = self.witness.add_checkpoint(log.asked(old_size, size, signers))
        if answer.status == 200:
            text = log.checkpoint(size).text()
            _, verified = cosignature_in(text, answer.body.encode(), self.public)
            assert verified.at_s == AT_S
        return answer

    def evidence(self) -> list[str]:
        seen = CheckpointStore(self.db, str(self.public))
        try:
            return [one.note for one in seen.read_all()[1]]
        finally:
            seen.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    yield Kept(tmp_path)


def conflict(size: int) -> WitnessResponse:
    return WitnessResponse(409, f"{size}\n", SIZE_TYPE)


def test_continuation_is_cosigned_even_after_a_restart(kept: Kept) -> None:
    at = 0
    for size in (1, 2, 7, 7, 8, 255, 256, 300):
        assert kept.asked(SOUND, at, size).status == 200
        at = size
        kept.witness = kept.opened()
    assert kept.asked(SOUND, 0, 300) == conflict(300)
    assert kept.evidence() == []


def test_log_that_was_set_back_is_rejected(kept: Kept) -> None:
    assert kept.asked(SOUND, 0, 200).status == 200
    for old, size in ((0, 100), (100, 150), (150, 199)):
        assert kept.asked(SOUND, old, size) == conflict(200)
    # A log that was set back and has grown again is rejected too.
    regrown = MemoryLog(300, forked_from=150)
    assert kept.asked(regrown, 0, 250) == conflict(200)
    assert kept.asked(regrown, 200, 250).status == 422
    assert kept.evidence() == [regrown.note(250).decode()]
    assert kept.asked(SOUND, 200, 201).status == 200


def test_second_root_of_one_size_is_rejected_and_kept_as_evidence(kept: Kept) -> None:
    fork = MemoryLog(300, forked_from=40)
    assert kept.asked(SOUND, 0, 100).status == 200
    assert kept.asked(fork, 100, 100) == conflict(100)
    assert kept.asked(fork, 0, 100) == conflict(100)
    assert kept.evidence() == [fork.note(100).decode()]
    assert kept.asked(SOUND, 100, 100).status == 200


@pytest.mark.parametrize(("replicas", "least"), [(1, 1), (3, 2), (5, 3)])
def test_checkpoint_without_signatures_of_a_majority_is_rejected(tmp_path: Path, replicas: int, least: int) -> None:
    kept = Kept(tmp_path, replicas)
    for signers in range(1, least):
        answer = kept.asked(SOUND, 0, 10, signers)
        assert (answer.status, f"a majority is {least}" in answer.body) == (403, True)
    assert kept.asked(SOUND, 0, 10, least).status == 200


def test_several_signatures_of_one_replica_are_no_majority(kept: Kept) -> None:
    text, empty, line = SOUND.note(10, signers=1).decode().rpartition("\n\n")
    body = AddCheckpoint(0, (), (text + empty + 3 * line).encode()).encode()
    assert kept.witness.add_checkpoint(body).status == 403


def test_invalid_request_gets_the_status_of_the_protocol(kept: Kept) -> None:
    assert kept.asked(SOUND, 0, 100).status == 200
    good = parse_request(SOUND.asked(100, 200))
    note, proof = good.note, good.proof

    def status(old_size: int, hashes: tuple[bytes, ...], held: bytes = note) -> int:
        return kept.witness.add_checkpoint(AddCheckpoint(old_size, hashes, held).encode()).status

    assert status(201, ()) == 400
    for bad in (proof[:-1], proof[1:], (*proof, bytes(32)), proof[::-1], (bytes(32), *proof[1:]), ()):
        assert status(100, bad) == 422, bad
    assert status(100, proof, MemoryLog(200, origin="forebay/other").note(200)) == 404
    strangers = note.replace(note.splitlines()[4][-40:], note.splitlines()[5][-40:])
    assert status(100, proof, strangers) == 403
    for head in (
        b"",
        b"old",
        b"old -1",
        b"old 01",
        b"old 1 ",
        b"Old 1",
        b"old 18446744073709551616",
        b"old 100\n!",
        b"\xff",
    ):
        assert kept.witness.add_checkpoint(head + b"\n\n" + note).status == 400, head
    for held in (b"", b"nothing", note[:-1], note.replace(b"200\n", b"0200\n"), note.replace(b"200\n", b"two\n")):
        assert kept.witness.add_checkpoint(b"old 100\n\n" + held).status == 400, held
    many = "".join(base64.b64encode(bytes(32)).decode() + "\n" for _ in range(64)).encode()
    assert kept.witness.add_checkpoint(b"old 100\n" + many + b"\n" + note).status == 400
    assert kept.witness.add_checkpoint(b"old 100\n" + many[45:] + b"\n" + note).status == 422
    assert kept.witness.add_checkpoint(b"old 100\n\n" + b"x" * 100_000).status == 400
    assert status(100, proof) == 200


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 12), st.integers(1, 12)), max_size=12))
def test_all_cosigned_checkpoints_belong_to_one_log(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, int, int]]
) -> None:
    kept = Kept(tmp_path_factory.mktemp("kept"))
    logs = [MemoryLog(12), MemoryLog(12, forked_from=4), MemoryLog(12, forked_from=8)]
    cosigned: list[tuple[int, bytes]] = [(0, b"")]
    for which, old_size, size in moves:
        if kept.asked(logs[which], old_size, size).status == 200:
            assert size >= cosigned[-1][0]
            cosigned.append((size, logs[which].checkpoint(size).root))
    assert any(all(one.checkpoint(size).root == root for size, root in cosigned[1:]) for one in logs)


def test_nothing_is_cosigned_before_it_is_on_disk(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LOCK_WAIT_S", 0.01)
    kept.witness = kept.opened()
    for lock in ("IMMEDIATE", "EXCLUSIVE"):
        connection = sqlite3.connect(kept.db, isolation_level=None)
        connection.execute(f"BEGIN {lock}")
        assert kept.asked(SOUND, 0, 5) == WitnessResponse(500, "this witness cannot record its cosignatures\n"), lock
        connection.close()
    assert kept.asked(SOUND, 0, 5).status == 200


def test_two_processes_with_one_database_cosign_only_one_continuation(kept: Kept) -> None:
    fork = MemoryLog(300, forked_from=40)
    quicker: list[int] = []

    class Slow(CheckpointStore):
        """Store in which another process cosigns after the state was read."""

        def last(self, origin: str) -> SeenCheckpoint:
            found = super().last(origin)
            if not quicker:
                quicker.append(kept.asked(SOUND, 0, 100).status)
            return found

    log = log_of(ORIGIN, keys_of(3))
    other = CheckpointWitness(*read_key(kept.key_file), [log], Slow(kept.db, str(kept.public)), Standing())
    assert other.add_checkpoint(fork.asked(0, 120)) == conflict(100)
    assert quicker == [200]


def test_witness_without_its_database_does_not_continue_with_the_same_key(kept: Kept, tmp_path: Path) -> None:
    kept.db.rename(tmp_path / "away")
    with pytest.raises(WitnessError, match="must not continue with the same key"):
        kept.opened()
    other = make_key(tmp_path / "other", "witness.example/w2")
    CheckpointStore.create(kept.db, str(other))
    with pytest.raises(WitnessError, match="belongs to another key"):
        kept.opened()
    kept.db.write_bytes(b"nothing of SQLite" * 100)
    with pytest.raises(WitnessError):
        kept.opened()
    with pytest.raises(WitnessError, match="already exists"):
        CheckpointStore.create(kept.db, str(kept.public))


def test_evidence_is_bounded_for_each_log(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "EVIDENCE_MAX", 3)
    assert kept.asked(SOUND, 0, 100).status == 200
    for _ in range(2):
        for forked_from in range(40, 46):
            assert kept.asked(MemoryLog(300, forked_from), 100, 100) == conflict(100)
    assert kept.evidence() == [MemoryLog(300, one).note(100).decode() for one in (40, 41, 42)]


def test_key_file_is_private_never_overwritten_and_survives_reading(tmp_path: Path) -> None:
    path = tmp_path / "key"
    public = make_key(path, "witness.example/w1")
    assert path.stat().st_mode & 0o777 == 0o600
    name, private = read_key(path)
    assert (name, private.public_key().public_bytes_raw()) == (public.name, public.public)
    assert parse_key(str(public)) == public
    with pytest.raises(WitnessError, match="already exists"):
        make_key(path, "witness.example/w1")
    with pytest.raises(WitnessError, match="cannot be the name"):
        make_key(tmp_path / "another", "has a blank")
    held = path.read_text()
    for broken in ("", "x", held[:-3], held.replace("w1", "w2"), held.replace("PRIVATE", "public")):
        path.write_text(broken)
        with pytest.raises(WitnessError, match="is not a witness key"):
            read_key(path)
    path.write_text(held)
    path.chmod(0o640)
    with pytest.raises(WitnessError, match="others may use it"):
        read_key(path)
    with pytest.raises(WitnessError, match="cannot be read"):
        read_key(tmp_path / "none")
    with pytest.raises(NoteError):
        parse_signer(write_signer("a", PRIVATE[0]).replace("+a+", "+b+"))
    # A key of another kind and a key of another length; everything else is valid.
    *before, encoded = held.strip().split("+", 4)
    key = base64.b64decode(encoded)
    for other in (bytes([key[0] + 1]) + key[1:], key + b"x", key[:-1]):
        with pytest.raises(NoteError, match="not the key of a cosigner"):
            parse_signer("+".join((*before, base64.b64encode(other).decode())) + "\n")


def test_key_is_on_disk_before_its_public_key_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    make_key(tmp_path / "key", "witness.example.org/f")
    assert synced == [tmp_path / "key", tmp_path], "first the content, then the directory entry"


def test_failed_write_of_a_key_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(WitnessError, match="No space left"):
            make_key(tmp_path / "key", "witness.example.org/f")
    assert not [*tmp_path.iterdir()]
    make_key(tmp_path / "key", "witness.example.org/f")


def test_printed_keys_of_a_log_are_read_and_invalid_ones_rejected() -> None:
    printed = "".join(f"# r{number}\n{key}\n" for number, key in enumerate(keys_of(3), start=1))
    mine = keys_of(2, "forebay/c2")
    assert logs_in(printed + f"{mine[0]}\n{mine[1]}\n\n") == [log_of(ORIGIN, keys_of(3)), log_of("forebay/c2", mine)]
    assert log_of(ORIGIN, [*keys_of(2), *keys_of(2)]).least == 2
    for wrong in (printed.replace("forebay/c1+", "forebay/c9+", 1), "nothing\n"):
        with pytest.raises(WitnessError):
            logs_in(wrong)
    for keys in ([], mine):
        with pytest.raises(WitnessError):
            log_of(ORIGIN, keys)


def test_answer_with_a_size_has_the_size_and_a_newline() -> None:
    assert parse_size(b"20852014\n") == 20_852_014
    for wrong in (b"", b"12", b"012\n", b"-1\n", b"1\n2\n", b"18446744073709551616\n"):
        with pytest.raises(WitnessRequestError):
            parse_size(wrong)
