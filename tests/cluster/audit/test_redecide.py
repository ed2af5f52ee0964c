"""Deciding ledgers again: by this release, and by releases with a changed policy, text or fold."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forebay.cluster.audit.deciding import CommandOutcome
from forebay.cluster.audit.redecide import Deviation, RedecidingReplay, deviation
from forebay.cluster.audit.replay import from_nothing
from forebay.cluster.cli.exits import ExitCode
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.jobs import Hold
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.snapshots.finalize import write_snapshot
from forebay.wal.codec import encode_batch
from forebay.wal.ledger import LedgerEntry
from tests.cluster.audit.ledgers import Made, real, typed, written
from tests.golden.archive import unpack
from tests.replica.world import World
from tests.repo.tree import copy_packages
from tests.simulation.world import World as Simulated


class Release(NamedTuple):
    """One-line change of this tree that creates another release."""

    module: str
    line: str
    instead: str


OTHER_NODE = Release(
    "replica/scheduler/node_index.py",
    "return min(keys.first for has, keys in self.by_jobs.items() if has >= cpus)[1]",
    "return max(key for has, all in self.by_jobs.items() if has >= cpus for key in all if key[0] == all.first[0])[1]",
)
"""Among nodes with equally few jobs, the last one gets the buffer instead of the first."""

OTHER_WORDS = Release("replica/decide/jobs.py", 'command.hurry, "cancelled")', 'command.hurry, "ended early")')

OTHER_FOLD = Release("replica/fold/jobs.py", "hurry=job.hurry or event.hurry)", "hurry=True)")


NEW_EVENT = (
    Release(
        "replica/messages/events.py",
        "# ---- mails\n",
        "class JobDropped(EventRecord, frozen=True, tag=47):\n    job: int\n\n\n# ---- mails\n",
    ),
    Release(
        "replica/decide/jobs.py",
        "return Acceptance((e.JobCancelled(job.id),))",
        "return Acceptance((e.JobDropped(job.id),))",
    ),
)
"""A cancel causes an event that this release does not know."""

LOST_EVENT = Release(
    "replica/messages/events.py",
    "class StagedIn(EventRecord, frozen=True, tag=69)",
    "class StagedIn(EventRecord, frozen=True, tag=68)",
)
"""The other release lacks an event that ledgers contain."""


def released(tree: Path, *changes: Release) -> Path:
    """Create a tree of this release with changes."""
    copy_packages(tree)
    for change in changes:
        module = tree / change.module
        text = module.read_text(encoding="utf-8")
        assert text.count(change.line) == 1, change
        module.write_text(text.replace(change.line, change.instead), encoding="utf-8")
    return tree


def busy() -> World:
    """Cluster of three nodes with a few jobs, some of which are cancelled."""
    world = World({"fast": 1_000}, nodes=3)
    jobs = [world.submit(f"capacity={10 + number}", who=f"user{number % 3}") for number in range(12)]
    for job in jobs[:4]:
        world.done(job)
    for job in jobs[2:6]:
        world.settle(c.CancelJob(job))
    world.finish(jobs[0])
    return world


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return written(tmp_path_factory.mktemp("r1"), [(1, encode_batch(batch)) for batch in busy().ledger])


def found(*words: object, code: int = 0) -> dict[str, Any]:
    result = real("audit", "redecide", *words, "--json")
    assert result.returncode == code, result.stderr + result.stdout[-2000:]
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_decisions_of_the_golden_ledger_are_unchanged(tmp_path: Path) -> None:
    unpack(tmp_path)
    answer = found("--data", tmp_path / "r1")
    assert (answer["different"], answer["differences"]) == (0, [])
    assert answer["rebuilt_share"] > 0.98
    assert answer["commands"]["found_cluster"]["same"] == 1
    assert answer["commands"]["run_scheduling_cycle"]["same"] > 100


@pytest.mark.parametrize("seed", [3, 11])
def test_decisions_of_a_simulated_cluster_are_unchanged(seed: int) -> None:
    # Run in the simulation, whose limits differ: cached replies are kept for seconds.
    with Simulated(seed) as world:
        assert world.run_seed().violations == ()
        deciding = RedecidingReplay(from_nothing(), lambda batch: True)
        for index, point in enumerate(world.oracle.points[1:], start=1):
            deciding.take(LedgerEntry(index, point.term, point.data, b"", 0, point.revision))
        assert deciding.state == world.oracle.state
    assert deciding.differences == []
    assert deciding.rebuilt_share > 0.8  # its agents say much that is not kept
    assert deciding.tallies["run_scheduling_cycle"].same > 10
    assert deciding.tallies["found_cluster"].same == 1  # the leader's own commands are proven, too


def test_a_release_repeats_its_own_decisions(made: Made, tmp_path: Path) -> None:
    answer = found("--data", made.directory, "--release", released(tmp_path / "same"))
    assert (answer["different"], answer["not_rebuilt"], answer["states_differ"]) == (0, 0, [])
    assert answer["same"] > 40


def test_a_changed_policy_is_reported_at_its_first_effect_only(made: Made, tmp_path: Path) -> None:
    tree = released(tmp_path / "other", OTHER_NODE)
    result = real("audit", "redecide", "--data", made.directory, "--release", tree)
    assert result.returncode == ExitCode.VERIFICATION_FAILED
    first = next(
        (index, event)
        for index, batch in enumerate(busy().ledger, start=1)
        for event in batch.entries[0].events
        if isinstance(event, e.BufferAllocated)
    )
    assert f"entry {first[0]}, revision {first[0]}, " in result.stderr
    assert f"run_scheduling_cycle of controller:leader, job {first[1].job}: other allocation" in result.stderr
    assert "this release decides as the ledger" in result.stdout
    answer = found("--data", made.directory, "--release", tree, code=ExitCode.VERIFICATION_FAILED)
    assert {one["command"] for one in answer["differences"]} == {"run_scheduling_cycle"}
    assert answer["differences_by_class"]["other allocation"] == answer["different"]
    assert (answer["states_differ"], answer["differences"][0]["index"]) == ([], first[0])
    named = answer["differences"][0]
    assert [named[who]["events"][0]["detail"]["node"] for who in ("ledger", "decided")] == ["n1", "n3"]


def test_changed_texts_are_listed_without_a_failure(made: Made, tmp_path: Path) -> None:
    answer = found("--data", made.directory, "--release", released(tmp_path / "other", OTHER_WORDS))
    assert answer["different"] == answer["differences_by_class"]["reason only"] == 2
    assert {one["command"] for one in answer["differences"]} == {"cancel_job"}
    shown = real("audit", "redecide", "--data", made.directory, "--release", tmp_path / "other")
    assert shown.returncode == 0
    assert "reason=ended early" in shown.stdout


def test_decisions_before_since_are_skipped(made: Made) -> None:
    whole, last = found("--data", made.directory), made.state.revision
    part = found("--data", made.directory, "--since", last - 5)
    assert (part["first_revision"], part["revision"]) == (last - 5, last)
    assert part["same"] + part["no_trace"] == 6
    assert found("--data", made.directory, "--since", "5m")["same"] == whole["same"]
    assert found("--data", made.directory, "--since", "2030-01-01T00:00:00Z")["same"] == 0
    result = typed("audit", "redecide", "--data", made.directory, "--since", "yesterday")
    assert result.exit_code == ExitCode.BAD_INPUT


def test_the_first_entry_with_a_different_fold_is_named(made: Made, tmp_path: Path) -> None:
    same = real("audit", "replay", "--data", made.directory, "--release", released(tmp_path / "same"), "--json")
    assert (same.returncode, same.stderr) == (0, "")
    assert json.loads(same.stdout)["state_digest"] == made.state_digest
    result = real("audit", "replay", "--data", made.directory, "--release", released(tmp_path / "other", OTHER_FOLD))
    assert result.returncode == ExitCode.VERIFICATION_FAILED
    first = next(
        index
        for index, batch in enumerate(busy().ledger, start=1)
        if any(isinstance(event, e.CancelRequested) for event in batch.entries[0].events)
    )
    assert f"entry {first}: " in result.stderr
    assert "differs in jobs" in result.stderr


def test_an_unusable_release_tree_is_an_error(made: Made, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    old = released(tmp_path / "old")
    (old / "cluster/audit/worker.py").unlink()
    broken = released(tmp_path / "broken")
    (broken / "replica/values/limits.py").write_text("raise RuntimeError('half unpacked')\n", encoding="utf-8")
    for tree, code, words in (
        ("absent", ExitCode.BAD_INPUT, "is not a directory"),
        ("empty", ExitCode.BAD_INPUT, "has no release of Forebay"),
        ("old", ExitCode.BAD_INPUT, "cannot be used: it has no forebay/cluster/audit/worker.py"),
        ("broken", ExitCode.REFUSED, "RuntimeError: half unpacked"),
    ):
        for command in ("redecide", "replay"):
            result = typed("audit", command, "--data", made.directory, "--release", tmp_path / tree)
            assert result.exit_code == code, result.output
            assert words in result.stderr
            assert "what to do: " in result.stderr


def test_commands_and_events_of_one_release_only_are_handled(made: Made, tmp_path: Path) -> None:
    world = busy()
    world.settle(c.CancelJob(world.submit("capacity=900", hold=Hold.USER)))
    later = written(tmp_path / "r2", [(1, encode_batch(batch)) for batch in world.ledger])
    tree = released(tmp_path / "new", *NEW_EVENT)
    answer = found("--data", later.directory, "--release", tree, code=ExitCode.VERIFICATION_FAILED)
    (one,) = answer["differences"]
    assert (one["command"], one["class"]) == ("cancel_job", "other rejection")
    assert "this release does not know its events" in one["decided"]["fault"]
    result = typed("audit", "redecide", "--data", made.directory, "--release", released(tmp_path / "lost", LOST_EVENT))
    assert result.exit_code == ExitCode.REFUSED
    assert "cannot continue: " in result.stderr


def test_the_other_release_loads_a_state_from_a_snapshot(made: Made, tmp_path: Path) -> None:
    directory = tmp_path / "snapshots"
    directory.mkdir()
    middle = len(made.entries) // 2
    path = write_snapshot(directory, made.image(middle))
    words = ("--data", made.directory, "--from-snapshot", path, "--release", released(tmp_path / "same"))
    answer = found(*words)
    assert (answer["first_index"], answer["different"], answer["states_differ"]) == (middle + 1, 0, [])


HELD, FREED = e.JobHeld(1, Hold.USER, "because"), e.JobReleased(2)


@pytest.mark.parametrize(
    ("ledger", "decided", "expected"),
    [
        (CommandOutcome((HELD,)), CommandOutcome((HELD,)), None),
        (CommandOutcome((HELD, FREED)), CommandOutcome((FREED, HELD)), Deviation.ORDER),
        (CommandOutcome((HELD,)), CommandOutcome((e.JobHeld(1, Hold.USER, "so"),)), Deviation.REASON),
        (CommandOutcome((HELD,)), CommandOutcome((e.JobHeld(1, Hold.ADMIN, "because"),)), Deviation.EVENTS),
        (CommandOutcome((HELD,)), CommandOutcome(()), Deviation.EVENTS),
        (
            CommandOutcome((e.RunOrdered(1, "n1", 1),)),
            CommandOutcome((e.RunOrdered(1, "n2", 1),)),
            Deviation.ALLOCATION,
        ),
        (
            CommandOutcome(rejection=Rejection(RejectionCode.WRONG_STATE, "a", "b")),
            CommandOutcome((HELD,)),
            Deviation.REFUSAL,
        ),
        (
            CommandOutcome(rejection=Rejection(RejectionCode.WRONG_STATE, "a", "b")),
            CommandOutcome(rejection=Rejection(RejectionCode.UNKNOWN_JOB, "a", "b")),
            Deviation.REFUSAL,
        ),
        (
            CommandOutcome(rejection=Rejection(RejectionCode.WRONG_STATE, "a", "b")),
            CommandOutcome(rejection=Rejection(RejectionCode.WRONG_STATE, "c", "b")),
            Deviation.WORDS,
        ),
        (CommandOutcome((HELD,)), CommandOutcome(fault="KeyError: 7"), Deviation.REFUSAL),
    ],
)
def test_differences_are_classified_by_effect(
    ledger: CommandOutcome, decided: CommandOutcome, expected: Deviation | None
) -> None:
    assert deviation(ledger, decided) == expected
