"""State digests recorded in a ledger reveal rewritten entries and their position."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from forebay.cluster.audit.replay import replay
from forebay.cluster.cli.exits import ExitCode
from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages import StateDigested
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Batch
from forebay.replica.model.job_states import JobState
from forebay.replica.state import digest as digests
from forebay.replica.state.digest import StateDigestMismatch
from forebay.replica.state.state import EMPTY, State
from forebay.snapshots.finalize import write_snapshot
from forebay.snapshots.image import Image
from forebay.wal.environment import Environment
from forebay.wal.ledger import Ledger
from tests.cluster.audit.ledgers import MINUTES, Made, digested, make, typed

Rewrite = Callable[[e.EventRecord], e.EventRecord]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("r1"), digested())


def recorded(made: Made) -> list[tuple[int, int]]:
    """Return the revisions whose states are digested, each with the entry that records it."""
    batches, found = digested(), []
    state = EMPTY
    for batch in batches:
        after = apply_batch(state, batch)
        assert after is not None
        index = next(entry.index for entry, then in zip(made.entries, made.states, strict=True) if then == after)
        found += [(event.revision, index) for one in batch.entries for event in one.events if is_record(event)]
        state = after
    return found


def is_record(event: object) -> bool:
    return isinstance(event, StateDigested)


def rewritten(batches: list[Batch], kind: type[e.EventRecord], number: int, change: Rewrite) -> list[Batch]:
    """Return the batches with the event of a kind that comes as `number`th, from 0, changed."""
    found, seen = [], 0

    def changed(event: Any) -> Any:
        nonlocal seen
        if type(event) is not kind:
            return event
        seen += 1
        return change(event) if seen == number + 1 else event

    for batch in batches:
        entries = tuple(replace(one, events=tuple(map(changed, one.events))) for one in batch.entries)
        found.append(replace(batch, entries=entries))
    assert found != batches
    return found


def by_mallory(event: Any) -> e.EventRecord:
    return replace(event, request=replace(event.request, user="mallory"))


def failed(event: Any) -> e.EventRecord:
    return replace(event, result=JobState.FAILED, exit_code=1)


def test_a_replay_compares_states_with_recorded_digests(made: Made) -> None:
    found = typed("audit", "replay", "--data", made.directory, "--json")
    assert (found.exit_code, found.stderr) == (0, "")
    answer = msgspec.json.decode(found.stdout)
    assert (answer["digests_recorded"], answer["digests_compared"]) == (MINUTES, MINUTES)
    assert f"compared {MINUTES} of {MINUTES} that the ledger records" in typed(
        "audit", "replay", "--data", made.directory
    ).stdout.replace("\n", " ")
    deep = typed("audit", "verify", "--data", made.directory, "--deep", "--json")
    assert (deep.exit_code, deep.stderr) == (0, "")
    answer = msgspec.json.decode(deep.stdout)
    assert (answer["digests_recorded"], answer["digests_compared"]) == (MINUTES, MINUTES)


def test_a_replay_to_a_revision_compares_earlier_digests(made: Made) -> None:
    for count, (revision, _) in enumerate(recorded(made)):
        found = typed("audit", "replay", "--data", made.directory, "--at", revision, "--json")
        assert msgspec.json.decode(found.stdout)["digests_compared"] == count


@pytest.mark.parametrize("deep", [False, True], ids=["replay", "verify --deep"])
@pytest.mark.parametrize("minute", range(MINUTES))
@pytest.mark.parametrize(("kind", "change"), [(e.JobSubmitted, by_mallory), (e.RunEnded, failed)])
def test_a_rewritten_and_rehashed_event_is_located_between_two_digests(
    made: Made, tmp_path: Path, kind: type[e.EventRecord], change: Rewrite, minute: int, deep: bool
) -> None:
    forged = make(tmp_path, rewritten(digested(), kind, minute, change))
    assert typed("audit", "verify", "--data", forged.directory).exit_code == 0, "it is sound in itself"
    words = ("verify", "--deep") if deep else ("replay",)
    result = typed("audit", words[0], "--data", forged.directory, *words[1:])
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    revisions = [(0, 0), *recorded(made)]
    after, (revision, index) = revisions[minute][0], revisions[minute + 1]
    sentence = " ".join(result.stderr.split())
    assert f"they differ first between revision {after} and revision {revision}" in sentence
    assert f"the state after revision {revision} has the digest" in sentence and f"entry {index} records" in sentence


def test_sparse_comparisons_still_locate_the_first_difference(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "RECORDS_PER_EVENT", 0)
    monkeypatch.setattr(digests, "RECORDS_ALWAYS", 0)
    found = msgspec.json.decode(typed("audit", "replay", "--data", made.directory, "--json").stdout)
    assert (found["digests_recorded"], found["digests_compared"]) == (MINUTES, 1), "the last one always is"
    forged = make(tmp_path, rewritten(digested(), e.RunEnded, 1, failed))
    revisions = recorded(made)
    with (
        Environment.open_readonly(forged.directory / "wal") as environment,
        pytest.raises(StateDigestMismatch) as differs,
    ):
        replay(Ledger(environment))
    assert (differs.value.after, differs.value.revision) == (revisions[0][0], revisions[1][0])


def doubled_pool(state: State) -> State:
    name, pool = next(iter(state.pools.items()))
    return replace(state, pools=state.pools.set(name, replace(pool, quantity_bytes=2 * pool.quantity_bytes)))


def another_user(state: State) -> State:
    job = state.jobs[1]
    return replace(state, jobs=state.jobs.set(1, replace(job, request=replace(job.request, user="mallory"))))


def another_exit_code(state: State) -> State:
    return replace(state, jobs=state.jobs.set(1, replace(state.jobs[1], exit_code=9)))


@pytest.mark.parametrize("forge", [doubled_pool, another_user, another_exit_code])
def test_a_replay_from_a_forged_snapshot_fails_at_the_next_digest(
    made: Made, tmp_path: Path, forge: Callable[[State], State]
) -> None:
    revisions = recorded(made)
    index = revisions[1][1] + 1
    image = made.image(index)
    sound, forged = tmp_path / "sound", tmp_path / "forged"
    for directory, state in ((sound, image.state), (forged, forge(image.state))):
        directory.mkdir()
        write_snapshot(directory, Image(state, index, image.term, image.chain_digest))
    answer = typed("audit", "replay", "--data", made.directory, "--from-snapshot", *sound.iterdir(), "--json")
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert msgspec.json.decode(answer.stdout)["digests_compared"] == MINUTES - 2
    result = typed("audit", "replay", "--data", made.directory, "--from-snapshot", *forged.iterdir())
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    between = f"between revision {image.state.revision} and revision {revisions[2][0]}"
    assert between in " ".join(result.stderr.split())


def test_a_snapshot_with_a_recorded_digest_is_compared_itself(made: Made, tmp_path: Path) -> None:
    revision, _ = recorded(made)[1]
    index = next(index for index, state in enumerate(made.states, start=1) if state.revision == revision)
    write_snapshot(tmp_path, made.image(index))
    answer = typed("audit", "replay", "--data", made.directory, "--from-snapshot", *tmp_path.iterdir(), "--json")
    assert msgspec.json.decode(answer.stdout)["digests_compared"] == MINUTES - 1
