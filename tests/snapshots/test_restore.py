"""Reading checks everything: every damage is rejected with a reason."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.snapshots import Image, SnapshotName, SnapshotRefused, inspect, load_snapshot, write_snapshot
from forebay.snapshots.finalize import PREAMBLE, frame_of
from forebay.snapshots.image import CAPACITY, SLICE_BYTES_MAX, Slice, to_sections
from tests.snapshots.states import MIB, images, many_jobs, small_image


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_snapshot(tmp_path_factory.mktemp("sealed"), small_image()).read_bytes()


def _seal(pieces: list[Slice]) -> bytes:
    body = PREAMBLE + b"".join(frame_of(piece, sequence) for sequence, piece in enumerate(pieces))
    return body + sha256(body).digest()


def _rejection(tmp_path: Path, content: bytes, name: str = "x.fbs") -> str:
    path = tmp_path / name
    path.write_bytes(content)
    sentences: list[str] = []
    for read in (load_snapshot, inspect):
        with pytest.raises(SnapshotRefused) as caught:
            read(path)
        assert str(caught.value) == f"{path}: {caught.value.sentence}"
        sentences.append(caught.value.sentence)
    return sentences[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(images)
def test_image_survives_a_round_trip_through_a_file(tmp_path: Path, image: Image) -> None:
    path = write_snapshot(tmp_path, image)
    assert load_snapshot(path) == image
    summary = inspect(path)
    assert (summary.index, summary.term, summary.revision) == (image.index, image.term, image.state.revision)
    assert (summary.jobs, summary.buffers) == (len(image.state.jobs), len(image.state.buffers))
    path.unlink()


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_is_detected(tmp_path: Path, sealed: bytes, mask: int) -> None:
    assert len(sealed) < 2048
    places = 0
    for place in range(len(sealed)):
        sentence = _rejection(tmp_path, sealed[:place] + bytes([sealed[place] ^ mask]) + sealed[place + 1 :])
        assert len(sentence) > 20
        places += "byte" in sentence
    assert places > len(sealed) // 2


def test_file_truncated_at_any_length_is_rejected(tmp_path: Path, sealed: bytes) -> None:
    for length in range(len(sealed)):
        assert _rejection(tmp_path, sealed[:length])


def test_file_with_additional_bytes_is_rejected(tmp_path: Path, sealed: bytes) -> None:
    for extra in (b"\0", b"\xc0", sealed[-32:], sealed):
        assert _rejection(tmp_path, sealed + extra)
        assert _rejection(tmp_path, extra + sealed)


def test_missing_repeated_or_swapped_frames_are_rejected_despite_valid_checksums(tmp_path: Path) -> None:
    pieces = list(to_sections(many_jobs(600)))
    _rejection(tmp_path, _seal(pieces[:-1]))
    for place in range(1, len(pieces)):
        _rejection(tmp_path, _seal(pieces[:place] + pieces[place + 1 :]))
        _rejection(tmp_path, _seal([*pieces[: place + 1], *pieces[place:]]))
        _rejection(tmp_path, _seal([*pieces[: place - 1], pieces[place], pieces[place - 1], *pieces[place + 1 :]]))


def test_altered_free_capacity_is_rejected_by_pool_name(
    tmp_path: Path,
) -> None:
    pieces = list(to_sections(small_image()))
    for row in (["fast", 8 * MIB, 96 * MIB], ["fast", 0, 96 * MIB], ["fast", 16 * MIB, 80 * MIB]):
        forged = [
            Slice(CAPACITY, msgspec.msgpack.encode([row]), 1) if piece.section == CAPACITY else piece
            for piece in pieces
        ]
        sentence = _rejection(tmp_path, _seal(forged))
        assert sentence == (
            f"pool 'fast': the snapshot says {row[1]} bytes held and {row[2]} free, but its buffers give "
            f"{8 * MIB} held and {88 * MIB} free"
        )


def test_other_format_version_is_named(tmp_path: Path, sealed: bytes) -> None:
    body = sealed[:6] + b"\0\2" + sealed[8:-32]
    sentence = _rejection(tmp_path, body + sha256(body).digest())
    assert sentence == "it has format version 2; this release reads version 1"


def test_file_with_the_name_of_another_snapshot_is_rejected(tmp_path: Path, sealed: bytes) -> None:
    assert (
        _rejection(tmp_path, sealed, str(SnapshotName(8, 2))) == "its name states index 8 of term 2; it contains 7 of 2"
    )


def test_file_that_is_not_regular_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(SnapshotRefused, match="the snapshot is not a regular file"):
            load_snapshot(path)
    with pytest.raises(SnapshotRefused, match="the file cannot be opened: No such file"):
        load_snapshot(tmp_path / "missing")


@pytest.mark.parametrize(
    "frame",
    [
        b"\x94\x01\x00\xc6" + (SLICE_BYTES_MAX + 1).to_bytes(4, "big"),
        b"\x94\x01\x00\xc6\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 5000,
        b"\x94\xff\x00\xc4\x00\x00",
        b"\xc1",
    ],
    ids=["large slice", "4 GiB", "long array", "map", "string", "extension", "deep", "negative section", "unused code"],
)
def test_false_lengths_in_a_file_allocate_nothing_and_are_rejected(tmp_path: Path, frame: bytes) -> None:
    body = PREAMBLE + frame + b"\0" * 64
    assert "byte" in _rejection(tmp_path, body + sha256(body).digest())


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_garbage_with_a_valid_checksum_is_rejected_without_other_errors(tmp_path: Path, garbage: bytes) -> None:
    body = PREAMBLE + garbage
    _rejection(tmp_path, body + sha256(body).digest())


def test_too_large_file_is_rejected_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.fbs"
    with path.open("wb") as file:
        file.truncate(5 * 1024**3)
    with pytest.raises(SnapshotRefused, match="it has 5368709120 bytes; at most"):
        load_snapshot(path)


def test_summary_describes_the_file(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, small_image())
    summary = inspect(path)
    assert msgspec.to_builtins(summary) == {
        "index": 7,
        "term": 2,
        "revision": 7,
        "at": 99,
        "cluster_id": "c1",
        "cluster": "demo",
        "jobs": 1,
        "buffers": 1,
        "pools": ({"name": "fast", "quantity_bytes": 96 * MIB, "held_bytes": 8 * MIB, "free_bytes": 88 * MIB},),
        "digest": bytes(range(32)).hex(),
        "file_digest": path.read_bytes()[-32:].hex(),
        "size_bytes": path.stat().st_size,
    }
