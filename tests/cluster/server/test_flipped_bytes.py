"""Any byte of any file of a replica is altered; the replica rejects it by name or has unchanged data.

Each case runs in a separate process, because LMDB follows altered pointers, which may kill the process. That counts as
a stop. New kinds of files are covered too.
"""

import contextlib
import gc
import hashlib
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.server.storage import StorageRefused, member_note, note_forgotten, open_storage
from forebay.cluster.system.clock import SystemClock
from forebay.replica.decide.decide import decide
from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages.commands import CONTROLLER, FoundCluster, Request
from forebay.replica.messages.entries import Batch
from forebay.replica.messages.entries import Entry as Settled
from forebay.replica.state.digest import state_digest
from forebay.replica.state.state import EMPTY
from forebay.replica.values.units import Instant, Revision
from forebay.snapshots import Image, SnapshotFailed, SnapshotName, write_snapshot
from forebay.snapshots.receive import receiving_name
from forebay.wal import BrokenInvariant, LedgerBroken, RecoveryRefused, StorageFailed
from forebay.wal.codec import encode_batch
from forebay.wal.journal import Entry

SAMPLES = 60
"""Number of offsets tried in each file, besides its first bytes."""

HEAD_BYTES = 24
"""Number of first bytes of each file that are all tried, because they identify the file."""

MASKS = (0x01, 0x80, 0xFF)
FILLED = re.compile(rb"[^\0]")
SAME, REFUSED, WRONG = 0, 3, 4
AGENTLESS = Founding(agents=0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, str]:
    """Return a replica that joined as r1#2, with entries, a tail, snapshots and a received part; and its digest."""
    config = create_site(tmp_path_factory.mktemp("site") / "site", AGENTLESS, clock=SystemClock())
    member_note(config, "r1").write_text("r1#2\n")
    storage = open_storage(config, "r1")
    journal, state = storage.journal, EMPTY
    command = FoundCluster(config.cluster.id, config.cluster.name, config.policy, config.pools)
    outcome = decide(EMPTY, Request(b"", CONTROLLER, command), Instant(1))
    batch = Batch(Revision(0), Instant(1), (Settled(b"", CONTROLLER, "found_cluster", outcome.events),))  # type: ignore[union-attr]
    data = encode_batch(batch)
    after = apply_batch(EMPTY, batch)
    assert after is not None
    journal.set_term(3, "r1#2")
    journal.append([Entry(1, 1, b"\x00"), Entry(2, 1, data), *(Entry(index, 2, b"\x00") for index in range(3, 60))])
    journal.sync()
    for index in range(1, 41):
        journal.set_commit(index)
        state = after if index >= 2 else EMPTY
        digest = journal.record_applied(journal.entry(index), state.revision)
        if index in (10, 30):
            journal.flush_hints()
            image = Image(state, index, journal.term_of(index) or 0, digest)
            path = write_snapshot(storage.snapshots.directory, image)
    journal.compact_to(5)
    journal.sync()
    part = storage.snapshots.directory / receiving_name(SnapshotName(50, 2))
    part.write_bytes(path.read_bytes()[:-40])
    storage.close()
    return config, _holds(config)


def _holds(config: Config) -> str:
    """Open the storage, read all of it, and return one digest."""
    storage = open_storage(config, "r1")
    try:
        journal = storage.journal
        storage.ledger.verify()
        held = hashlib.sha256()
        for fact in (
            storage.identity,
            (journal.term, journal.voted_for, journal.base_index, journal.base_term, journal.last_index),
            (journal.commit_index, journal.applied_index, journal.applied_digest, journal.applied_revision),
            journal.entries(journal.first_index, max_bytes=1 << 30, max_entries=1 << 20),
            list(storage.ledger.read(1, limit=1 << 20)),
            (storage.index, state_digest(storage.state), storage.configuration),
        ):
            held.update(repr(fact).encode())
        part = storage.snapshots.partial
        if part is not None:
            whole = storage.snapshots.directory / receiving_name(part.name)
            good = (storage.snapshots.directory / str(SnapshotName(30, 2))).read_bytes()
            assert whole.read_bytes()[: part.sound_bytes] == good[: part.sound_bytes] or _damaged(storage, good)
        return held.hexdigest()
    finally:
        storage.close()


def _damaged(storage: object, good: bytes) -> bool:
    """Return whether the finalized snapshot was altered, not the received part that is compared with it."""
    return good[-32:] != hashlib.sha256(good[:-32]).digest()


def _files(config: Config) -> list[str]:
    root = config.storage.directory / "r1"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_every_kind_of_file_exists(site: tuple[Config, str]) -> None:
    files = _files(site[0])
    assert {"member", "wal/data.mdb"} <= set(files)
    assert len([name for name in files if name.endswith(".fbs")]) == 2
    assert len([name for name in files if name.endswith(".receiving")]) == 1


def _offsets(size_bytes: int, name: str) -> Iterator[int]:
    yield from range(min(HEAD_BYTES, size_bytes))
    draws = random.Random(name)
    for _ in range(SAMPLES if size_bytes > HEAD_BYTES else 0):
        yield draws.randrange(HEAD_BYTES, size_bytes)


@pytest.fixture
def light_forks() -> Iterator[None]:
    """Keep a forked child's garbage collector from visiting, and so copying, all objects of earlier tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.freeze()


@pytest.mark.campaign(4)
def test_no_altered_byte_of_any_file_is_accepted(site: tuple[Config, str], fast_path: Path, light_forks: None) -> None:
    config, truth = site
    seen: Counter[tuple[str, str]] = Counter()
    for name in _files(config):
        original = config.storage.directory / "r1" / name
        size_bytes = original.stat().st_size
        # Much of a large file is empty, so offsets are moved to written bytes.
        for number, offset in enumerate(_filled(original, _offsets(size_bytes, name))):
            outcome = _try(config, fast_path / "copy", name, offset, MASKS[number % len(MASKS)], truth)
            assert outcome != "wrong", f"byte {offset} of {name} was altered, and the data was accepted"
            seen[name, outcome] += 1
    assert sum(count for (name, outcome), count in seen.items() if outcome == "rejected") > 20, seen
    died = sum(count for (_, outcome), count in seen.items() if outcome == "died")
    assert died <= 0.02 * seen.total(), f"a killed process gives its operator no message: {seen}"


def _filled(path: Path, offsets: Iterator[int]) -> Iterator[int]:
    """Return the offsets, moved to bytes that are not zero."""
    content = path.read_bytes()
    for offset in offsets:
        filled = FILLED.search(content, offset)
        yield len(content) - 1 if filled is None else filled.start()


def _try(config: Config, directory: Path, name: str, offset: int, mask: int, truth: str) -> str:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(config.storage.directory / "r1", directory / "r1")
    copied = msgspec.structs.replace(config, storage=msgspec.structs.replace(config.storage, directory=directory))
    file = directory / "r1" / name
    content = bytearray(file.read_bytes())
    content[offset] ^= mask
    file.write_bytes(content)
    child = os.fork()
    if child == 0:
        code = WRONG
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(20)
            code = _outcome(copied, truth)
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "died"
    return {SAME: "same", REFUSED: "rejected"}.get(os.WEXITSTATUS(status), "wrong")


def _outcome(config: Config, truth: str) -> int:
    try:
        return SAME if _holds(config) == truth else WRONG
    except (RecoveryRefused, StorageRefused, StorageFailed, SnapshotFailed, LedgerBroken, BrokenInvariant):
        return REFUSED


def test_replica_with_a_note_of_forgotten_promises_never_opens_again(tmp_path: Path) -> None:
    config = create_site(tmp_path / "site", AGENTLESS, clock=SystemClock())
    open_storage(config, "r1").close()
    note_forgotten(config, "r1", "r1 lost what it promised; run `forebay cluster replace r1`")
    for _ in range(2):
        with pytest.raises(
            StorageRefused, match="forgotten: r1 lost what it promised; run `forebay cluster replace r1`"
        ):
            open_storage(config, "r1")
    note = config.storage.directory / "r1" / "forgotten"
    note.write_bytes(b"\xff" * 5000)
    with pytest.raises(StorageRefused, match="forgotten"):
        open_storage(config, "r1")
