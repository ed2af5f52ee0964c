"""The manifest: what was walked, as it was, in one order, and never in memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.agent.transfer import plan
from forebay.cluster.agent.transfer.digests import digest_of
from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.agent.transfer.manifest import (
    DIRECTORY,
    FILE,
    LINK,
    ODD,
    ManifestRecord,
    ManifestWriter,
    TransferManifest,
)
from forebay.cluster.agent.transfer.options import CHUNKS_MAX, ItemKind, TransferOptions, chunk_bytes_of, chunks_of
from forebay.cluster.agent.transfer.plan import Walk, order_of
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant


def record(index: int, path: bytes = b"a", size: int = 1, kind: int = FILE) -> ManifestRecord:
    return ManifestRecord(index, 0, kind, path, size, -5, 10**18, 0o100644, 2**40, 7, 0, 1)


def memory() -> int:
    return os.memfd_create("manifest")


records = st.lists(
    st.tuples(st.binary(max_size=5000), st.integers(0, 2**63 - 1), st.sampled_from([FILE, DIRECTORY, ODD])),
    max_size=200,
)


@settings(max_examples=40, deadline=None)
@given(records)
def test_records_come_back_as_they_were_from_the_start_and_from_any_of_them(
    given_: list[tuple[bytes, int, int]],
) -> None:
    descriptor = memory()
    writer = ManifestWriter(descriptor)
    written = [record(index, *fields) for index, fields in enumerate(given_)]
    for one in written:
        writer.add(one, 0)
    totals = writer.seal()
    manifest = TransferManifest(descriptor, totals.manifest_bytes)
    located = list(manifest.records_with_places())
    assert [one for _, one in located] == written
    for at, (place, _) in enumerate(located):
        assert list(manifest.records(place, 3)) == written[at : at + 3]
        assert manifest.at(place) == written[at]
    assert (totals.records, totals.files) == (len(written), sum(1 for one in written if one.kind == FILE))
    assert totals.size_bytes == sum(one.size for one in written if one.kind == FILE)
    assert digest_of(descriptor, "xxh3-128", 0, totals.manifest_bytes) == totals.manifest_digest
    os.close(descriptor)


def test_a_manifest_that_was_damaged_has_another_digest_and_one_that_was_cut_is_an_error() -> None:
    descriptor = memory()
    writer = ManifestWriter(descriptor)
    for index in range(100):
        writer.add(record(index), 0)
    totals = writer.seal()
    os.ftruncate(descriptor, totals.manifest_bytes - 1)
    with pytest.raises(OSError, match="damaged"):
        list(TransferManifest(descriptor, totals.manifest_bytes).records())
    assert digest_of(descriptor, "xxh3-128", 0, totals.manifest_bytes) != totals.manifest_digest
    os.close(descriptor)


def test_writing_and_reading_a_manifest_takes_the_same_memory_however_long_it_is() -> None:
    def peak(count: int) -> int:
        descriptor = memory()
        tracemalloc.start()
        writer = ManifestWriter(descriptor)
        for index in range(count):
            writer.add(record(index, b"directory/file-%d" % index), 0)
        seen = sum(1 for _ in TransferManifest(descriptor, writer.seal().manifest_bytes).records())
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        os.close(descriptor)
        assert seen == count
        return most

    assert peak(40_000) < peak(10_000) * 1.2


def test_a_walk_is_in_the_order_that_manifests_are_compared_in(harness: Harness) -> None:
    plant(harness.source, {"b": {"x": b"", "b": {}}, "b.c": b"", "a": {"~": b""}, "b ": {"z": b""}, "é": b"", "B": b""})
    os.makedirs(os.fsencode(harness.source) + b"/\xff\xfe")
    walked = list(Walk([harness.item(), harness.item()], TransferOptions()).records())
    assert [order_of(one) for one in walked] == sorted(order_of(one) for one in walked)
    assert [one.index for one in walked] == list(range(len(walked)))
    assert len(walked) == 24


def test_chunks_of_large_files_have_places_of_their_own_in_the_table(harness: Harness) -> None:
    for name, size in (("a", 16384), ("b", 16383), ("c", 20000), ("d", 4096 * 9)):
        (harness.source / name).write_bytes(bytes(size))
    walked = {one.path: one for one in Walk([harness.item()], SMALL).records()}
    assert [walked[name].chunk_at for name in (b"a", b"b", b"c", b"d")] == [0, -1, 4, 9]


@given(st.integers(0, 2**60))
def test_a_file_has_a_bounded_number_of_chunks_however_large_it_is(size: int) -> None:
    count, chunk_bytes = chunks_of(size, TransferOptions()), chunk_bytes_of(size, TransferOptions())
    assert count <= CHUNKS_MAX
    assert count * chunk_bytes >= size or count == 0
    assert (count - 1) * chunk_bytes < size or count == 0


def test_a_link_in_a_tree_is_kept_followed_left_out_or_fails_the_walk_by_name_as_was_asked(harness: Harness) -> None:
    (harness.source / "a").write_bytes(b"a")
    (harness.source / "odd").symlink_to("a")
    for links, kind in (("keep", LINK), ("follow", FILE), ("skip", ODD)):
        item = harness.item()._replace(links=links)
        kinds = {one.path: one.kind for one in Walk([item], TransferOptions()).records()}
        assert kinds == {b"": DIRECTORY, b"a": FILE, b"odd": kind}
    item = harness.item()._replace(links="fail")
    with pytest.raises(TransferFailed, match="source/odd is a symbolic link to 'a', which links=fail") as caught:
        list(Walk([item, item], TransferOptions(outgoing=True)).records())
    assert caught.value.item == 0


def test_a_tree_too_deep_or_a_directory_too_full_is_refused_by_name(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    (harness.source / "1" / "2" / "3").mkdir(parents=True)
    monkeypatch.setattr(plan, "DIRECTORY_DEPTH_MAX", 3)
    with pytest.raises(TransferFailed, match="1/2/3 is nested more than 3 directories deep"):
        list(Walk([harness.item()], TransferOptions()).records())
    monkeypatch.setattr(plan, "DIRECTORY_ENTRIES_MAX", 0)
    with pytest.raises(TransferFailed, match="source has more than 0 entries"):
        list(Walk([harness.item()], TransferOptions()).records())


def test_the_agents_own_directory_is_not_walked(harness: Harness) -> None:
    from forebay.cluster.agent.files.paths import identity_of
    from forebay.cluster.system.descriptors import open_directory

    (harness.source / "a" / "home").mkdir(parents=True)
    descriptor = open_directory(harness.source / "a" / "home")
    barred = identity_of(descriptor)
    os.close(descriptor)
    with pytest.raises(TransferFailed, match="a/home is the agent's own directory"):
        list(Walk([harness.item(barred=barred)], TransferOptions()).records())


def test_a_tree_of_200_levels_and_names_of_any_bytes_is_walked(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    harness = Harness(tmp_path / "r")
    deep = harness.source
    for _ in range(199):
        deep /= "d"
        deep.mkdir()
    odd = os.fsencode(deep) + b"/" + b"\xff\n" * 127 + b"x"
    os.close(os.open(odd, os.O_CREAT | os.O_WRONLY))
    walked = list(Walk([harness.item()], TransferOptions()).records())
    assert walked[-1].path == b"d/" * 199 + b"\xff\n" * 127 + b"x"
    assert harness.carry([harness.item(ItemKind.DIRECTORY)]).files == 1
    harness.close()
