"""What large files have besides their contents, in the manifest: attributes and holes, however many there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from forebay.cluster.agent.transfer import manifest
from forebay.cluster.agent.transfer.manifest import Attribute, Extra, ManifestRecord, ManifestWriter, TransferManifest
from forebay.cluster.agent.transfer.options import TransferOptions, chunks_of
from forebay.cluster.agent.transfer.plan import Walk
from tests.cluster.agent.transfer.harness import SMALL, Harness, tree_of

PAGE = 65536


def sparse(path: Path, segments: int) -> None:
    """Make a file with data at the beginning of every second page, and a hole at its end."""
    with path.open("wb") as file:
        for number in range(segments):
            file.seek(2 * number * PAGE)
            file.write(b"x" * 4096)
        file.truncate(2 * segments * PAGE)


def walked(harness: Harness, options: TransferOptions = SMALL) -> dict[bytes, ManifestRecord]:
    """Return the records as they come back out of a manifest."""
    descriptor = os.memfd_create("manifest")
    writer = ManifestWriter(descriptor)
    for record in Walk([harness.item()], options).records():
        writer.add(record, chunks_of(record.size, options))
    found = {record.path: record for record in TransferManifest(descriptor, writer.seal().manifest_bytes).records()}
    os.close(descriptor)
    return found


def test_the_manifest_has_the_attributes_of_large_files_and_digests_of_long_values(harness: Harness) -> None:
    large = harness.source / "large"
    large.write_bytes(os.urandom(20000))
    os.setxattr(large, "user.b", b"v" * 1000)
    os.setxattr(large, "user.a", b"short")
    (harness.source / "plain").write_bytes(os.urandom(20000))
    (harness.source / "small").write_bytes(b"x")
    os.setxattr(harness.source / "small", "user.a", b"short")
    found = walked(harness)
    extra = found[b"large"].extra
    assert extra is not None and extra.attributes_count == 2
    assert extra.attributes == (
        Attribute(b"user.a", 5, b"short"),
        Attribute(b"user.b", 1000, xxhash.xxh3_128_digest(b"v" * 1000)),
    )
    assert found[b"plain"].extra is None and found[b"small"].extra is None
    harness.carry()
    assert {line.path: line.flags for line in harness.lines() if line.kind == "file"} == {
        "large": ("xattrs",),
        "plain": (),
        "small": ("xattrs",),
    }
    before = harness.carry().manifest_digest
    os.setxattr(large, "user.a", b"SHORT")
    assert harness.carry().manifest_digest != before


def test_attributes_that_nobody_wants_copied_are_not_looked_for(harness: Harness) -> None:
    (harness.source / "large").write_bytes(os.urandom(20000))
    os.setxattr(harness.source / "large", "user.a", b"v")
    assert walked(harness, TransferOptions(chunk_bytes=4096, large_bytes=16384, xattrs=False))[b"large"].extra is None


@pytest.mark.parametrize("segments", [0, 1, 3])
def test_the_manifest_has_the_map_of_a_sparse_file(harness: Harness, segments: int) -> None:
    sparse(harness.source / "f", segments)
    os.truncate(harness.source / "f", max(20000, 2 * segments * PAGE))
    extra = walked(harness)[b"f"].extra
    assert extra is not None
    assert (extra.segments_count, len(extra.segments), extra.segments_digest) == (segments, 2 * segments, b"")
    assert [at // PAGE for at in extra.segments[::2]] == [2 * number for number in range(segments)]
    harness.carry()
    assert tree_of(harness.destination) == tree_of(harness.source)


def test_of_too_many_attributes_or_segments_a_number_and_a_digest_are_kept(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "SEGMENTS_MAX", 2)
    monkeypatch.setattr(manifest, "ATTRIBUTES_MAX", 1)
    seen = set()
    for segments in (3, 4):
        sparse(harness.source / "f", segments)
        for value in (b"1", b"2"):
            os.setxattr(harness.source / "f", "user.a", value)
            os.setxattr(harness.source / "f", "user.b", b"v")
            extra = walked(harness)[b"f"].extra
            assert extra is not None
            assert (extra.segments, extra.segments_count, extra.attributes, extra.attributes_count) == (
                (),
                segments,
                (),
                2,
            )
            seen.add((extra.segments_digest, extra.attributes_digest))
    assert len(seen) == 4
    monkeypatch.setattr(manifest, "SEGMENTS_WALKED_MAX", 3)
    extra = walked(harness)[b"f"].extra
    assert extra is not None and extra.segments_count == 3


def test_a_frame_of_files_with_all_that_they_may_have_can_be_read_again() -> None:
    full = Extra(
        attributes=tuple(Attribute(b"user." + b"n" * 250, 64, b"v" * 64) for _ in range(manifest.ATTRIBUTES_MAX)),
        segments=tuple(2**62 + number for number in range(2 * manifest.SEGMENTS_MAX)),
    )
    descriptor = os.memfd_create("manifest")
    writer = ManifestWriter(descriptor)
    for number in range(40):
        writer.add(ManifestRecord(number, 0, 0, b"p" * 4000, 2**62, 1, 1, 1, 2**62, 1, 1, 1, 2**40, full), 0)
    read = list(TransferManifest(descriptor, writer.seal().manifest_bytes).records())
    assert [record.index for record in read] == list(range(40)) and all(record.extra == full for record in read)
    os.close(descriptor)
