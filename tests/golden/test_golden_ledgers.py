"""What the previous release left on its disks means to this release exactly what it meant (law 12)."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from forebay.cluster.config.config import Config
from forebay.cluster.consensus.frames import FrameReader
from forebay.cluster.server.storage import open_storage
from forebay.replica.messages import features
from forebay.replica.messages.events import EVENTS
from forebay.replica.messages.features import ReleaseNeeded
from forebay.replica.state.digest import state_digest
from forebay.snapshots import load_snapshot, write_snapshot
from forebay.wal.codec import EntryKind, decode_batch, encode_batch, kind_of
from forebay.wal.configuration import decode_configuration, encode_configuration
from tests.auditing import audit
from tests.golden.asked import REQUIRED, bodies, kinds
from tests.golden.make_ledger import BEHIND, REPLICAS, UNSEEN
from tests.golden.previous import EXPECTED, GOLDEN, previous_cluster
from tests.golden.spoken import CLUSTER, MESSAGES, SENDER, frames
from tests.golden.words import vocabulary


@pytest.fixture
def previous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    return previous_cluster(tmp_path, monkeypatch)


def typed(*words: object) -> Result:
    return audit(*words)


def answered(*words: object) -> dict[str, Any]:
    result = typed(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def snapshots(config: Config) -> list[Path]:
    return sorted(path for name in REPLICAS for path in config.snapshot_directory(name).glob("*.fbs"))


@pytest.mark.parametrize("name", REPLICAS)
def test_a_directory_of_the_previous_release_is_opened_and_comes_to_the_state_that_it_had(
    previous: Config, name: str
) -> None:
    storage = open_storage(previous, name)
    try:
        assert storage.state.feature_level == 1
        if name == "r3":
            applied = EXPECTED["entries"] - BEHIND
            assert (storage.index, storage.journal.last_index) == (applied, EXPECTED["entries"] - UNSEEN)
            assert storage.replayed == applied
        else:
            assert (storage.index, storage.state.revision) == (EXPECTED["entries"], EXPECTED["revision"])
            assert state_digest(storage.state).hex() == EXPECTED["state_digest"]
            assert storage.journal.applied_digest.hex() == EXPECTED["ledger_digest"]
            assert 0 < storage.replayed < storage.index, "its snapshot was used"
        assert storage.configuration is not None
        assert storage.configuration.configuration.voter_ids == REPLICAS
    finally:
        storage.close()


def test_the_previous_ledger_is_replayed_to_its_digests_from_nothing_and_from_either_snapshot(previous: Config) -> None:
    wanted = {key: EXPECTED[key] for key in ("revision", "state_digest", "ledger_digest")}
    directory = previous.wal_directory("r1")
    assert answered("audit", "verify", "--data", directory)["ledger_digest"] == EXPECTED["ledger_digest"]
    starts: list[tuple[object, ...]] = [(), *(("--from-snapshot", path) for path in snapshots(previous))]
    assert len(starts) == 3
    for start in starts:
        found = answered("audit", "replay", "--data", directory, *start)
        assert {key: found[key] for key in wanted} == wanted, start


def test_the_previous_ledger_is_exported_as_the_previous_release_exported_it(previous: Config) -> None:
    dumped = typed("audit", "dump", "--data", previous.wal_directory("r1"))
    assert dumped.stdout == (GOLDEN / "format-1.jsonl").read_text(encoding="utf-8")


def test_every_entry_of_the_previous_ledger_would_be_written_again_byte_for_byte(previous: Config) -> None:
    storage = open_storage(previous, "r1")
    try:
        kinds = set()
        for entry in storage.ledger.read(1, limit=EXPECTED["entries"]):
            kind = kind_of(entry.data)
            kinds.add(kind)
            if kind is EntryKind.BATCH:
                assert encode_batch(decode_batch(entry.data)) == entry.data, entry.index
            if kind is EntryKind.CONFIGURATION:
                assert encode_configuration(decode_configuration(entry.data)) == entry.data
        assert kinds == set(EntryKind)
    finally:
        storage.close()


def test_every_event_that_the_previous_release_knew_is_in_its_golden_ledger() -> None:
    # With one level there is none to raise.
    assert set(EXPECTED["events"]) == {kind.__name__ for kind in EVENTS} - {"FeatureLevelRaised"}


def test_a_snapshot_of_the_previous_release_would_be_written_again_byte_for_byte(
    previous: Config, tmp_path: Path
) -> None:
    found = snapshots(previous)
    assert len(found) == 2
    for number, path in enumerate(found):
        again = tmp_path / str(number)
        again.mkdir()
        assert write_snapshot(again, load_snapshot(path)).read_bytes() == path.read_bytes()


def test_no_record_that_the_previous_release_knew_has_changed_so_it_can_read_what_is_written_at_its_level() -> None:
    then = json.loads((GOLDEN / "format-1-words.json").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(vocabulary()))
    assert {name: now[name] for name in then} == then, "what is new comes as a new event of a new level"
    assert set(now) - set(then) >= {kind.__name__ for kind in EVENTS if kind.since_level > 1}


def test_replicas_say_to_each_other_what_those_of_the_previous_release_said_byte_for_byte() -> None:
    then = json.loads((GOLDEN / "format-1-frames.json").read_text(encoding="utf-8"))
    assert frames() == then
    for message in MESSAGES:
        (frame,) = FrameReader(CLUSTER).feed(bytes.fromhex(then[type(message).__name__]))
        assert (frame.sender, frame.message) == (SENDER, message)


def test_clients_and_replicas_of_this_and_of_the_previous_release_understand_each_other() -> None:
    """In a rolling upgrade either may come first: none asks of the other what that does not know."""
    then = json.loads((GOLDEN / "format-1-requests.json").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(bodies()))
    for kind, fields in then.items():
        assert {name: now[kind][name] for name in fields} == fields, "a client of then means these by its silence"
        required = {name for name, need in now[kind].items() if need == REQUIRED}
        assert required <= set(fields), "it says nothing else"
        struct = kinds()[kind]
        said = msgspec.json.decode(msgspec.json.encode(struct(**dict.fromkeys(required, ()))))
        assert set(said) - {struct.__struct_config__.tag_field} == required, "what nobody asked for is not said"


@pytest.mark.parametrize("name", ["r1", "r3"])
def test_a_release_that_is_too_old_for_a_directory_stops_by_name_and_leaves_all_that_was_promised_in_it(
    previous: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = held(previous, name)
    monkeypatch.setattr(features, "FEATURE_LEVEL_KNOWN", 0)
    for _ in range(2):
        with pytest.raises(ReleaseNeeded, match="feature level 1, but this release supports levels up to 0"):
            open_storage(previous, name)
    monkeypatch.undo()
    assert held(previous, name) == before


def held(config: Config, name: str) -> tuple[object, ...]:
    """Everything that a replica has promised to remember, entries that are not applied too, and its snapshots."""
    storage = open_storage(config, name)
    journal = storage.journal
    entries = [journal.entry(index) for index in range(journal.base_index + 1, journal.last_index + 1)]
    marks = (journal.term, journal.voted_for, journal.base_index, journal.applied_index, journal.applied_digest)
    storage.close()
    files = {path.name: path.read_bytes() for path in config.snapshot_directory(name).iterdir()}
    return entries, marks, files, state_digest(storage.state)
