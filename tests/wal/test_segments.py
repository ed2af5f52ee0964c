"""Archive segments: complete or absent, described by their manifest, and every changed byte is detected."""

import os
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.wal import Environment, Journal, segments
from forebay.wal.archived import ArchivedLedger
from forebay.wal.ledger import Ledger, SegmentName
from forebay.wal.pruning import authorise, prune_some
from forebay.wal.records import PrunedRange
from forebay.wal.segments import Archive, Segment, SegmentBroken, SegmentDisk, archive_from
from tests.wal.support import CLUSTER, entry, open_env
from tests.wal.test_pruning import SEGMENTS

LAST = 90
NOTE = "forebay/cluster-1\n90\nroot\n"


def whole(directory: Path, *, last: int = LAST, kind: int = 0) -> Environment:
    """Create a ledger with entries of all sizes, some of which settle nothing."""
    env = open_env(directory)
    journal = Journal(env)
    journal.set_term(3, None)
    for index in range(1, last + 1):
        journal.append([entry(index, 1 + (index > 30) + (index > 60), 10 + 1000 * (index % 7) + kind)])
        journal.set_commit(index)
        journal.record_applied(journal.entry(index), journal.applied_revision + index % 3)
    journal.compact_to(last)
    journal.flush_hints()
    return env


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit segments to twenty entries and blocks to five."""
    monkeypatch.setattr(segments, "SEGMENT_ENTRIES", 20)
    monkeypatch.setattr(segments, "BLOCK_ENTRIES", 5)
    monkeypatch.setattr(segments, "BLOCK_BYTES", 12_000)


def archive(env: Environment, directory: Path, last: int = LAST, disk: SegmentDisk = segments.DISK) -> int:
    directory.mkdir(exist_ok=True)
    ledger = Ledger(env)

    def read(first: int, last: int) -> list[segments.LedgerEntry]:
        return list(ledger.read(first, limit=last - first + 1))

    written = archive_from(
        directory,
        read,
        cluster_id=env.identity.cluster_id,
        last_index=last,
        checkpoint=NOTE,
        progress=lambda done, last: None,
        disk=disk,
    )
    return len(written)


def test_archive_has_every_entry_and_continues_where_it_ended(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    ledger = Ledger(env)
    assert archive(env, tmp_path / "a", 41) > 1
    names = sorted(os.listdir(tmp_path / "a"))
    assert archive(env, tmp_path / "a", 41) == 0
    assert archive(env, tmp_path / "a") > 1
    assert sorted(os.listdir(tmp_path / "a"))[: len(names)] == names
    held = Archive(tmp_path / "a")
    assert (held.last_index, held.end, held.cluster_id) == (LAST, ledger.row_at(LAST), CLUSTER)
    assert list(held.entries()) == list(ledger.read(1, limit=LAST))
    assert [held.row_at(index) for index in range(1, LAST + 1)] == [
        ledger.row_at(index) for index in range(1, LAST + 1)
    ]
    assert list(held.entries(37)) == list(ledger.read(37, limit=LAST))
    assert [held.index_of_revision(one) for one in range(1, ledger.applied_revision + 1)] == [
        ledger.index_of_revision(one) for one in range(1, ledger.applied_revision + 1)
    ]
    for missing in (0, ledger.applied_revision + 1):
        with pytest.raises(LookupError):
            held.index_of_revision(missing)
    for segment in held.segments:
        segment.check_bytes()
        assert segment.manifest.checkpoint == NOTE and segment.manifest.last_term <= 3
    env.close()


def test_two_archives_of_one_ledger_are_identical(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    for name in ("a", "b"):
        archive(env, tmp_path / name)
    one, other = ([path.read_bytes() for path in sorted((tmp_path / name).iterdir())] for name in ("a", "b"))
    assert one == other
    env.close()


class Died(Exception):
    """The process was killed."""


class FailingDisk(SegmentDisk):
    """Disk that dies just before the operation with the given number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Died

    def create(self, directory: int, name: str) -> int:
        self._step()
        return super().create(directory, name)

    def write(self, file: int, data: bytes) -> None:
        self._step()
        # A write may leave half of its data.
        super().write(file, data[: len(data) // 2])
        self._step()
        super().write(file, data[len(data) // 2 :])

    def sync(self, file: int) -> None:
        self._step()
        super().sync(file)

    def rename(self, directory: int, old: str, new: str) -> None:
        self._step()
        super().rename(directory, old, new)


def test_interrupted_writing_leaves_complete_segments_and_can_continue(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    archive(env, tmp_path / "once")
    once = [path.read_bytes() for path in sorted((tmp_path / "once").iterdir())]
    step = 0
    while True:
        place = tmp_path / f"a{step}"
        try:
            archive(env, place, disk=FailingDisk(step))
            break
        except Died:
            for segment in Archive(place).segments:
                segment.check_bytes()
            archive(env, place)
            assert [path.read_bytes() for path in sorted(place.glob("*.fbl"))] == once, step
            assert len(list(place.iterdir())) == len(once)
        step += 1
    assert step > 50
    env.close()


def test_every_flipped_byte_of_a_segment_is_detected(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    archive(env, tmp_path / "a")
    path = sorted((tmp_path / "a").iterdir())[1]
    content = path.read_bytes()
    generator = random.Random(16)
    places = {*range(40), *range(len(content) - 40, len(content)), *generator.sample(range(len(content)), 150)}
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(SegmentBroken):
            for segment in Archive(tmp_path / "a").segments:
                segment.check_bytes()
            pytest.fail(f"byte {place}")
    for length in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(SegmentBroken):
            Archive(tmp_path / "a")
    env.close()


def test_rewritten_entry_with_valid_checksums_contradicts_the_chain(tmp_path: Path) -> None:
    env, other = whole(tmp_path / "r1"), whole(tmp_path / "r2", kind=16)
    archive(env, tmp_path / "a")
    archive(other, tmp_path / "b")
    names = sorted(os.listdir(tmp_path / "a"))
    # The segment is consistent in itself, but its neighbours do not lead to it.
    (tmp_path / "a" / names[2]).write_bytes((tmp_path / "b" / names[2]).read_bytes())
    with pytest.raises(SegmentBroken, match="does not continue the digest"):
        Archive(tmp_path / "a")
    env.close()
    other.close()


def test_missing_or_foreign_segment_is_named(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    archive(env, tmp_path / "a")
    names = sorted(os.listdir(tmp_path / "a"))
    gone = SegmentName.parse(names[1])
    assert gone is not None
    held = (tmp_path / "a" / names[1]).read_bytes()
    (tmp_path / "a" / names[1]).unlink()
    with pytest.raises(SegmentBroken, match=f"entries {gone.first_index} to {gone.last_index} are missing"):
        Archive(tmp_path / "a")
    wrong = tmp_path / "a" / str(gone._replace(last_index=gone.last_index + 1))
    wrong.write_bytes(held)
    with pytest.raises(SegmentBroken, match="its manifest lists"):
        Segment(wrong)
    env.close()


def test_archive_of_another_history_or_cluster_is_not_continued(tmp_path: Path) -> None:
    env, other = whole(tmp_path / "r1"), whole(tmp_path / "r2", kind=16)
    archive(other, tmp_path / "a", 40)
    with pytest.raises(SegmentBroken, match="entry 41 does not continue"):
        archive(env, tmp_path / "a")
    with pytest.raises(SegmentBroken, match="their histories differ"):
        ArchivedLedger(env, Archive(tmp_path / "a"))
    env.close()
    other.close()
    foreign = Environment.open(
        tmp_path / "r3", cluster_id="another", replica="r1", map_size_bytes=64 << 20, create=True
    )
    with pytest.raises(SegmentBroken, match="the archive belongs to cluster cluster-1"):
        archive(foreign, tmp_path / "a")
    with pytest.raises(SegmentBroken, match="the archive belongs to cluster cluster-1"):
        ArchivedLedger(foreign, Archive(tmp_path / "a"))
    foreign.close()


def test_two_processes_never_write_into_one_archive(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")

    class Meanwhile(SegmentDisk):
        def sync(self, file: int) -> None:
            super().sync(file)
            with pytest.raises(BlockingIOError):
                archive(env, tmp_path / "a")

    assert archive(env, tmp_path / "a", disk=Meanwhile()) > 1
    env.close()


def test_entries_pruned_beyond_the_archive_can_no_longer_be_archived(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    authorise(env, PrunedRange(80, SEGMENTS))
    while prune_some(env):
        pass
    with pytest.raises(SegmentBroken, match="the archive needs entry 65, which this ledger lacks"):
        archive(env, tmp_path / "a")
    env.close()


@pytest.mark.parametrize("end", [64, 70, 79, 84, LAST])
def test_pruned_ledger_with_its_archive_reads_like_the_whole_ledger(tmp_path: Path, end: int) -> None:
    env = whole(tmp_path / "r1")
    ledger = Ledger(env).as_of_now()
    entries = list(ledger.read(1, limit=LAST))
    rows = [ledger.row_at(index) for index in range(1, LAST + 1)]
    revisions = [ledger.index_of_revision(one) for one in range(1, ledger.applied_revision + 1)]
    archive(env, tmp_path / "a", end)
    authorise(env, PrunedRange(80, SEGMENTS))
    while prune_some(env):
        pass
    both = ArchivedLedger(env, Archive(tmp_path / "a"))
    lacks = range(max(65, end + 1), 80)
    for one in (both, both.as_of_now(), both.as_stored()):
        assert list(one.read(1, limit=LAST)) == [found for found in entries if found.index not in lacks]
        for first in range(1, LAST + 1):
            found = one.read_some(first, entries_max=3, bytes_max=10**6)
            assert found and found == [
                entry for entry in entries if entry.index in range(found[0].index, found[-1].index + 1)
            ]
            assert found[0].index == (80 if first in lacks else first)
        assert [(gap.first_index, gap.last_index) for gap in one.gaps()] == ([(lacks[0], lacks[-1])] if lacks else [])
        assert one.first_index == 1
        if not lacks:
            assert [one.row_at(index) for index in range(1, LAST + 1)] == rows
            assert [one.index_of_revision(one_) for one_ in range(1, one.applied_revision + 1)] == revisions
    env.close()


NO_DIGEST = "0" * 62 + "zz"


@pytest.mark.parametrize(
    "change",
    [
        {"format": "forebay-segment-0"},
        {"first_index": 2},
        {"last_index": 19},
        {"digest_before": NO_DIGEST},
        {"digest_after": NO_DIGEST},
        {"digest_after": "00" * 31},
        {"digest_after": ""},
        {"revision_before": 7},
    ],
)
def test_each_field_of_a_manifest_is_checked(tmp_path: Path, change: dict[str, object]) -> None:
    env = whole(tmp_path / "r1")
    archive(env, tmp_path / "a")
    env.close()
    first = min(path for path in (tmp_path / "a").iterdir() if SegmentName.parse(path.name) is not None)
    segment = Segment(first)
    name = SegmentName.parse(first.name)
    segment._check_manifest(name)
    segment.manifest = replace(segment.manifest, **change)
    with pytest.raises(SegmentBroken):
        segment._check_manifest(name)
