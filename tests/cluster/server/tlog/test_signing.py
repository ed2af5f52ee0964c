"""A replica signs its own ledger's roots, one per size, and stops if its history differs from a majority's."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay.cluster.server.tlog.signing
from forebay.cluster.security.proofs import VerifierKey, parse_checkpoint, parse_note, verify_note, write_note
from forebay.cluster.server.storage import StorageRefused
from forebay.cluster.server.tlog import (
    NOBODY,
    Cosigning,
    CountedHistories,
    Counting,
    LedgerAltered,
    LogPeers,
    NoteNotTaken,
    Publisher,
    SignedCheckpoint,
    Signer,
    SignRefused,
    origin_of,
)
from forebay.cluster.system import SystemClock
from forebay.replica.messages import RecordHistories
from forebay.wal import Incarnation
from tests.cluster.harness import story

ORIGIN = "forebay/0123"


class Stopped(Exception):
    """The replica has stopped."""


class Ledger:
    """Roots of an invented ledger, with another history from entry `altered` on."""

    def __init__(self, applied: int, altered: int = 1_000_000) -> None:
        self.applied, self.altered = applied, altered

    async def root(self, size: int) -> bytes:
        if size > self.applied:
            raise LookupError(f"{self.applied} are here")
        return hashlib.sha256(f"{size} {size >= self.altered}".encode()).digest()


def signer(directory: Path) -> Signer:
    return Signer(directory / "signing", ORIGIN)


@story
async def test_key_is_created_once_and_private_to_its_replica(tmp_path: Path) -> None:
    first = signer(tmp_path)
    assert (tmp_path / "signing/key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "signing").stat().st_mode & 0o777 == 0o700
    checkpoint, signature = await first.sign(7, Ledger(9).root)
    note = write_note(checkpoint.text(), [signature]).encode()
    assert verify_note(note, [signer(tmp_path).key])[0] == f"{ORIGIN}\n7\n{checkpoint.text().splitlines()[2]}\n"
    assert signer(tmp_path / "signing").key != first.key


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 4, 1_000_000]), st.booleans()), max_size=12))
def test_no_two_roots_of_a_size_are_signed_whatever_happens_to_the_ledger(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, int, bool]]
) -> None:
    directory = tmp_path_factory.mktemp("signer")

    async def live() -> None:
        one, signed = signer(directory), dict[int, bytes]()
        last = 0
        for size, altered, restarted in asked:
            one = signer(directory) if restarted else one
            try:
                checkpoint, _ = await one.sign(size, Ledger(6, altered).root)
            except (SignRefused, LedgerAltered):
                continue
            assert signed.setdefault(size, checkpoint.root) == checkpoint.root
            assert checkpoint.size >= last
            last = checkpoint.size

    asyncio.run(live())


@story
async def test_signature_is_returned_only_after_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = signer(tmp_path)
    await one.sign(3, Ledger(9).root)

    def full(path: Path, held: bytes) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(forebay.cluster.server.tlog.signing, "replace_private", full)
    with pytest.raises(SignRefused, match="no space left"):
        await one.sign(5, Ledger(9).root)
    monkeypatch.undo()
    for again in (one, signer(tmp_path)):
        assert again.last is not None and again.last.size == 3
        await again.sign(3, Ledger(9).root)


@story
async def test_ledger_rolled_back_or_rewritten_before_a_signature_is_detected(tmp_path: Path) -> None:
    await signer(tmp_path).sign(5, Ledger(9).root)
    with pytest.raises(SignRefused):
        await signer(tmp_path).sign(4, Ledger(4).root)
    with pytest.raises(LookupError):
        await signer(tmp_path).sign(5, Ledger(4).root)
    with pytest.raises(LedgerAltered, match="first 5 entries"):
        await signer(tmp_path).sign(8, Ledger(9, altered=3).root)
    with pytest.raises(LedgerAltered):
        await signer(tmp_path).sign(5, Ledger(9, altered=5).root)
    assert (await signer(tmp_path).sign(8, Ledger(9, altered=7).root))[0].size == 8


@story
async def test_replica_with_altered_signing_files_does_not_start(tmp_path: Path) -> None:
    await signer(tmp_path).sign(5, Ledger(9).root)
    files = tmp_path / "signing"
    for name in ("key", "signed"):
        whole = (files / name).read_bytes()
        for broken in (b"", whole[:-20], whole.replace(whole[20:24], b"AAAA")):
            (files / name).write_bytes(broken)
            with pytest.raises(StorageRefused, match="cluster replace"):
                signer(tmp_path)
        (files / name).write_bytes(whole)
    (files / "key").unlink()
    with pytest.raises(StorageRefused, match="is missing"):
        signer(tmp_path)


class Cluster:
    """Publishers that request signatures from each other, led by r1. Those in `away` do not answer."""

    def __init__(self, directory: Path, ledgers: dict[str, Ledger]) -> None:
        self.ledgers = ledgers
        self.away: set[str] = set()
        self.asked_for_notes: list[str] = []
        self.stopped: dict[str, str] = {}
        self.recorded: list[RecordHistories] = []
        self.in_ledger = b""
        self.counts = dict.fromkeys(ledgers, 5)
        self.publishers = {name: self._publisher(directory / name, name) for name in ledgers}

    def _publisher(self, home: Path, name: str) -> Publisher:
        home.mkdir(exist_ok=True)

        def fail(error: BaseException) -> NoReturn:
            self.stopped[name] = str(error)
            raise Stopped(name)

        return Publisher(
            signer(home),
            home / "tlog",
            name=name,
            leads=lambda: name == "r1",
            applied_index=lambda: self.ledgers[name].applied,
            tree_size=lambda: 0,
            root=self.ledgers[name].root,
            peers=lambda: tuple(peer for peer in self.ledgers if peer != name),
            asked=LogPeers(self._ask, self._hand, self._key_of, note_of=self._note_of, count_of=self._count_of),
            counting=Counting(lambda size: self._counted(name, size), self.recorded.append),
            cosigning=Cosigning(
                (),
                0,
                submit=NOBODY.submit,
                consistency=NOBODY.submit,
                applied_index=lambda: self.ledgers[name].applied,
                clock=SystemClock(),
            ),
            clock=SystemClock(),
            fail=fail,
        )

    def reached(self, peer: str) -> Publisher:
        if peer in self.away or peer in self.stopped:
            raise LookupError(f"{peer} does not answer")
        return self.publishers[peer]

    async def _ask(self, peer: str, size: int, root: bytes) -> SignedCheckpoint:
        return await self.reached(peer).sign(size, root.hex())

    async def _hand(self, peer: str, note: str) -> None:
        await self.reached(peer).take(note)

    async def _key_of(self, peer: str) -> VerifierKey:
        return self.reached(peer).key

    async def _note_of(self, peer: str) -> str:
        self.asked_for_notes.append(peer)
        return self.reached(peer).note

    async def _counted(self, name: str, size: int) -> tuple[CountedHistories, bytes]:
        if not self.counts[name]:
            raise LookupError("history is missing here")
        return CountedHistories(self.counts[name], bytes([self.counts[name]]) * 32), self.in_ledger

    async def _count_of(self, peer: str, size: int, root: bytes) -> CountedHistories | None:
        await self.reached(peer).sign(size, root.hex())
        return (await self._counted(peer, size))[0]

    async def publish(self) -> bool:
        return await self.publishers["r1"].publish()

    def sizes(self) -> dict[str, int]:
        return {name: one.size for name, one in self.publishers.items()}


def three(directory: Path, **altered: int) -> Cluster:
    return Cluster(directory, {name: Ledger(20, altered.get(name, 1_000_000)) for name in ("r1", "r2", "r3")})


@story
async def test_checkpoint_has_all_replicas_signatures_and_reaches_all(tmp_path: Path) -> None:
    them = three(tmp_path)
    assert await them.publish()
    assert them.sizes() == {"r1": 20, "r2": 20, "r3": 20}
    keys = [one.key for one in them.publishers.values()]
    for name, one in them.publishers.items():
        assert len(verify_note(one.note.encode(), keys)[1]) == 3
        assert (tmp_path / name / "tlog/checkpoint").read_text() == one.note
    again = three(tmp_path)
    assert again.sizes() == {"r1": 20, "r2": 20, "r3": 20}


@story
async def test_checkpoint_that_cannot_be_stored_is_published_nevertheless(tmp_path: Path) -> None:
    them = three(tmp_path)
    (tmp_path / "r1" / "tlog").write_text("in the way")
    assert await them.publish()
    assert them.sizes() == {"r1": 20, "r2": 20, "r3": 20} and not them.stopped


@story
async def test_leader_before_a_transfer_signs_all_applied_entries_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    them = three(tmp_path)
    leader = them.publishers["r1"]
    assert await them.publish() and leader.size == 20
    await leader.conclude()
    assert leader.size == 20 and leader.failed == 0, "no entries remain to be signed"
    for ledger in them.ledgers.values():
        ledger.applied = 23
    await leader.conclude()
    assert leader.size == 20, "the leader has no tree yet"
    monkeypatch.setattr(leader, "_tree_size", lambda: 22)
    await them.publishers["r2"].conclude()
    assert them.sizes() == {"r1": 20, "r2": 20, "r3": 20}, "the replica does not lead"
    await leader.conclude()
    assert them.sizes() == {"r1": 23, "r2": 23, "r3": 23}, "all applied entries, not only those in the known tree"
    them.ledgers["r1"].applied = 24
    monkeypatch.setattr("forebay.cluster.server.tlog.publish.LAST_S", 0.01)

    async def hanging(peer: str, size: int, root: bytes) -> SignedCheckpoint:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(leader, "_asked", LogPeers(hanging, them._hand, them._key_of))
    await leader.conclude()
    assert leader.size == 23 and leader.failed == 1


@story
async def test_majority_is_enough_and_less_publishes_nothing(tmp_path: Path) -> None:
    them = three(tmp_path)
    them.away = {"r2", "r3"}
    assert not await them.publish()
    assert them.sizes() == {"r1": 0, "r2": 0, "r3": 0} and them.publishers["r1"].failed == 1
    them.away = {"r3"}
    assert await them.publish()
    assert them.sizes() == {"r1": 20, "r2": 20, "r3": 0}


@story
async def test_altered_follower_stops_when_it_receives_the_majoritys_checkpoint(tmp_path: Path) -> None:
    them = three(tmp_path, r3=5)
    assert await them.publish()
    assert list(them.stopped) == ["r3"] and "its history was altered" in them.stopped["r3"]


@story
async def test_altered_leader_stops_and_publishes_nothing(tmp_path: Path) -> None:
    them = three(tmp_path, r1=5)
    with pytest.raises(Stopped):
        await them.publish()
    assert list(them.stopped) == ["r1"] and them.sizes() == {"r1": 0, "r2": 0, "r3": 0}


@story
async def test_replica_altered_before_its_signature_stops_when_asked(tmp_path: Path) -> None:
    them = three(tmp_path)
    assert await them.publish()
    for name in ("r1", "r2", "r3"):
        them.ledgers[name].applied = 30
    them.ledgers["r2"].altered = 20
    # Later entries are the same: only the earlier signature shows the difference.
    with pytest.raises(Stopped):
        await them.publishers["r2"].sign(30, (await them.ledgers["r2"].root(30)).hex())
    assert "was altered" in them.stopped["r2"]


@story
async def test_checkpoint_without_a_majority_is_not_accepted(tmp_path: Path) -> None:
    them = three(tmp_path)
    r1, r2 = them.publishers["r1"], them.publishers["r2"]
    own = (await r1.sign(20, (await them.ledgers["r1"].root(20)).hex())).note
    assert own is not None
    text, signatures = parse_note(own.encode())
    assert parse_checkpoint(text).size == 20
    for note in (own, write_note(text, signatures * 3), "nothing", text, own.replace(ORIGIN, "forebay/9")):
        with pytest.raises(NoteNotTaken):
            await r2.take(note)
    assert r2.size == 0
    assert await them.publish()
    await r2.take(own)  # not larger than its own, so nothing changes
    assert len(parse_note(r2.note.encode())[1]) == 3


@story
async def test_new_incarnation_has_its_own_origin_and_respects_earlier_signatures(
    tmp_path: Path,
) -> None:
    second, third = (origin_of("cluster", Incarnation(number, digit * 16)) for number, digit in ((2, "a"), (3, "b")))
    assert (origin_of("cluster"), second) == ("forebay/cluster", f"forebay/cluster/2-{'a' * 16}")

    def of(origin: str) -> Signer:
        return Signer(tmp_path / "signing", origin)

    await of(origin_of("cluster")).sign(7, Ledger(9).root)
    with pytest.raises(LedgerAltered):
        await of(second).sign(9, Ledger(9, altered=6).root)
    checkpoint, signature = await of(second).sign(9, Ledger(9).root)
    assert (checkpoint.origin, signature.name) == (second, second)
    with pytest.raises(SignRefused, match="a checkpoint of 9 entries is already signed"):
        await of(third).sign(8, Ledger(9).root)
    for earlier in (origin_of("cluster"), origin_of("another", Incarnation(3, "c" * 16))):
        with pytest.raises(StorageRefused):
            of(earlier)


@story
async def test_replica_with_fewer_entries_than_it_signed_does_not_start(tmp_path: Path) -> None:
    signer(tmp_path).check_held(0)
    await signer(tmp_path).sign(5, Ledger(9).root)
    signer(tmp_path).check_held(5)
    with pytest.raises(StorageRefused, match="has signed 5 entries, and its ledger has 4: the ledger was rolled back"):
        signer(tmp_path).check_held(4)


@story
async def test_replica_that_finds_an_unknown_signature_of_its_own_stops(tmp_path: Path) -> None:
    them = three(tmp_path)
    shutil.copytree(tmp_path / "r2/signing", tmp_path / "never/signing")
    assert await them.publish()
    shutil.copytree(tmp_path / "r2/signing", tmp_path / "earlier/signing")
    for ledger in them.ledgers.values():
        ledger.applied = 25
    assert await them.publish()
    for one in them.publishers.values():
        await one.check_signed()
    assert not them.stopped
    for count, older in enumerate(("never", "earlier")):
        shutil.rmtree(tmp_path / "r2/signing")
        shutil.copytree(tmp_path / older / "signing", tmp_path / "r2/signing")
        again = Cluster(tmp_path, them.ledgers)
        again.away = {"r3"}
        with pytest.raises(Stopped):
            await again.publishers["r2"].check_signed()
        sentence = f"r2 has signed 25 entries, as the checkpoint of r1 shows, but its own record shows {(0, 20)[count]}"
        assert sentence in again.stopped["r2"]


@story
async def test_each_peer_is_asked_for_its_checkpoint_until_it_answers_once(tmp_path: Path) -> None:
    them = three(tmp_path)
    assert await them.publish()
    asked = them.asked_for_notes
    them.away = {"r1"}
    for _ in range(2):
        await them.publishers["r2"].check_signed()
    assert asked == ["r1", "r3", "r1"]
    them.away.clear()
    for _ in range(2):
        await them.publishers["r2"].check_signed()
    assert asked == ["r1", "r3", "r1", "r1"]


@story
async def test_replica_with_another_key_than_its_peers_know_reports_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    them = three(tmp_path)
    assert await them.publish()
    shutil.rmtree(tmp_path / "r2/signing")
    fresh = Cluster(tmp_path, them.ledgers)
    await fresh.publishers["r2"].check_signed()
    assert not fresh.publishers["r2"].doubt, "a replica that has signed nothing may be new"
    await signer(tmp_path / "r2").sign(10, Ledger(20).root)
    again = Cluster(tmp_path, them.ledgers)
    for one in again.publishers.values():
        await one.check_signed()
    assert {name for name, one in again.publishers.items() if one.doubt} == {"r2"} and not again.stopped
    assert "none with the key of r2, which signed earlier ones" in caplog.text


@story
async def test_stored_checkpoint_of_more_entries_than_exist_is_ignored(tmp_path: Path) -> None:
    them = three(tmp_path)
    assert await them.publish()
    path = tmp_path / "r1/tlog/checkpoint"
    path.write_text(path.read_text().replace("\n20\n", "\n1000000\n"))
    for ledger in them.ledgers.values():
        ledger.applied = 25
    again = Cluster(tmp_path, them.ledgers)
    assert again.sizes() == {"r1": 0, "r2": 20, "r3": 20}
    assert await again.publish()
    assert again.sizes() == {"r1": 25, "r2": 25, "r3": 25}


@pytest.mark.parametrize(
    ("counts", "away", "is_recorded"),
    [
        ((5, 5, 5), "", True),
        ((5, 5, 6), "", True),
        ((5, 6, 6), "", False),
        ((5, 6, 7), "", False),
        ((5, 5, 6), "r2", False),
        ((5, 5, 0), "", True),
        ((5, 0, 0), "", False),
        ((0, 5, 5), "", False),
    ],
)
@story
async def test_only_counts_of_a_majority_are_recorded(
    tmp_path: Path, counts: tuple[int, int, int], away: str, is_recorded: bool
) -> None:
    them = three(tmp_path)
    assert await them.publish()
    them.counts = dict(zip(("r1", "r2", "r3"), counts, strict=True))
    them.away = {away}
    assert await them.publishers["r1"].record_histories() is is_recorded
    assert them.recorded == ([RecordHistories(20, 5, bytes([5]) * 32)] if is_recorded else [])
    them.in_ledger = bytes([5]) * 32
    assert not await them.publishers["r1"].record_histories(), "the ledger has these counts already"
    assert not them.stopped
