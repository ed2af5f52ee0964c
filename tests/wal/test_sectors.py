"""Layout of the sync log: torn writes are distinguished from damage, for every pattern of sectors and every bit."""

import random
import struct
from itertools import product
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.wal import records, sectors
from forebay.wal.records import StorageIdentity
from forebay.wal.sectors import BLOCK_BYTES, SECTOR_BYTES, LogAhead, LogDamaged, LogForeign, Tags

IDENTITY = records.pack_identity(StorageIdentity("cluster-1", "r1"))
OTHER = records.pack_identity(StorageIdentity("cluster-1", "r2"))
GENERATION = 7


def body_of(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


BODIES = [body_of(1, 300), body_of(2, 4000), body_of(3, 700)]


def laid_out(bodies: list[bytes], *, generation: int = GENERATION, identity: bytes = IDENTITY) -> list[bytes]:
    tags = Tags(identity, generation)
    return [sectors.lay_out(tags.of(number), generation, number, body) for number, body in enumerate(bodies, start=1)]


def log_of(*blocks: bytes, size_blocks: int = 8, identity: bytes = IDENTITY, filler: bytes = b"\0") -> bytes:
    content = sectors.first_block(identity, size_blocks * BLOCK_BYTES) + b"".join(blocks)
    return content + (filler * (size_blocks * BLOCK_BYTES))[: size_blocks * BLOCK_BYTES - len(content)]


@pytest.mark.parametrize("size_bytes", [0, 1, 478, 479, 480, 983, 984, 4031, 4032 - 29, 4032, 5000, 40_000, 300_000])
def test_record_is_read_back_and_fills_whole_blocks(size_bytes: int) -> None:
    bodies = [body_of(size_bytes, size_bytes), b"", body_of(1, size_bytes // 2)]
    blocks = laid_out(bodies)
    assert [len(one) for one in blocks] == [sectors.size_on_disk_bytes(len(body)) for body in bodies]
    assert all(len(one) % BLOCK_BYTES == 0 for one in blocks)
    size_blocks = sum(map(len, blocks)) // BLOCK_BYTES + 1
    for more in (0, 3):
        assert sectors.read(log_of(*blocks, size_blocks=size_blocks + more), IDENTITY, GENERATION) == bodies


def test_every_sector_begins_with_its_records_unique_tag() -> None:
    tags = [
        Tags(identity, generation).of(sequence)
        for identity, generation, sequence in product((IDENTITY, OTHER), (1, 2, 256), (1, 2, 256))
    ]
    assert len(set(tags)) == len(tags)
    [block] = laid_out([body_of(1, 3000)])
    assert {block[at : at + 8] for at in range(0, len(block), SECTOR_BYTES)} == {Tags(IDENTITY, GENERATION).of(1)}


def old_contents() -> dict[str, bytes]:
    """Return old contents that may stand where the third record is written; none has sectors of this record."""
    before = b"".join(laid_out(BODIES, generation=GENERATION - 1))
    return {
        "zeros": bytes(BLOCK_BYTES * 3),
        "ones": b"\xff" * BLOCK_BYTES * 3,
        "the same of the generation before": b"".join(laid_out(BODIES * 2, generation=GENERATION - 1))[
            BLOCK_BYTES * 2 : BLOCK_BYTES * 5
        ],
        "a longer one of the generation before": (before[BLOCK_BYTES:] * 2)[: BLOCK_BYTES * 3],
        "a torn one of the generation before": before[BLOCK_BYTES + SECTOR_BYTES :].ljust(BLOCK_BYTES * 3, b"\0"),
        "another replica's": b"".join(laid_out([body_of(9, 12_000 - 29)], identity=OTHER))[: BLOCK_BYTES * 3],
        "noise": body_of(5, BLOCK_BYTES * 3),
    }


@pytest.mark.parametrize("old", old_contents())
@pytest.mark.parametrize("size_bytes", [40, 1500, 3900])
def test_record_with_any_sectors_missing_is_complete_or_absent(old: str, size_bytes: int) -> None:
    """All 256 patterns of a record's eight sectors, over every kind of old content."""
    *before, last = laid_out([*BODIES[:1], BODIES[2], body_of(4, size_bytes)])
    was = old_contents()[old]
    assert len(last) == BLOCK_BYTES
    for arrived in product((False, True), repeat=BLOCK_BYTES // SECTOR_BYTES):
        content = bytearray(log_of(*before, was, size_blocks=6))
        start = BLOCK_BYTES * 3
        for number, is_there in enumerate(arrived):
            if is_there:
                at = number * SECTOR_BYTES
                content[start + at : start + at + SECTOR_BYTES] = last[at : at + SECTOR_BYTES]
        found = sectors.read(bytes(content), IDENTITY, GENERATION)
        assert found == [BODIES[0], BODIES[2], *([body_of(4, size_bytes)] if all(arrived) else [])], arrived


@given(st.lists(st.booleans(), min_size=24, max_size=24), st.sampled_from(sorted(old_contents())))
def test_record_of_several_blocks_with_missing_sectors_is_complete_or_absent(arrived: list[bool], old: str) -> None:
    body = body_of(6, 11_000)
    before, last = laid_out([BODIES[0], body])
    assert len(last) == 24 * SECTOR_BYTES
    content = bytearray(log_of(before, old_contents()[old], size_blocks=6))
    for number, is_there in enumerate(arrived):
        if is_there:
            at = number * SECTOR_BYTES
            content[2 * BLOCK_BYTES + at : 2 * BLOCK_BYTES + at + SECTOR_BYTES] = last[at : at + SECTOR_BYTES]
    assert sectors.read(bytes(content), IDENTITY, GENERATION) == [BODIES[0], *([body] if all(arrived) else [])]


def test_every_flipped_bit_in_a_record_is_detected() -> None:
    """Every bit of every tag and header, every bit at the last sector's end, and every 11th of the rest."""
    content = log_of(*laid_out(BODIES), size_blocks=6)
    used = BLOCK_BYTES + sum(sectors.size_on_disk_bytes(len(body)) for body in BODIES)
    bits = {8 * at + bit for at in range(0, used, SECTOR_BYTES) for bit in range(8 * 48)}
    bits |= set(range(8 * (used - SECTOR_BYTES), 8 * used)) | set(range(0, 8 * used, 11))
    for bit in sorted(bits):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((LogDamaged, LogForeign)):
            sectors.read(bytes(flipped), IDENTITY, GENERATION)


def test_flipped_bit_after_the_last_record_has_no_effect() -> None:
    """That area has no promises: it holds zeros or records of an older generation."""
    used = BLOCK_BYTES + sum(sectors.size_on_disk_bytes(len(body)) for body in BODIES)
    for filler in (b"\0", laid_out([b"old"], generation=GENERATION - 1)[0]):
        content = log_of(*laid_out(BODIES), size_blocks=7, filler=filler)
        for bit in range(8 * used, 8 * len(content), 7):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            assert sectors.read(bytes(flipped), IDENTITY, GENERATION) == BODIES


@pytest.mark.parametrize("bits", range(1, 9))
def test_tag_with_up_to_eight_flipped_bits_is_damage_and_not_a_missing_sector(bits: int) -> None:
    content = log_of(*laid_out(BODIES), size_blocks=6)
    chance = random.Random(bits)
    for sector in (1, 2, 9, 17):
        for _ in range(20):
            flipped = bytearray(content)
            for bit in chance.sample(range(64), bits):
                flipped[BLOCK_BYTES + sector * SECTOR_BYTES + bit // 8] ^= 1 << bit % 8
            with pytest.raises(LogDamaged):
                sectors.read(bytes(flipped), IDENTITY, GENERATION)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("sector", range(8))
def test_missing_sector_before_a_later_record_is_damage(lost: int, sector: int) -> None:
    content = bytearray(log_of(*laid_out(BODIES), size_blocks=6))
    at = BLOCK_BYTES * (1 + lost) + sector * SECTOR_BYTES
    content[at : at + SECTOR_BYTES] = bytes(SECTOR_BYTES)
    with pytest.raises(LogDamaged, match=f"record {lost + 1} is missing, although record {lost + 2} was written after"):
        sectors.read(bytes(content), IDENTITY, GENERATION)


def test_one_sector_of_a_later_record_proves_that_the_previous_was_synced() -> None:
    blocks = laid_out(BODIES)
    for kept in range(8):
        content = bytearray(log_of(blocks[0], size_blocks=6))
        at = 3 * BLOCK_BYTES + kept * SECTOR_BYTES
        content[at : at + SECTOR_BYTES] = blocks[2][kept * SECTOR_BYTES : (kept + 1) * SECTOR_BYTES]
        with pytest.raises(LogDamaged, match="record 2 is missing, although record 3"):
            sectors.read(bytes(content), IDENTITY, GENERATION)


def test_older_generation_is_ignored_and_a_later_one_is_rejected() -> None:
    content = log_of(*laid_out(BODIES, generation=GENERATION))
    assert sectors.read(content, IDENTITY, GENERATION + 1) == []
    for older in (1, GENERATION - 1):
        with pytest.raises(LogAhead, match=f"generation {GENERATION}, but LMDB has {older}"):
            sectors.read(content, IDENTITY, older)


def test_header_with_a_wrong_sequence_is_damage_despite_a_valid_checksum() -> None:
    tag, long = Tags(IDENTITY, GENERATION).of(1), bytes(90_000)
    for generation, sequence, body in [(GENERATION + 1, 1, b"x"), (GENERATION, 2, b"x"), (GENERATION, 1, long)]:
        content = log_of(sectors.lay_out(tag, generation, sequence, body)[: BLOCK_BYTES * 7])
        with pytest.raises(LogDamaged, match="its header names"):
            sectors.read(content, IDENTITY, GENERATION)


def test_log_of_another_replica_or_size_is_not_treated_as_empty() -> None:
    content = log_of(*laid_out(BODIES, identity=OTHER), identity=OTHER)
    with pytest.raises(LogForeign):
        sectors.read(content, IDENTITY, GENERATION)
    with pytest.raises(LogDamaged, match="states 32768 bytes instead of 28672"):
        sectors.read(log_of(*laid_out(BODIES))[:-BLOCK_BYTES], IDENTITY, GENERATION)
    block = bytearray(sectors.first_block(IDENTITY, 8 * BLOCK_BYTES))
    block[8] = 2
    block[-4:] = struct.pack(">I", crc32(bytes(block[:-4])))
    with pytest.raises(LogDamaged, match="version 2; this release reads 1"):
        sectors.read(bytes(block) + bytes(7 * BLOCK_BYTES), IDENTITY, GENERATION)
