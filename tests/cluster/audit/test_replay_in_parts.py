"""A replay in parts gives the same result as a replay in one process, and rejects false start states."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.cluster.audit import replay_in_parts as parts
from forebay.cluster.audit.replay import ReplayFold, replay
from forebay.cluster.audit.replay_in_parts import fold_part, replay_in_parts, seams
from forebay.cluster.cli.exits import ExitCode
from forebay.replica.messages import events as e
from forebay.replica.state.digest import StateDigestMismatch
from forebay.snapshots.finalize import write_snapshot
from forebay.wal.environment import Environment
from forebay.wal.ledger import Ledger
from tests.cluster.audit.ledgers import MINUTES, Made, digested, make, typed
from tests.cluster.audit.test_recorded_digests import another_user, failed, rewritten


class PartHere:
    """Part that this process folds, which has the ledger open."""

    ledger: ClassVar[Ledger]

    def __init__(self, directory: Path, begin: Path | None, last: int) -> None:
        self._said = list(fold_part(self.ledger, last, begin))
        self.folded = self._said[-1]["folded"]

    def wait(self, shown: Callable[[], None] | None) -> dict[str, Any]:
        found: dict[str, Any] = self._said[-1]
        return found

    def end(self) -> None:
        pass


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_COMMANDS", 1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are folded by this process."""
    monkeypatch.setattr(parts, "_Part", PartHere)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make(tmp_path, digested())


def keep(made: Made, *indices: int) -> None:
    """Let the replica keep only the states of these entries."""
    directory = made.directory / "index" / "states"
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    for index in indices:
        write_snapshot(directory, made.image(index))


def settling(made: Made) -> list[int]:
    """Return the entries with effects, except the first and the last two."""
    revisions = [0, *(state.revision for state in made.states)]
    found = [index for index, (before, after) in enumerate(itertools.pairwise(revisions), start=1) if after > before]
    return found[1:-2]


def in_one(made: Made, at_revision: int | None = None) -> ReplayFold:
    with Environment.open_readonly(made.directory / "wal") as environment:
        return replay(Ledger(environment), at_revision=at_revision)


def in_parts(made: Made, processes: int, at_revision: int | None = None) -> tuple[ReplayFold, list[str]]:
    """Return the result of a replay in parts, and the reason for a replay in one process."""
    doubts: list[str] = []
    with Environment.open_readonly(made.directory / "wal") as environment:
        PartHere.ledger = Ledger(environment).as_of_now()
        found = replay_in_parts(
            Ledger(environment),
            made.directory / "wal",
            at_revision=at_revision,
            processes=processes,
            doubt=doubts.append,
        )
    return found, doubts


def what(replayed: ReplayFold) -> tuple[Any, ...]:
    return replayed.state, replayed.ledger_digest, replayed.first_index, replayed.last_index, replayed.counts()


@pytest.mark.usefixtures("here")
def test_a_replay_in_parts_equals_a_replay_in_one_process(made: Made) -> None:
    whole = what(in_one(made))
    cuts = settling(made)
    for chosen in [*itertools.combinations(cuts, 1), *itertools.combinations(cuts[::4], 2)]:
        keep(made, *chosen)
        found, doubts = in_parts(made, len(chosen) + 1)
        assert (what(found), doubts) == (whole, []), f"cut at {chosen}"


@pytest.mark.usefixtures("here")
def test_a_replay_in_parts_to_a_revision_equals_one_process(made: Made) -> None:
    cuts = settling(made)
    keep(made, *cuts)
    for revision in range(int(made.state.revision) + 1):
        found, doubts = in_parts(made, 3, revision)
        assert (what(found), doubts) == (what(in_one(made, revision)), []), f"at revision {revision}"


@pytest.mark.usefixtures("here")
def test_a_start_state_that_contradicts_the_ledger_is_rejected(tmp_path: Path) -> None:
    made = make(tmp_path, digested()[:-1])  # no digest is recorded of the last states
    whole = what(in_one(made))
    for index in settling(made):
        if 1 not in made.states[index - 1].jobs:
            continue
        keep(made)
        image = made.image(index)
        path = write_snapshot(made.directory / "index" / "states", replace(image, state=another_user(image.state)))
        found, doubts = in_parts(made, 2)
        assert what(found) == whole
        assert [f"the state in {path} does not match the ledger"] == doubts or "they differ first" in doubts[0]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("minute", range(MINUTES))
def test_a_rewritten_entry_is_located_as_in_one_process(tmp_path: Path, minute: int) -> None:
    forged = make(tmp_path, rewritten(digested(), e.RunEnded, minute, failed))
    with pytest.raises(StateDigestMismatch) as one:
        in_one(forged)
    for index in settling(forged):
        keep(forged, index)
        with pytest.raises(StateDigestMismatch) as cut:
            in_parts(forged, 2)
        assert (cut.value.index, cut.value.after) == (one.value.index, one.value.after)


def test_the_replay_command_uses_processes_for_parts(made: Made) -> None:
    cuts = settling(made)
    keep(made, cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3])
    one, several = (
        typed("audit", "replay", "--data", made.directory, "--processes", count, "--json") for count in (1, 3)
    )
    assert (several.exit_code, several.stderr) == (0, "")
    assert msgspec.json.decode(several.stdout) == msgspec.json.decode(one.stdout)


def test_an_unreadable_start_state_is_reported_and_skipped(made: Made) -> None:
    cuts = settling(made)
    keep(made, cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3])
    first, second = sorted((made.directory / "index" / "states").iterdir())
    first.write_bytes(first.read_bytes()[:-40])
    one, cut = (typed("audit", "replay", "--data", made.directory, "--processes", count, "--json") for count in (1, 3))
    assert (cut.exit_code, cut.stdout) == (0, one.stdout)
    assert "one process folds everything again" in " ".join(cut.stderr.split())


def test_a_rewritten_ledger_exits_with_7_with_several_processes(tmp_path: Path) -> None:
    forged = make(tmp_path, rewritten(digested(), e.RunEnded, 1, failed))
    keep(forged, settling(forged)[-2])
    result = typed("audit", "replay", "--data", forged.directory, "--processes", 2)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert "they differ first between revision" in " ".join(result.stderr.split())


class Rows:
    """Ledger with one command per entry, with the methods that `seams` needs."""

    def __init__(self, applied_index: int) -> None:
        self.applied_index = applied_index

    def row_at(self, index: int) -> Any:
        return replace(Row(), revision=index)


class Row(msgspec.Struct):
    revision: int = 0


@given(
    kept=st.lists(st.integers(1, 400), unique=True),
    first=st.integers(0, 100),
    last=st.integers(100, 300),
    count=st.integers(1, 70),
    least=st.integers(1, 60),
)
def test_parts_have_a_minimum_size_and_a_maximum_number(
    kept: list[int], first: int, last: int, count: int, least: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_COMMANDS", least)
        states = [(index, Path(str(index))) for index in kept]
        found = seams(Rows(350), states, first=first, last=last, parts=count)  # type: ignore[arg-type]
    bounds = [first, *(cut.revision for cut in found), last]
    assert len(found) < count or not found
    assert not found or all(after - before >= least for before, after in itertools.pairwise(bounds))
    assert {cut.index for cut in found} <= set(kept)
