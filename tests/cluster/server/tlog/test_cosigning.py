"""A leader asks its witnesses within bounds, waits for none, and reports by name what they have seen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from forebay.cluster.security.proofs import (
    SIZE_TYPE,
    VerifierKey,
    consistency_proof,
    parse_checkpoint,
    parse_note,
    verify_note,
)
from forebay.cluster.server.tlog import (
    Cosigning,
    LogPeers,
    NoAnswer,
    Publisher,
    SignedCheckpoint,
    Signer,
    Witness,
    cosigning,
    publish,
)
from forebay.cluster.system import SystemClock
from forebay.cluster.witness import CheckpointStore, WitnessedLog, WitnessResponse, make_key, read_key
from forebay.cluster.witness import CheckpointWitness as RealWitness
from tests.cluster.harness import story
from tests.cluster.witness.logs import ORIGIN, MemoryLog

SOUND = MemoryLog(200)
WITNESSES = ("w1", "w2", "w3")


class Still(SystemClock):
    """Monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at_s = 1000.0

    def monotonic_s(self) -> float:
        return self.at_s


class Said(NamedTuple):
    status: int
    body: bytes


class Site:
    """Three publishers with one ledger, led by r1, and three real witnesses."""

    def __init__(self, directory: Path, needed: int = 2) -> None:
        self.directory, self.needed = directory, needed
        self.log, self.applied = SOUND, 100
        self.leader = "r1"
        self.clock = Still()
        self.signers = {
            name: Signer(directory / name, ORIGIN) for name in ("r1", "r2", "r3") if _made(directory / name)
        }
        keys = tuple(one.key for one in self.signers.values())
        self.keys: dict[str, VerifierKey] = {}
        self.witnesses: dict[str, RealWitness] = {}
        for name in WITNESSES:
            self.keys[name] = make_key(directory / name, f"{name}.example")
            CheckpointStore.create(directory / f"{name}.db", str(self.keys[name]))
            seen = CheckpointStore(directory / f"{name}.db", str(self.keys[name]))
            self.witnesses[name] = RealWitness(
                *read_key(directory / name), [WitnessedLog(ORIGIN, keys, 2)], seen, SystemClock()
            )
        self.asked: list[str] = []
        self.instead: dict[str, Callable[[bytes], Awaitable[Said | WitnessResponse]]] = {}
        self.publishers = {name: self.publisher(name) for name in self.signers}

    def publisher(self, name: str) -> Publisher:
        def fail(error: BaseException) -> NoReturn:
            raise AssertionError(name) from error

        return Publisher(
            self.signers[name],
            self.directory / name / "tlog",
            name=name,
            leads=lambda: name == self.leader,
            applied_index=lambda: self.applied,
            tree_size=lambda: 0,
            root=self._root,
            peers=lambda: tuple(peer for peer in self.signers if peer != name),
            asked=LogPeers(self._ask, self._hand, self._key_of, submit=self._submit),
            cosigning=Cosigning(
                (Witness(one, self.keys[one]) for one in WITNESSES),
                self.needed,
                submit=self._submit,
                consistency=self._consistency,
                applied_index=lambda: self.applied,
                clock=self.clock,
            ),
            clock=self.clock,
            fail=fail,
        )

    async def _root(self, size: int) -> bytes:
        return self.log.checkpoint(size).root

    async def _consistency(self, old_size: int, size: int) -> list[bytes]:
        return consistency_proof(old_size, size, self.log.read)

    async def _ask(self, peer: str, size: int, root: bytes) -> SignedCheckpoint:
        return await self.publishers[peer].sign(size, root.hex())

    async def _hand(self, peer: str, note: str) -> None:
        await self.publishers[peer].take(note)

    async def _key_of(self, peer: str) -> VerifierKey:
        return self.publishers[peer].key

    async def _submit(self, witness: str, body: bytes) -> Said:
        self.asked.append(witness)
        instead = self.instead.get(witness)
        if instead is not None:
            answer = await instead(body)
            return Said(answer.status, answer.body if isinstance(answer.body, bytes) else answer.body.encode())
        found = self.witnesses[witness].add_checkpoint(body)
        return Said(found.status, found.body.encode())

    async def published(self, size: int) -> Publisher:
        """Let the leader publish a checkpoint of `size` entries."""
        self.applied = size
        leader = self.publishers[self.leader]
        assert await leader.publish()
        return leader

    async def late(self) -> None:
        """Let the leader ask late witnesses, as after a publication."""
        await self.publishers[self.leader].ask_late_witnesses()

    def note(self) -> str:
        return self.publishers[self.leader].note

    def cosigned(self, name: str = "r1") -> list[str]:
        return list(self.publishers[name].witnessed_by)


def _made(directory: Path) -> bool:
    directory.mkdir()
    return True


def refusing(answer: Said | WitnessResponse) -> Callable[[bytes], Awaitable[Said | WitnessResponse]]:
    async def answered(body: bytes) -> Said | WitnessResponse:
        return answer

    return answered


async def dead(body: bytes) -> Said:
    raise NoAnswer("the witness is not running")


async def hanging(body: bytes) -> Said:
    await asyncio.Event().wait()
    raise AssertionError


@story
async def test_published_checkpoint_has_its_cosignatures_on_all_replicas(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for size in (10, 100, 130):
        leader = await site.published(size)
        _, verified = verify_note(
            leader.note.encode(), [*site.keys.values(), *(one.key for one in site.signers.values())]
        )
        assert len(verified) == 6
        for name, one in site.publishers.items():
            assert (one.note, site.cosigned(name), one.unwitnessed_s) == (leader.note, [*WITNESSES], 0.0)
    assert len(site.asked) == 9  # each once: the last cosignature gives the witness's size
    assert not leader.cosigning.disputes and not leader.cosigning.errors
    again = site.publisher("r1")
    assert (again.witnessed_by, again.unwitnessed_s) == (WITNESSES, 0.0)


@story
async def test_checkpoint_tolerates_one_dead_witness_and_is_unwitnessed_with_two(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.instead["w2"] = dead
    leader = await site.published(10)
    assert (site.cosigned(), leader.unwitnessed_s) == (["w1", "w3"], 0.0)
    assert leader.cosigning.errors == {"w2": "the witness is not running"}
    site.instead["w1"] = dead
    for size, at_s in ((20, 0.0), (30, 900.0), (40, 1800.0)):
        site.clock.at_s = 1000.0 + at_s
        await site.published(size)
        for name, one in site.publishers.items():
            assert (one.size, site.cosigned(name), one.unwitnessed_s) == (size, ["w3"], at_s)
    site.instead.clear()
    site.clock.at_s += cosigning.RETRY_S_MAX
    await site.late()
    for name, one in site.publishers.items():
        assert (one.size, sorted(site.cosigned(name)), one.unwitnessed_s) == (40, [*WITNESSES], 0.0)


@story
async def test_absent_witness_is_asked_less_and_less_often(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.instead["w2"] = dead
    leader, moments = await site.published(10), [0]
    for second in range(5, 1000, 5):
        site.clock.at_s = 1000.0 + second
        site.asked.clear()
        await site.late()
        if site.asked == ["w2"]:
            moments.append(second)
    assert moments == [0, 10, 30, 70, 150, 310, 610, 910]
    assert leader.witnessed_by == ("w1", "w3")


@story
async def test_hanging_witness_delays_one_checkpoint_and_is_then_asked_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BEFORE_PUBLICATION_S", 0.02)
    monkeypatch.setattr(cosigning, "ASK_S", 0.02)
    site = Site(tmp_path)
    site.instead["w2"] = hanging
    await site.published(10)
    assert site.cosigned() == ["w1", "w3"] and site.asked.count("w2") == 1
    site.asked.clear()
    await site.published(11)
    assert site.asked == ["w1", "w3"]
    site.instead.clear()
    site.clock.at_s += cosigning.RETRY_S_MAX
    await site.late()
    assert sorted(site.cosigned()) == sorted(site.cosigned("r3")) == [*WITNESSES]
    assert site.publishers["r1"].published_s == 1000.0  # later cosignatures do not change the publication time


@story
async def test_new_leader_learns_the_witnesses_size_from_them(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.instead["w1"] = dead
    await site.published(50)
    site.instead.clear()
    # The notes of the other replicas lack w1, and without these notes also w2 and w3.
    site.leader = "r2"
    (tmp_path / "r2/tlog/checkpoint").unlink()
    site.publishers["r2"] = site.publisher("r2")
    site.asked.clear()
    await site.published(60)
    assert site.cosigned("r2") == [*WITNESSES]
    assert sorted(site.asked) == ["w1", "w2", "w2", "w3", "w3"]


@story
async def test_cosignature_with_a_lost_answer_is_requested_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.published(40)

    async def lost(body: bytes) -> Said:
        site.witnesses["w1"].add_checkpoint(body)
        raise NoAnswer("the connection broke")

    site.instead["w1"] = lost
    await site.published(50)
    assert site.cosigned() == ["w2", "w3"]
    site.instead.clear()
    site.clock.at_s += cosigning.RETRY_S
    await site.late()
    assert sorted(site.cosigned()) == [*WITNESSES] and not site.publishers["r1"].cosigning.errors


@story
async def test_witness_ahead_of_a_checkpoint_is_asked_again_later(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.instead["w1"] = dead
    leader = await site.published(52)
    site.applied = 60
    site.instead["w1"] = refusing(WitnessResponse(409, "55\n", SIZE_TYPE))
    site.clock.at_s += cosigning.RETRY_S
    await site.late()
    assert site.asked.count("w1") == 2 and site.cosigned() == ["w2", "w3"]
    assert leader.cosigning.disputes == {}
    site.instead.clear()
    site.clock.at_s += cosigning.RETRY_S
    await site.published(61)
    assert sorted(site.cosigned()) == [*WITNESSES]


@story
@pytest.mark.parametrize("needed", [0, 2])
async def test_history_replaced_on_all_replicas_is_found_only_by_the_witnesses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, needed: int
) -> None:
    """Each replica's record of signatures is forged too: an attacker with all disks can do that."""
    site = Site(tmp_path, needed)
    await site.published(100)
    forged = MemoryLog(200, forked_from=70)
    caplog.set_level(logging.CRITICAL)
    for name in site.signers:
        (tmp_path / name / "signed").unlink()
        (tmp_path / name / "tlog/checkpoint").unlink()
    site.log = forged
    site.signers = {name: Signer(tmp_path / name, ORIGIN) for name in site.signers}
    site.publishers = {name: site.publisher(name) for name in site.signers}
    for size in (80, 100, 150):
        leader = await site.published(size)
        # The replicas agree with each other and sign: without a witness nothing seems wrong.
        assert leader.size == size and len(parse_note(leader.note.encode())[1]) == 3
        assert parse_checkpoint(parse_note(leader.note.encode())[0]).root == forged.checkpoint(size).root
        said = {
            80: "the witness cosigned 100 entries, and this ledger has 80: the ledger was rolled back",
            100: "the witness cosigned another root of the first 100 entries",
            150: "the history before entry 100 differs from the one that the witness cosigned",
        }[size]
        assert leader.cosigning.disputes == dict.fromkeys(WITNESSES, said)
        assert f"THE LEDGER CONTRADICTS WHAT THE WITNESS w1 HAS COSIGNED: {said}" in caplog.text
        assert leader.witnessed_by == ()
        site.clock.at_s += cosigning.RETRY_S_MAX
        assert leader.unwitnessed_s == (0.0 if not needed else site.clock.at_s - 1000.0)
    site.log = SOUND
    found = await leader.cosigning.collect(SOUND.checkpoint(150), SOUND.note(150).decode(), within_s=1.0)
    assert found == []  # not signed by the log's replicas


@story
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Said(200, b""), "signature"),
        (Said(200, b"nothing\n"), "signature"),
        (
            Said(403, b"2 are\x1b[31m a majority\n" + b"x" * 5000),
            "it answered with status 403: 2 are[31m a majorityxxx",
        ),
        (Said(404, b""), "it answered with status 404"),
        (Said(409, b"many\n"), "is not a size"),
        (Said(409, b""), "is not a size"),
        (Said(409, b"7\n"), "it still reports 7 entries after 3 requests"),
        (Said(422, b""), "it answered with status 422"),
        (Said(500, b""), "it answered with status 500"),
        (Said(302, b""), "it answered with status 302"),
    ],
)
async def test_checkpoint_is_published_for_any_answer_of_a_witness(tmp_path: Path, answer: Said, said: str) -> None:
    site = Site(tmp_path, needed=3)
    site.instead["w2"] = refusing(answer)
    leader = await site.published(10)
    assert site.cosigned() == ["w1", "w3"] and leader.size == 10
    assert said in leader.cosigning.errors["w2"] and len(leader.cosigning.errors["w2"]) < 300


@story
async def test_cosignature_of_another_key_or_checkpoint_does_not_count(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def anothers(body: bytes) -> WitnessResponse:
        return site.witnesses["w1"].add_checkpoint(body)

    site.instead["w2"] = anothers
    await site.published(10)
    assert site.cosigned() == ["w1", "w3"]
    site.instead["w2"] = refusing(site.witnesses["w2"].add_checkpoint(b"old 0\n\n" + site.note().encode()))
    site.clock.at_s += cosigning.RETRY_S_MAX
    await site.published(20)
    assert site.cosigned() == ["w1", "w3"]


@story
async def test_follower_adds_only_cosignatures_of_its_own_witnesses(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.instead["w1"] = dead
    await site.published(10)
    follower, note = site.publishers["r2"], site.note()
    other = site.directory / "other"
    make_key(other, "w1.example")
    for added in (note + note.splitlines(keepends=True)[-1], note + note.splitlines(keepends=True)[4]):
        await follower.take(added)
        assert follower.note == note
