"""Archived and pruned entries can still be verified, replayed and proven, and nothing is pruned without an archive."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.audit.archive import commands
from forebay.cluster.audit.archive.retention import below_of_size
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.security.proofs import Checkpoint, Tile, bundle, leaf_hash, leaves_in, sign, write_note
from forebay.cluster.server import PruneNote, Pruner, answer_to_note, leave_note
from forebay.cluster.system.clock import SystemClock
from forebay.replica.state.digest import state_digest
from forebay.snapshots import write_snapshot
from forebay.wal import (
    Archive,
    BrokenInvariant,
    Environment,
    Hole,
    JobIndex,
    Journal,
    Ledger,
    SegmentName,
    authorise,
    prune_some,
    segments,
)
from forebay.wal import directory as directories
from tests.cluster.audit.ledgers import CLUSTER, MAP_SIZE_BYTES, REPLICA, ROOT, typed, written
from tests.cluster.audit.sites import PRIVATE, Site, batches, make_site
from tests.cluster.harness import story

BELOW = 600
PRUNED = 513
"""What comes of it in whole tiles."""
VERIFIER = ROOT / "cluster" / "security" / "proofs" / "verify_proof.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("made"))


@pytest.fixture
def site(made: Site, tmp_path: Path) -> Site:
    return made.copy(tmp_path)


@pytest.fixture(scope="module")
def archives(made: Site, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two archives of all entries below the checkpoint, in two segments each."""
    directory = tmp_path_factory.mktemp("archives")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_ENTRIES", 500)
        patch.setattr(segments, "BLOCK_ENTRIES", 100)
        for name in ("a", "b"):
            assert typed("audit", "archive", directory / name, "--data", made.home).exit_code == 0
            assert len(list((directory / name).iterdir())) == 2
    return directory / "a", directory / "b"


@pytest.fixture
def copies(archives: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the archives, for tests that damage them."""
    return tuple(Path(shutil.copytree(one, tmp_path / one.name)) for one in archives)  # type: ignore[return-value]


def test_the_directory_entry_of_a_new_archive_is_synced(
    made: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[Path](), directories.sync
    monkeypatch.setattr(directories, "sync", lambda path: (synced.append(path), sync(path))[1])
    assert typed("audit", "archive", tmp_path / "new", "--data", made.home).exit_code == 0
    assert tmp_path in synced


def prune(site: Site, *archives: Path, below: int = BELOW, more: tuple[object, ...] = ()) -> Result:
    named = [word for one in archives for word in ("--archive", one)]
    return typed("audit", "prune", "--data", site.home, "--below", below, "--keys", site.keys, *named, "--yes", *more)


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def pruned(site: Site, archives: tuple[Path, Path]) -> Site:
    assert prune(site, *archives).exit_code == 0
    return site


def test_archived_and_pruned_entries_are_verified_replayed_and_proven(
    site: Site, archives: tuple[Path, Path], tmp_path: Path
) -> None:
    before = answer(typed("audit", "replay", "--data", site.home, "--json"))
    reported = answer(typed("audit", "jobs", "--data", site.home, "--json"))
    dumped = typed("audit", "dump", "--data", site.home).stdout
    found = answer(prune(site, *archives, more=("--json",)))
    assert (found["first_index"], found["last_index"], found["removed"]) == (65, PRUNED - 1, "here")
    assert (found["signed_by"], found["checkpoint_size"], found["snapshot_index"]) == (3, site.last, site.last - 30)
    assert found["ledger_digest"] == site.made.digests[PRUNED - 2].hex()
    # The replica alone.
    verified = answer(typed("audit", "verify", "--data", site.home, "--json", "--deep"))
    assert verified["ledger_digest"] == site.made.applied_digest
    assert [(gap["first_index"], gap["last_index"]) for gap in verified["missing"]] == [(65, PRUNED - 1)]
    assert verified["pruned"] == {"below": PRUNED, "segments": found["segments"]}
    assert verified["job_index"]["index"] == site.last
    incomplete = typed("audit", "verify", "--data", site.home, "--complete")
    assert incomplete.exit_code == ExitCode.VERIFICATION_FAILED
    assert f"entries 65 to {PRUNED - 1} are missing" in incomplete.stderr
    assert f"entries before {PRUNED} were pruned: name their archive with --archive" in incomplete.stderr
    refused = typed("audit", "replay", "--data", site.home)
    assert refused.exit_code == ExitCode.NOT_FOUND and "does not hold the entries 65 to 512" in refused.stderr
    # With either archive, the ledger is complete.
    for archive in archives:
        both = answer(
            typed(
                *("audit", "verify", "--data", site.home, "--archive", archive, "--keys", site.keys),
                *("--complete", "--deep", "--json"),
            )
        )
        assert both["missing"] == [] and both["state_digest"] == before["state_digest"]
        assert both["archive"]["checkpoints_signed"] == both["archive"]["checkpoints"] == 1
        assert [one["proven"] for one in both["snapshots"]] == [True, True]
        again = answer(typed("audit", "replay", "--data", site.home, "--archive", archive, "--json"))
        assert again == before
    archive = archives[0]
    assert answer(typed("audit", "jobs", "--data", site.home, "--archive", archive, "--json")) == reported
    assert typed("audit", "dump", "--data", site.home, "--archive", archive).stdout == dumped
    assert typed("audit", "redecide", "--data", site.home, "--archive", archive).exit_code == 0
    at = answer(typed("audit", "replay", "--data", site.home, "--archive", archive, "--at", 300, "--json"))
    assert at["revision"] == 300
    # Repeat the command, which now has nothing to do.
    assert answer(prune(site, *archives, more=("--json",)))["entries"] == 0


def test_a_pruned_job_needs_the_archive_for_its_proof(
    pruned: Site, archives: tuple[Path, Path], tmp_path: Path
) -> None:
    output = tmp_path / "10.proof"
    words = ("audit", "prove", "--data", pruned.home, "--job", 10, "-o", output)
    refused = typed(*words)
    assert refused.exit_code == ExitCode.NOT_FOUND and not output.exists()
    assert re.search(r"it was pruned, and is in the archive: segment-0{19}1-\d{20}\.fbl", refused.stderr)
    assert "name the archive with --archive" in refused.stderr
    assert typed(*words, "--archive", archives[1]).exit_code == 0
    checked = subprocess.run(
        [sys.executable, "-P", str(VERIFIER), "--keys", str(pruned.keys), str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert "job 10;" in checked.stdout and "submit_job by user user0: JobSubmitted" in checked.stdout
    # Present entries need no archive, although earlier leaves belong to pruned entries.
    assert typed("audit", "prove", "--data", pruned.home, "--job", 70, "-o", tmp_path / "70.proof").exit_code == 0


def test_the_entries_of_a_job_are_dumped_from_the_archive(pruned: Site, archives: tuple[Path, Path]) -> None:
    dumped = typed("audit", "dump", "--data", pruned.home, "--archive", archives[0], "--job", 10)
    rows = [json.loads(line) for line in dumped.stdout.splitlines()]
    kinds = [event["event"] for row in rows for record in row["records"] for event in record["events"]]
    assert kinds[0] == "job_submitted" and "run_started" in kinds
    limited = typed("audit", "dump", "--data", pruned.home, "--archive", archives[0], "--job", 10, "--limit", 2)
    assert limited.stdout.splitlines() == dumped.stdout.splitlines()[:2]
    assert typed("audit", "dump", "--data", pruned.home, "--job", 10).stdout == ""


def test_an_archive_is_verified_and_listed_without_a_ledger(site: Site, archives: tuple[Path, Path]) -> None:
    alone = answer(typed("audit", "verify", "--archive", archives[0], "--keys", site.keys, "--json"))
    assert alone["archive"]["last_index"] == site.last and alone["archive"]["checkpoints_signed"] == 1
    assert alone["archive"]["ledger_digest"] == site.made.applied_digest
    assert typed("audit", "verify", "--archive", archives[0], "--cluster", CLUSTER).exit_code == 0
    listed = answer(typed("audit", "archive", archives[0], "--list", "--json"))
    assert listed["cluster_id"] == CLUSTER and listed["segments"][0]["digest_before"] == "00" * 32
    assert listed["segments"][-1]["checkpoint"].startswith(f"forebay/{CLUSTER}\n{site.last}\n")
    shown = typed("audit", "archive", archives[0], "--list").stdout.splitlines()
    assert [row.split()[:3] for row in shown[1:]] == [
        [str(one["first_index"]), "to", str(one["last_index"])] for one in listed["segments"]
    ]
    assert max(map(len, shown)) <= 80


def test_an_archive_continues_at_the_next_checkpoint(made: Site, tmp_path: Path) -> None:
    site = made.copy(tmp_path)
    root = made.tree().root
    site.write_note(300, root(300), 0, 1)
    assert typed("audit", "archive", tmp_path / "a", "--data", site.home).exit_code == 0
    assert Archive(tmp_path / "a").last_index == 300
    assert typed("audit", "archive", tmp_path / "a", "--data", site.home).exit_code == 0
    site.write_note(site.last, root(site.last), 0, 2)
    written_ = answer(typed("audit", "archive", tmp_path / "a", "--data", site.home, "--json"))["written"]
    assert written_ == [str(SegmentName(301, site.last))]
    verified = answer(typed("audit", "verify", "--archive", tmp_path / "a", "--keys", site.keys, "--json"))
    assert verified["archive"]["checkpoints_signed"] == 2
    # The live ledger continues an archive that ends before the ledger's checkpoint.
    (tmp_path / "a" / str(SegmentName(301, site.last))).unlink()
    assert typed("audit", "verify", "--data", site.home, "--archive", tmp_path / "a", "--complete").exit_code == 0


def test_an_archive_spans_incarnations_of_the_cluster(made: Site, tmp_path: Path) -> None:
    site, archive = made.copy(tmp_path), tmp_path / "a"
    first, root = len(made.made.entries), made.tree().root
    site.write_note(300, root(300), 0, 1, 2)
    assert typed("audit", "archive", archive, "--data", site.home).exit_code == 0
    site.write_note(first, root(first), 0, 1, 2)
    origin, last = site.recover(more=3)
    # Until the new incarnation has signed, the last checkpoint belongs to the previous incarnation.
    assert typed("audit", "archive", archive, "--data", site.home).exit_code == 0
    assert Archive(archive).last_index == first
    site.write_note(last, site.tree(last).root(last), 0, 1, 2, origin=origin)
    assert typed("audit", "archive", archive, "--data", site.home).exit_code == 0
    assert Archive(archive).last_index == last

    def verified(*words: object) -> Any:
        named = ("audit", "verify", "--archive", archive, "--keys", site.keys, "--json")
        return answer(typed(*named, *words))["archive"]

    site.write_keys(3, f"forebay/{CLUSTER}", origin)
    found = verified("--data", site.home, "--complete", "--deep")
    assert (found["checkpoints"], found["checkpoints_signed"], found["signed_entries"]) == (3, 3, last)
    assert verified() == found
    # A majority counts the keys of the checkpoint's own origin.
    site.write_keys(3, f"forebay/{CLUSTER}")
    assert (verified()["checkpoints_signed"], verified()["signed_entries"]) == (2, first)
    site.write_keys(3, origin)
    assert (verified()["checkpoints_signed"], verified()["signed_entries"]) == (1, last)


def test_entries_before_a_recovery_can_be_pruned_afterwards(
    made: Site, archives: tuple[Path, Path], tmp_path: Path
) -> None:
    site = made.copy(tmp_path)
    copies = [Path(shutil.copytree(one, tmp_path / one.name)) for one in archives]
    origin, last = site.recover()
    site.write_note(last, site.tree(last).root(last), 0, 1, 2, origin=origin)
    for archive in copies:
        assert typed("audit", "archive", archive, "--data", site.home).exit_code == 0
    refused = prune(site, *copies)
    assert refused.exit_code == ExitCode.REFUSED and f"keys of {origin}" in refused.stderr
    site.write_keys(3, f"forebay/{CLUSTER}", origin)
    assert prune(site, *copies).exit_code == 0
    whole = ("audit", "verify", "--data", site.home, "--archive", copies[1], "--keys", site.keys, "--complete")
    assert typed(*whole, "--deep").exit_code == 0


@pytest.mark.parametrize(
    ("origin", "why"),
    [
        (f"forebay/{CLUSTER}", "the entries record the incarnations 1, 2-abababababababab"),
        (f"forebay/{CLUSTER}/2-{'cd' * 8}", f"belongs to forebay/{CLUSTER}/2-{'cd' * 8}"),
        (f"forebay/{'1' * 32}/2-{'ab' * 8}", "does not cover its entries"),
        ("forebay/", "does not cover its entries"),
    ],
    ids=["one_that_is_over", "another_recovery", "another_cluster", "no_cluster"],
)
def test_a_checkpoint_of_the_wrong_incarnation_is_rejected(origin: str, why: str, made: Site, tmp_path: Path) -> None:
    site, archive = made.copy(tmp_path), tmp_path / "a"
    _, last = site.recover()
    root = site.tree(last).root(last)
    checkpoint = Checkpoint(origin, last, root).text()
    with site.open() as environment:
        segments.archive_from(
            directories_made(archive),
            lambda first, to: Ledger(environment).read(first, limit=to - first + 1),
            cluster_id=CLUSTER,
            last_index=last,
            checkpoint=write_note(checkpoint, [sign(checkpoint, origin, one) for one in PRIVATE[:3]]),
            progress=lambda done, of: None,
        )
    refused = typed("audit", "verify", "--archive", archive)
    assert refused.exit_code == ExitCode.VERIFICATION_FAILED and why in refused.stderr, refused.output


@pytest.mark.parametrize("origin", [f"forebay/{CLUSTER}/2-{'cd' * 8}", f"forebay/{CLUSTER}/3-{'ab' * 8}"])
def test_archiving_needs_a_checkpoint_of_the_entries_incarnation(origin: str, made: Site, tmp_path: Path) -> None:
    site = made.copy(tmp_path)
    _, last = site.recover()
    site.write_note(last, site.tree(last).root(last), 0, 1, 2, origin=origin)
    refused = typed("audit", "archive", tmp_path / "a", "--data", site.home)
    assert refused.exit_code == ExitCode.REFUSED and f"belongs to {origin}" in refused.stderr
    assert f"the ledger to forebay/{CLUSTER}/2-{'ab' * 8}" in refused.stderr


def directories_made(directory: Path) -> Path:
    directory.mkdir(0o700)
    return directory


Spoil = Callable[[Site, tuple[Path, Path]], tuple[Path, ...]]
"""Damages something, and returns the archives to name."""


def one_copy(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    return archives[:1]


def one_copy_twice(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    (archives[0].parent / "again").symlink_to(archives[0])
    return archives[0], archives[0].parent / "again"


def one_file(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    for path in archives[0].iterdir():
        (archives[1] / path.name).unlink()
        os.link(path, archives[1] / path.name)
    return archives


def short(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    for path in archives[1].iterdir():
        path.unlink()
    return archives


def no_checkpoint(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    (site.home / "tlog" / "checkpoint").unlink()
    return archives


def early_checkpoint(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    site.write_note(400, site.tree().root(400), 0, 1, 2)
    return archives


def minority(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    site.write_note(site.last, site.tree().root(site.last), 0, 3, 4)
    return archives


def stranger(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    site.write_note(site.last, site.tree().root(site.last), 3, 4)
    return archives


def no_snapshot(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    shutil.rmtree(site.home / "snapshots")
    return archives


def early_snapshot(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    shutil.rmtree(site.home / "snapshots")
    site.write_snapshot(500)
    return archives


def unbound_snapshot(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    shutil.rmtree(site.home / "snapshots")
    site.write_snapshot(site.last)
    return archives


def no_index(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    shutil.rmtree(site.home / "index")
    return archives


def early_index(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    site.write_index(100)
    return archives


def early_tree(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    shutil.rmtree(site.home / "tlog" / "tile")
    site.tree(300)
    return archives


def damaged_tree(site: Site, archives: tuple[Path, Path]) -> tuple[Path, ...]:
    path = site.home / "tlog" / "tile" / "entries" / "000"
    path.write_bytes(path.read_bytes()[:-100])
    return archives


REFUSED: dict[str, tuple[Spoil, int, str, str]] = {
    "one copy only": (one_copy, BELOW, "1 archive is named, but entries", "name two directories"),
    "one copy named twice": (one_copy_twice, BELOW, "1 archive is named", "name two directories"),
    "two names of one file": (one_file, BELOW, "are the same file", "make a separate copy"),
    "a copy that ends too early": (short, BELOW, "b ends with entry 0, but entries up to 512", "use --below 1"),
    "no checkpoint": (no_checkpoint, BELOW, "has no checkpoint", "wait: the cluster publishes a checkpoint"),
    "a checkpoint below it": (early_checkpoint, BELOW, "covers 400 entries, but entries up to 512", "use --below 401"),
    "a checkpoint of a minority": (minority, BELOW, "; 1 of them signed", "wait for a checkpoint"),
    "a checkpoint of strangers": (stranger, BELOW, "; 0 of them signed", "`forebay audit keys`"),
    "no snapshot": (no_snapshot, BELOW, "there is no snapshot", "run `forebay cluster snapshot` first"),
    "a snapshot below it": (early_snapshot, BELOW, "newest snapshot is of entry 500", "use --below 501"),
    "a snapshot that nothing binds": (unbound_snapshot, BELOW, "does not confirm the snapshot", "once a minute"),
    "no index by job": (no_index, BELOW, "the index by job cannot be read", "start the replica"),
    "an index that is behind": (early_index, BELOW, "the index by job ends at entry", "use --below"),
    "a tree that is behind": (early_tree, BELOW, "the tree of the ledger ends at entry 256", "use --below 257"),
    "a tree with a damaged file": (damaged_tree, BELOW, "1 files of the tree", "let the replica run"),
    "what consensus needs": (lambda site, archives: archives, 10_000, "there is no entry 9999", "use --below 825"),
    "no whole tile": (lambda site, archives: archives, 256, "no whole tile ends before entry 256", "--below 257"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pruning_is_rejected_without_each_precondition(case: str, site: Site, copies: tuple[Path, Path]) -> None:
    spoil, below, sentence, remedy = REFUSED[case]
    named = spoil(site, copies)
    result = prune(site, *named, below=below)
    assert result.exit_code == ExitCode.REFUSED, result.output
    assert sentence in result.stderr and remedy in result.stderr
    assert answer(typed("audit", "verify", "--data", site.home, "--complete", "--json"))["entries"] == site.last


def test_pruning_keeps_entries_that_consensus_needs(made: Site, archives: tuple[Path, Path], tmp_path: Path) -> None:
    # Site without a compacted journal.
    home = tmp_path / "r1"
    shutil.copytree(made.home, home, ignore=shutil.ignore_patterns("wal"))
    written(home, [(entry.term, entry.data) for entry in made.made.entries])
    site = Site(home, made.made)
    site.write_keys(3)
    result = prune(site, *archives)
    assert result.exit_code == ExitCode.REFUSED and "consensus needs entry 1" in result.stderr


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 4
    path.write_bytes(content)


def a_flipped_byte(site: Site, archives: tuple[Path, Path]) -> None:
    flip(next(archives[1].iterdir()), 0.5)


def a_flipped_byte_that_is_unpacked(site: Site, archives: tuple[Path, Path]) -> None:
    flip(next(archives[0].iterdir()), 0.1)


def a_forged_snapshot(site: Site, archives: tuple[Path, Path]) -> None:
    """Write a valid snapshot of the right entry and revision with a wrong state."""
    shutil.rmtree(site.home / "snapshots")
    image = site.made.image(site.last - 30)
    (site.home / "snapshots").mkdir()
    forged = msgspec.structs.replace(image.state, name="somebody else's")
    write_snapshot(site.home / "snapshots", msgspec.structs.replace(image, state=forged))


def a_false_root(site: Site, archives: tuple[Path, Path]) -> None:
    site.write_note(site.last, bytes(32), 0, 1, 2)


def a_false_leaf(site: Site, archives: tuple[Path, Path]) -> None:
    """Write valid files with a changed entry, under a root that a majority has signed."""
    tree = site.tree()
    leaves = leaves_in(tree.tile(Tile(None, 1)))
    leaves[100] = leaves[100][:-1] + bytes([leaves[100][-1] ^ 1])
    tree._write(Tile(None, 1), bundle(leaves))
    tree._write(Tile(0, 1), b"".join(map(leaf_hash, leaves)))
    site.write_note(site.last, site.tree().root(site.last), 0, 1, 2)


DAMAGED: dict[str, tuple[Callable[[Site, tuple[Path, Path]], None], str]] = {
    "a flipped byte in the second copy": (a_flipped_byte, "SHA-256"),
    "a flipped byte in the first copy": (a_flipped_byte_that_is_unpacked, "SHA-256"),
    "a snapshot that is not what the ledger records": (a_forged_snapshot, "contradicts the ledger"),
    "a checkpoint that is not of the ledger": (a_false_root, "differ from those that a majority signed"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_pruning_is_rejected_if_any_data_is_damaged(case: str, site: Site, copies: tuple[Path, Path]) -> None:
    spoil, sentence = DAMAGED[case]
    spoil(site, copies)
    result = prune(site, *copies)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED, result.output
    assert sentence in result.stderr
    assert answer(typed("audit", "verify", "--data", site.home, "--complete", "--json"))["entries"] == site.last


def test_pruning_compares_kept_leaves_with_removed_entries(site: Site, copies: tuple[Path, Path]) -> None:
    a_false_leaf(site, copies)
    result = prune(site, *copies)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED, result.output
    assert "does not match the entry in the archive" in result.stderr


def test_an_archive_of_another_cluster_or_history_is_rejected(
    site: Site, copies: tuple[Path, Path], tmp_path: Path
) -> None:
    history = [(1, data) for data in batches(60)]
    other = written(tmp_path / "other", history)
    foreign = Site(tmp_path / "other", other)
    foreign.write_note(len(other.entries), foreign.tree().root(len(other.entries)), 0, 1)
    assert typed("audit", "archive", tmp_path / "c", "--data", foreign.home).exit_code == 0
    result = prune(site, copies[0], tmp_path / "c")
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert "differs from the ledger's" in result.stderr
    both = typed("audit", "verify", "--data", site.home, "--archive", tmp_path / "c")
    assert both.exit_code == ExitCode.VERIFICATION_FAILED and "their histories differ" in both.stderr
    named = typed("audit", "verify", "--archive", copies[0], "--cluster", "another")
    assert named.exit_code == ExitCode.VERIFICATION_FAILED and f"cluster {CLUSTER}" in named.stderr


def test_an_archive_with_a_mismatched_checkpoint_is_rejected(site: Site, tmp_path: Path) -> None:
    site.write_note(site.last, bytes(32), 0, 1, 2)
    assert typed("audit", "archive", tmp_path / "a", "--data", site.home).exit_code == 0
    result = typed("audit", "verify", "--archive", tmp_path / "a")
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert "its checkpoint does not match its entries" in result.stderr


def test_an_archive_without_known_signatures_is_reported(site: Site, archives: tuple[Path, Path]) -> None:
    site.keys.write_text(site.keys.read_text().splitlines()[1] + "\n")
    assert typed("audit", "verify", "--archive", archives[0], "--keys", site.keys).exit_code == 0
    site.write_keys(5)
    site.keys.write_text("".join(line + "\n" for line in site.keys.read_text().splitlines()[-4:]))
    result = typed("audit", "verify", "--archive", archives[0], "--keys", site.keys)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED and "is signed by a majority of the keys" in result.stderr
    own = site.keys.read_text()
    site.write_keys(3, "forebay/" + "f" * 32)
    site.keys.write_text(own + site.keys.read_text())
    result = typed("audit", "verify", "--archive", archives[0], "--keys", site.keys)
    assert result.exit_code == ExitCode.BAD_INPUT and "it contains a key of forebay/ffff" in result.stderr
    site.keys.write_text("nobody\n")
    result = typed("audit", "verify", "--archive", archives[0], "--keys", site.keys)
    assert result.exit_code == ExitCode.BAD_INPUT and "does not have the replicas' keys" in result.stderr


def test_entries_above_an_age_are_pruned(site: Site, archives: tuple[Path, Path]) -> None:
    named = [word for one in archives for word in ("--archive", one)]
    words = ("audit", "prune", "--data", site.home, "--keys", site.keys, *named, "--yes", "--json", "--older-than")
    kept = answer(typed(*words, "30m", "--dry-run"))
    cut = site.made.states[-1].at - 30 * 60 * 1_000_000
    first_kept = next(index for index, state in enumerate(site.made.states, 1) if state.at >= cut)
    assert kept["last_index"] == (first_kept - 1) // 256 * 256 > 64
    assert answer(typed("audit", "verify", "--data", site.home, "--complete", "--json"))["pruned"] is None
    assert typed(*words, "2h", "--dry-run").exit_code == ExitCode.REFUSED
    wrong = typed(*words, "soon")
    assert wrong.exit_code == ExitCode.BAD_INPUT and "is not an age" in wrong.stderr
    assert typed(*words, "30m", "--below", 3).exit_code == ExitCode.BAD_INPUT


def test_pruning_needs_confirmation(site: Site, archives: tuple[Path, Path]) -> None:
    named = [word for one in archives for word in ("--archive", one)]
    words = ("audit", "prune", "--data", site.home, "--keys", site.keys, *named, "--below", BELOW)
    refused = typed(*words)
    assert refused.exit_code == ExitCode.BAD_INPUT and "add --yes" in refused.stderr
    assert answer(typed(*words, "--dry-run", "--json"))["entries"] > 0


@story
async def test_a_running_replica_prunes_its_own_entries(site: Site, archives: tuple[Path, Path]) -> None:
    environment = site.open()
    Journal(environment)
    seen: list[PruneNote] = []

    def take(note: PruneNote) -> None:
        seen.append(note)
        authorise(environment, note.pruned)

    pruner = Pruner(
        site.home, authorise=take, prune_some=lambda: prune_some(environment, entries_max=100), fail=lambda error: 1 / 0
    )
    pruner.start()
    named = [word for one in archives for word in ("--archive", str(one))]
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "forebay.cluster.cli",
            "audit",
            "prune",
            "--data",
            str(site.home),
            "--below",
            str(BELOW),
        ),
        *("--keys", str(site.keys), *named, "--yes", "--json"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    await pruner.stop()
    assert process.returncode == 0
    assert json.loads(printed)["removed"] == "by the running replica"
    assert seen[0].below == PRUNED and seen[0].cluster_id == CLUSTER
    assert [(gap.first_index, gap.last_index) for gap in Ledger(environment).gaps()] == [(65, PRUNED - 1)]
    environment.close()


def pruner_of(site: Site, environment: Environment, authorised: Callable[[PruneNote], None]) -> Pruner:
    return Pruner(
        site.home,
        authorise=authorised,
        prune_some=lambda: prune_some(environment, entries_max=100),
        fail=lambda error: 1 / 0,
    )


def test_a_rejected_prune_request_gives_the_reason_and_removes_nothing(site: Site) -> None:
    note = PruneNote(CLUSTER, PRUNED, site.made.digests[PRUNED - 2].hex(), ())
    with site.open() as environment:

        def refuse(note: PruneNote) -> None:
            raise BrokenInvariant("there is no snapshot")

        pruner = pruner_of(site, environment, refuse)
        assert pruner.step() > 1 and answer_to_note(site.home) == ""
        leave_note(site.home, note)
        assert answer_to_note(site.home) is None
        assert pruner.step() > 1
        assert answer_to_note(site.home) == "there is no snapshot\n"
        leave_note(site.home, note)
        (site.home / "prune").write_bytes(b"{")
        pruner.step()
        assert "truncated" in (answer_to_note(site.home) or "")
        assert Ledger(environment).gaps() == ()


def test_a_killed_replica_repeats_its_prune_request(site: Site) -> None:
    leave_note(site.home, PruneNote(CLUSTER, PRUNED, site.made.digests[PRUNED - 2].hex(), ()))
    for _ in range(2):
        with site.open() as environment:
            held = (site.home / "prune").read_bytes()
            pruner = pruner_of(site, environment, lambda note: authorise(environment, note.pruned))
            assert pruner.step() < 1
            (site.home / "prune").write_bytes(held)
    with site.open() as environment:
        pruner = pruner_of(site, environment, lambda note: authorise(environment, note.pruned))
        while pruner.step() < 1:
            pass
        assert [(gap.first_index, gap.last_index) for gap in Ledger(environment).gaps()] == [(65, PRUNED - 1)]


def test_a_joined_replica_restores_its_tree_from_the_archive(
    made: Site, archives: tuple[Path, Path], tmp_path: Path
) -> None:
    home = tmp_path / "r1"
    last = PRUNED - 1
    with Environment.open(
        home / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        journal = Journal(environment)
        journal.set_term(2, REPLICA)
        state = made.made.states[last - 1]
        journal.reset_to(last, made.made.entries[last - 1].term, made.made.digests[last - 1], int(state.revision))
        journal.append(made.made.entries[last:])
        journal.set_commit(made.last)
        for entry, after in zip(made.made.entries[last:], made.made.states[last:], strict=True):
            journal.record_applied(entry, after.revision)
        journal.flush_hints()
    site = Site(home, made.made)
    restored = answer(typed("audit", "restore", "--data", home, "--archive", archives[0], "--json"))
    assert restored == {"tree_size": last, "below": PRUNED}
    assert site.tree().root(made.last) == made.tree().root(made.last)
    with Environment.open_readonly(home / "wal") as environment:
        ledger = Ledger(environment)
        assert ledger.verify().entries == made.last - last + 64
        assert ledger.pruned_range() is not None and ledger.missing() == ()
    assert typed("audit", "verify", "--data", home, "--archive", archives[1], "--complete").exit_code == 0
    # A replica that lost its tree after pruning restores it in the same way.
    shutil.rmtree(home / "tlog")
    assert typed("audit", "restore", "--data", home, "--archive", archives[0]).exit_code == 0
    assert site.tree().root(made.last) == made.tree().root(made.last)
    again = typed("audit", "restore", "--data", made.home, "--archive", archives[0])
    assert again.exit_code == ExitCode.REFUSED and "has its complete ledger" in again.stderr


def test_replays_of_pruned_and_whole_ledgers_are_equal(pruned: Site) -> None:
    snapshot = sorted((pruned.home / "snapshots").iterdir())[0]
    found = answer(typed("audit", "replay", "--data", pruned.home, "--from-snapshot", snapshot, "--json"))
    assert found["state_digest"] == state_digest(pruned.made.state).hex()


def test_an_outdated_index_keeps_its_rows_with_a_gap(site: Site, archives: tuple[Path, Path]) -> None:
    shutil.rmtree(site.home / "snapshots")
    site.write_snapshot(700)
    site.write_index(600)
    assert prune(site, *archives).exit_code == 0
    with Environment.open_readonly(site.home / "wal") as environment:
        index = JobIndex(site.home / "index", map_size_bytes=MAP_SIZE_BYTES)
        noted = index.position.index
        rows = index.rows(10)
        follower = Follower(
            Ledger(environment), snapshots=site.home / "snapshots", index=index, monotonic_s=SystemClock().monotonic_s
        )
        while follower.step():
            pass
        assert 600 <= noted < 700 and follower.holes == (Hole(noted + 1, 700),)
        assert follower.rows(10) == rows != []
        assert follower.index == site.last and follower.revision == site.made.state.revision
        index.close()


def configured(site: Site, **retention: object) -> Path:
    """Write the configuration of the site's replica with [retention]."""
    file = site.home.parent / "forebay.toml"
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in retention.items())
    file.write_text(
        f'[cluster]\nname = "test"\nid = "{CLUSTER}"\n'
        f'[[replica]]\nname = "{REPLICA}"\npeer = "127.0.0.1:7401"\napi = "127.0.0.1:7411"\n'
        + (f"[retention]\n{table}" if retention else "")
    )
    return file


def retain(file: Path) -> Result:
    return typed("--config", file, "audit", "retain", "--name", REPLICA, "--json")


@pytest.mark.parametrize("keep", [{"keep_days": 1}, {"keep": "1MiB"}, {}])
def test_recent_entries_are_archived_and_kept(site: Site, keep: dict[str, object]) -> None:
    file = configured(site, archives=["a", "b"], keys="keys", **keep)
    for count in (1, 0):
        found = answer(retain(file))
        assert [len(names) for names in found["archived"].values()] == [count, count]
        assert (found["pruned_entries"], found["removed"]) == (0, "nothing")
    assert Archive(site.home.parent / "b").last_index == site.last


@pytest.mark.parametrize("keep", ["keep_days", "keep"])
def test_retention_keeps_the_configured_age_and_size(site: Site, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The site's clock advances a day in an hour, and its last 300 entries have a MiB.
    sizes = [len(entry.data) for entry in site.made.entries]
    monkeypatch.setattr(commands, "DAY_S", 30 * 60)
    monkeypatch.setattr(commands, "below_of_size", lambda ledger, size: below_of_size(ledger, sum(sizes[-300:])))
    file = configured(site, archives=["a", "b"], keys="keys", **{keep: 1 if keep == "keep_days" else "1MiB"})
    found = answer(retain(file))
    assert found["removed"] == "here" and found["pruned_below"] == 513
    assert answer(retain(file))["pruned_entries"] == 0
    whole = typed("audit", "verify", "--data", site.home, "--archive", site.home.parent / "a", "--complete")
    assert whole.exit_code == 0


def test_retention_stops_at_data_that_must_remain(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "DAY_S", 60)
    file = configured(site, archives=["a", "b"], keys="keys", keep_days=1)
    # A fault that needs time or an operator is an error.
    site.write_index(224)
    late = retain(file)
    assert late.exit_code == ExitCode.REFUSED and "the index by job ends at entry 224" in late.stderr
    site.write_index(470)
    assert answer(retain(file))["pruned_below"] == 257
    site.write_index(site.last)
    site.write_keys(5)
    site.write_note(site.last, site.tree().root(site.last), 0)
    refused = retain(file)
    assert refused.exit_code == ExitCode.REFUSED and "signed the last checkpoint" in refused.stderr


def test_retention_uses_the_newest_confirmed_snapshot(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "DAY_S", 60)
    file = configured(site, archives=["a", "b"], keys="keys", keep_days=1)
    shutil.rmtree(site.home / "snapshots")
    site.write_snapshot(600)
    site.write_snapshot(site.last)  # no later digest is recorded yet
    found = answer(retain(file))
    assert (found["removed"], found["pruned_below"]) == ("here", 513)


def test_retention_is_off_by_default_and_checks_its_keys(site: Site) -> None:
    off = retain(configured(site))
    assert off.exit_code == ExitCode.BAD_INPUT and "has no table [retention]" in off.stderr
    for wrong, said in (
        ({"archives": ["a"], "keys": "keys"}, "archives"),
        ({"archives": ["a", "a"], "keys": "keys"}, "a directory is listed twice"),
        ({"archives": ["a", "b"]}, "keys"),
        ({"archives": ["a", "b"], "keys": "keys", "keep": "12KiB"}, "at least 1MiB"),
        ({"archives": ["a", "b"], "keys": "keys", "keep_years": 1}, "keep_years"),
    ):
        refused = retain(configured(site, **wrong))
        assert refused.exit_code == ExitCode.BAD_INPUT and said in refused.stderr, refused.stderr
