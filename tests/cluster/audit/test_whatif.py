"""What-if simulations: without changes they match the ledger, with changes an exact queue model.

The model of a changed pool is a queue with as many servers as the pool has slots. A job occupies a slot from the
allocation of its buffer to the end of its teardown.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.audit.deep import snapshots_in
from forebay.cluster.audit.whatif import Edge, MovedJob, ScenarioChanges, WhatIf, comparison, what_if, what_if_page
from forebay.cluster.cli.exits import ExitCode
from forebay.replica.grammar import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from forebay.replica.model.requests import NO_OPTIONS, Dependency, DependencyKind
from forebay.replica.values.units import Instant
from forebay.snapshots import inspect
from forebay.wal import Environment, Ledger
from forebay.wal.codec import encode_batch
from tests.cluster.audit.ledgers import real, typed, written
from tests.golden.archive import unpack
from tests.replica.world import START, World, agent
from tests.simulation.world import World as Simulated

SECOND = 1_000_000
STAGES_S = {"stage_in": 3, "post_run": 1, "stage_out": 2, "teardown": 1}
BEGINS_S = 1
"""Start time of a script."""
FAR = START + 10**12
"""Later than anything that happens."""


class Driven:
    """World whose agents take a given time for each stage and for each job's run."""

    def __init__(self, pool: int = 4, cpus: int = 64, **policy: Any) -> None:
        self.world = World({"fast": pool}, cpus=cpus, **policy)
        self.runs_s: dict[int, int] = {}
        """Job -> duration of its script; None or missing for an endless script."""
        self.results: dict[int, list[c.OperationResult]] = {}
        """Job -> failures of its stage-ins before they succeed."""
        self.acts: list[tuple[int, int, Callable[[], object]]] = []
        self._known: dict[int, tuple[str, int, bool]] = {}
        self._number = 0

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self.acts, (self.world.at + int(delay_s * SECOND), self._number, act))

    def submit(self, run_s: int, size: int = 1, who: str = "alan", **fields: Any) -> int:
        job = self.world.submit(f"capacity={size}", who=who, **fields)
        self.runs_s[job] = run_s
        return job

    def run(self, last_s: float = 1e6) -> Driven:
        """Run all due work, up to a time."""
        self._look()
        while self.acts and self.acts[0][0] <= START + last_s * SECOND:
            at, _, act = heapq.heappop(self.acts)
            self.world.at = Instant(max(at, self.world.at))
            self.world.run_pass()
            act()
            self._look()
        return self

    def _look(self) -> None:
        """Begin what is ordered and was not, and look again when a failed operation is to be tried again."""
        for known in self.world.state.jobs.values():
            if known.retry_at > self.world.at:
                self.after((known.retry_at - self.world.at) / SECOND, lambda: None)
        orders = {order.job: order for node in sorted(self.world.state.nodes) for order in self.world.orders(node)}
        for job, order in sorted(orders.items()):
            key = order.stage, order.attempt, order.started
            if self._known.get(job) == key:
                continue
            self._known[job] = key
            if order.stage != "run":
                failing = self.results.get(job, []) if order.stage == "stage_in" else []
                self._says(STAGES_S[order.stage], order, failing.pop(0) if failing else c.OperationDone(1, 1))
            elif not order.started:
                self._says(BEGINS_S, order, c.ScriptStarted())
            elif job in self.runs_s:
                self._says(self.runs_s[job], order, c.ScriptEnded(JobState.COMPLETED))

    def _says(self, after_s: int, order: Order, result: c.OperationResult) -> None:
        self.after(after_s, lambda: self._say(order, result))

    def _say(self, order: Order, result: c.OperationResult) -> None:
        now = next((one for one in self.world.orders(self.world.agent_of(order.job)) if one.job == order.job), None)
        if now is not None and (now.stage, now.attempt) == (order.stage, order.attempt):
            self.world.report(order.job, result, now)


@contextmanager
def ledger_of(directory: Path, world: World) -> Iterator[Ledger]:
    made = written(directory, [(1, encode_batch(batch)) for batch in world.ledger])
    with Environment.open_readonly(made.directory / "wal") as environment:
        yield Ledger(environment)


class Both(NamedTuple):
    """Return the result of a what-if, and the start of each job, seconds after the beginning."""

    found: WhatIf
    unchanged: dict[int, float]
    changed: dict[int, float]


@contextmanager
def every_move_listed() -> Iterator[list[list[MovedJob]]]:
    """Keep all jobs that moved, and not only those that moved most."""
    kept: list[list[MovedJob]] = []
    original = comparison._moved

    def moved(*worlds: Any) -> list[MovedJob]:
        kept.append(original(*worlds))
        return kept[-1]

    comparison._moved = moved  # type: ignore[assignment]
    try:
        yield kept
    finally:
        comparison._moved = original


def asked(directory: Path, world: World, *changes: str, to: int | None = FAR, first: Edge | None = None) -> Both:
    with ledger_of(directory, world) as ledger, every_move_listed() as moves:
        found = what_if(ledger, [], first or Edge(), Edge(at_us=to), ScenarioChanges(None, changes))
    recorded: dict[int, float] = {}
    for batch in world.ledger:
        for entry in batch.entries:
            for event in entry.events:
                if type(event).__name__ == "RunStarted":
                    recorded.setdefault(event.job, (batch.at - START) / SECOND)  # type: ignore[attr-defined]
    for fit in (found.calibration.in_place, found.calibration.by_times):
        assert fit.identical == fit.starts
    changed = dict(recorded)
    for job in moves[-1] if moves else []:
        # Jobs that start after the end of the ledger have no recorded start.
        assert job.unchanged_us == job.recorded_us or job.recorded_us is None
        changed.pop(job.job, None)
        if job.changed_us is not None:
            changed[job.job] = (job.changed_us - START) / SECOND
    return Both(found, recorded, changed)


# ---- nothing changed


def found_in(directory: Path, *words: object) -> dict[str, Any]:
    done = typed("audit", "whatif", "--data", directory, "--json", *words)
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    unpack(directory)
    return directory / "r1"


def test_an_unchanged_replay_of_the_recorded_day_is_exact(golden: Path) -> None:
    found = found_in(golden)
    calibration = found["calibration"]
    in_place = calibration["in_place"]
    assert in_place["starts"] == in_place["identical"] == found["recorded"]["started"] > 50
    assert calibration["decisions"] == calibration["same"] > 1_000
    assert (in_place["median_off_us"], found["left_out"]) == (0, {})
    # In that recorded day, agents that are down send reports, which service times alone do not reproduce.
    assert 0.6 < calibration["by_times"]["share"] < 0.95
    assert calibration["is_rough"]
    assert found["recorded"] == found["unchanged"]
    assert found["changed"] is None


@pytest.mark.parametrize(("first", "last"), [(300, 900), (1_000, 1_500), (1, 2)])
def test_an_unchanged_replay_of_any_period_is_exact(golden: Path, first: int, last: int) -> None:
    found = found_in(golden, "--from", first, "--to", last)
    assert found["recorded"] == found["unchanged"]
    assert found["calibration"]["same"] == found["calibration"]["decisions"]
    assert found["source"]["first_revision"] >= first + 1
    assert found["source"]["last_revision"] <= last


@pytest.mark.parametrize("seed", [3, 7])
def test_an_unchanged_replay_by_service_times_is_exact(seed: int, tmp_path: Path) -> None:
    with Simulated(seed) as simulated:
        assert simulated.run_seed().violations == ()
        history = [(point.term, point.data) for point in simulated.oracle.points[1:]]
    made = written(tmp_path, history)
    with Environment.open_readonly(made.directory / "wal") as environment:
        found = what_if(Ledger(environment), [], Edge(), Edge(), ScenarioChanges())
        assert found.recorded == found.unchanged
        assert found.calibration.decisions == found.calibration.same > 80
        assert found.recorded.started > 5
        times = found.calibration.by_times
        assert times.identical == times.starts == found.recorded.started
        assert not found.calibration.is_rough
        # An irrelevant change: scheduling cycles keep their times, so each job keeps its start.
        other = what_if(Ledger(environment), [], Edge(), Edge(), ScenarioChanges(None, ["MaxPasses=9"]))
        assert (other.earlier, other.later, other.changed) == (0, 0, other.unchanged)


# ---- pools: an oracle by hand

Jobs = list[tuple[int, int]]


def queued(jobs: Jobs, slots: int) -> list[int]:
    """Return the starts of jobs (seconds after the previous job, run time) in a first-come queue with slots."""
    free = [0] * slots
    heapq.heapify(free)
    submitted, starts = 0, []
    for after_s, run_s in jobs:
        submitted += after_s
        given_at = max(submitted, heapq.heappop(free))
        starts.append(given_at + STAGES_S["stage_in"] + BEGINS_S)
        ended = starts[-1] + run_s
        heapq.heappush(free, ended + STAGES_S["post_run"] + STAGES_S["stage_out"] + STAGES_S["teardown"])
    return starts


def driven(jobs: Jobs, slots: int) -> Driven:
    made, at_s = Driven(pool=slots), 0
    for after_s, run_s in jobs:
        at_s += after_s
        made.after(at_s, partial(made.submit, run_s))
    return made.run()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(st.tuples(st.integers(0, 15), st.integers(1, 40)), min_size=1, max_size=12),
    slots=st.integers(1, 4),
    others=st.integers(1, 6),
)
def test_a_resized_pool_starts_jobs_as_an_exact_queue_model(
    tmp_path_factory: pytest.TempPathFactory, jobs: Jobs, slots: int, others: int
) -> None:
    world = driven(jobs, slots).world
    both = asked(tmp_path_factory.mktemp("queue"), world, f"Pool=fast:{others}")
    assert [both.unchanged[job] for job in sorted(both.unchanged)] == queued(jobs, slots)
    expected = queued(jobs, others)
    assert [both.changed[job] for job in sorted(both.changed)] == expected
    assert both.found.changed is not None
    assert both.found.changed.ended == {"COMPLETED": len(jobs)}
    sooner = sum(after < before for before, after in zip(queued(jobs, slots), expected, strict=True))
    later = sum(after > before for before, after in zip(queued(jobs, slots), expected, strict=True))
    assert (both.found.earlier, both.found.later) == (sooner, later)


BUSY: Jobs = [(0, 30), (1, 20), (1, 25), (2, 10), (3, 15), (1, 5)]


def test_figures_of_a_resized_pool_match_the_queue_model(tmp_path: Path) -> None:
    both = asked(tmp_path, driven(BUSY, 2).world, "Pool=fast:+1", to=None)
    found, waits = (
        both.found,
        [start - sum(after for after, _ in BUSY[: n + 1]) for n, start in enumerate(queued(BUSY, 3))],
    )
    assert found.changed is not None
    # The last of six is the 95th percentile, the third the median.
    assert (found.changed.wait.p50_us, found.changed.wait.p95_us) == (sorted(waits)[2] * SECOND, max(waits) * SECOND)
    ends = [start + run + 4 for start, (_, run) in zip(queued(BUSY, 3), BUSY, strict=True)]
    assert found.changed.makespan_us == max(ends) * SECOND
    held_s = sum(run + 8 for _, run in BUSY)
    (pool,) = found.changed.pools
    span_s = (found.source.to_us - found.source.from_us) / SECOND
    assert pool.mean == pytest.approx(held_s / span_s)
    assert (pool.peak, pool.peak_share, pool.use.steps[0][2:]) == (3, 1.0, (2, 2))
    assert found.recorded.pools[0].peak == 2
    assert max(held for _, held, _, _ in pool.use.steps) == 3


def test_a_changed_key_takes_effect(tmp_path: Path) -> None:
    made = driven([(0, 5)] * 4, 4)
    both = asked(tmp_path, made.world, "OperationsPerStage=1")
    assert set(both.unchanged.values()) == {4}
    # One stage-in at a time, of three seconds each.
    assert sorted(both.changed.values())[:2] == [4, 7]


# ---- what the ledger's own commands become


def test_a_change_survives_commands_that_would_undo_it(tmp_path: Path) -> None:
    made = Driven(pool=1)
    made.after(5, lambda: made.world.settle(c.ChangePool("fast", quantity=2)))
    made.after(5, lambda: made.world.configure(MaxPasses="7", StageRetries="1"))
    for second in (6, 7, 8):
        made.after(second, lambda: made.submit(20))
    both = asked(tmp_path, made.run().world, "Pool=fast:+1", "MaxPasses=5")
    assert list(both.unchanged.values()) == [10, 11, 38]
    assert sorted(both.changed.values()) == [10, 11, 12]


def test_an_applied_file_does_not_reset_changed_keys(tmp_path: Path) -> None:
    made = Driven(pool=1, timeouts="fixed")
    made.after(5, lambda: made.world.settle(c.ConfigureSite((ConfSetting("OtherTimeout", "77"),))))
    made.after(6, lambda: made.submit(20))
    both = asked(tmp_path, made.run().world, "StageInTimeout=2", to=START + 60 * SECOND)
    assert both.unchanged == {1: 10}
    assert both.changed == {}  # each of its stage-ins takes three seconds


def test_jobs_keep_their_ledger_ids_after_a_rejection(tmp_path: Path) -> None:
    made = Driven(pool=9)
    world = made.world
    made.after(1, lambda: made.submit(5, size=9))
    made.after(2, lambda: made.submit(100, size=1))
    made.after(3, lambda: made.submit(7, size=1, dependencies=(Dependency(DependencyKind.AFTER_OK, 2),)))
    made.after(40, lambda: world.settle(c.CancelJob(2)))
    made.after(41, lambda: made.submit(7, size=1))
    made.after(42, lambda: world.report(2, c.ScriptEnded(JobState.CANCELLED)))
    both = asked(tmp_path, made.run(200).world, "Pool=fast:-5")
    assert both.found.changed is not None
    assert both.found.changed.refused == 1
    assert both.unchanged == {1: 5, 2: 18, 4: 45}
    assert both.changed == {2: 6, 4: 45}
    # Job 2 was also cancelled in the ledger, so job 3 waits for its success for ever.
    assert both.found.changed.ended == {"COMPLETED": 1, "CANCELLED": 1}
    assert both.found.changed.unfinished == 1


# ---- what is assumed


def test_unfinished_runs_take_their_limit_and_unseen_runs_the_median(tmp_path: Path) -> None:
    made = Driven(pool=1)
    for run_s in (10, 20, 90):
        made.submit(run_s)
    made.after(200, lambda: made.submit(1000, who="bob"))
    endless = made.submit(15, who="alan")
    del made.runs_s[endless]
    both = asked(tmp_path, made.run(400).world, "Pool=fast:+4")
    assert both.found.changed is not None
    # In the ledger, Bob's job waits for the endless job; here it has its own slot.
    assert both.changed[5] == 204
    assert (both.found.recorded.unfinished, both.found.unchanged.unfinished) == (2, 0)
    # The endless job takes its limit of a minute. Bob's job never ran, so it takes the median of all runs: 21 s from
    # its order at 203, and four for the teardown.
    assert both.found.changed.ended == {"COMPLETED": 4, "TIMEOUT": 1}
    assert both.found.changed.makespan_us == (203 + 21 + 4) * SECOND


def test_a_failed_stage_in_fails_again_and_is_retried(tmp_path: Path) -> None:
    made = Driven(pool=1)
    made.submit(30)
    second = made.submit(30)
    made.results[second] = [c.OperationFailed("no route to the file system")]
    both = asked(tmp_path, made.run().world, "Pool=fast:+1")
    # Three seconds, two until it is tried again, three again.
    assert both.changed == {1: 4, 2: 9}
    assert both.unchanged == {1: 4, 2: 47}


def test_a_run_lost_with_its_node_is_lost_again_and_restarted(tmp_path: Path) -> None:
    made = Driven(pool=1, requeue_on_node_fail=True)
    first = made.submit(15)
    made.submit(5)
    del made.runs_s[first]

    def lost() -> None:
        made.world.report(first, c.ScriptEnded(JobState.NODE_FAIL, message="the node was lost"))
        made.runs_s[first] = 15

    made.after(10, lost)
    both = asked(tmp_path, made.run().world, "Pool=fast:+1")
    assert (both.unchanged, both.changed) == ({1: 4, 2: 41}, {1: 4, 2: 4})
    assert both.found.changed is not None
    assert both.found.changed.ended == {"COMPLETED": 2}
    # Six seconds of it, four to be torn down, then all of it again.
    assert both.found.changed.makespan_us == (10 + 4 + 4 + 15 + 4) * SECOND


def test_a_down_agent_sends_no_reports_until_it_returns(tmp_path: Path) -> None:
    made = Driven(pool=1)
    made.submit(60)
    made.submit(10)
    made.after(6, lambda: made.world.settle(c.MarkNodeDown("n1", "nothing heard"), c.CONTROLLER))
    made.after(50, lambda: made.world.settle(c.MarkNodeBack("n1"), c.CONTROLLER))
    both = asked(tmp_path, made.run().world, "Pool=fast:+1")
    assert both.unchanged == {1: 4, 2: 72}
    assert both.changed == {1: 4, 2: 4}
    made = Driven(pool=1)
    made.submit(60)
    made.submit(10)
    made.after(2, lambda: made.world.settle(c.MarkNodeDown("n1", "nothing heard"), c.CONTROLLER))
    made.after(50, lambda: made.world.settle(c.MarkNodeBack("n1"), c.CONTROLLER))
    both = asked(tmp_path / "down", made.run().world, "Pool=fast:+1")
    assert both.changed[2] == 51  # its stage-in ends at 3 and is reported at 50


def test_a_suspended_script_continues_with_its_remaining_time(tmp_path: Path) -> None:
    made = Driven(pool=1)
    made.submit(10)
    second = made.submit(50)  # 30 seconds of work, and 20 in which it is suspended
    made.after(30, lambda: made.world.settle(c.SuspendJob(second)))
    made.after(50, lambda: made.world.settle(c.ResumeJob(second)))
    both = asked(tmp_path, made.run().world, "Pool=fast:+1")
    assert (both.unchanged, both.changed) == ({1: 4, 2: 22}, {1: 4, 2: 4})
    assert both.found.changed is not None
    # 26 of them are over at 30, and four are left at 50.
    ends_s = [(figures.makespan_us // SECOND) for figures in (both.found.recorded, both.found.changed)]
    assert ends_s == [22 + 50 + 4, 54 + 4]


def test_a_script_takes_its_recorded_time_to_end_on_request(tmp_path: Path) -> None:
    made = Driven(pool=1)
    made.submit(10)
    second = made.submit(500)
    made.after(60, lambda: made.world.settle(c.CancelJob(second)))
    made.after(67, lambda: made.world.report(second, c.ScriptEnded(JobState.CANCELLED)))
    both = asked(tmp_path, made.run(100).world, "Pool=fast:+1")
    assert both.changed == {1: 4, 2: 4}
    assert both.found.changed is not None
    assert both.found.changed.ended == {"COMPLETED": 1, "CANCELLED": 1}
    assert both.found.changed.makespan_us == both.found.recorded.makespan_us == 71 * SECOND


def test_added_nodes_run_jobs_that_waited_for_cpus(tmp_path: Path) -> None:
    made = Driven(pool=9, cpus=1)
    for _ in range(3):
        made.submit(30)
    both = asked(tmp_path, made.run().world, "Nodes=+1", first=Edge(revision=2))
    assert sorted(both.unchanged.values()) == [4, 36, 68]
    assert sorted(both.changed.values()) == [4, 4, 36]


def test_setting_the_clock_back_shifts_scheduled_reports(tmp_path: Path) -> None:
    made = Driven(pool=2, cpus=1)
    made.submit(30)
    made.submit(7)
    made.after(20, lambda: made.world.settle(c.SetClock(Instant(START + 12 * SECOND))))
    both = asked(tmp_path, made.run().world, "Pool=fast:-1")
    # The first one runs from 4 on; the clock is at 12 for the second time at 20, and ends at 34 by either.
    assert both.unchanged == {1: 4, 2: 36}
    assert both.changed[2] == 42  # its buffer is given at 38


def test_a_simulation_does_not_depend_on_snapshots(golden: Path) -> None:
    snapshots = snapshots_in(golden / "snapshots")
    assert snapshots
    with Environment.open_readonly(golden / "wal") as environment:
        ledger = Ledger(environment)
        first = Edge(revision=inspect(snapshots[-1][1]).revision + 3)
        found = [
            what_if(ledger, held, first, Edge(), ScenarioChanges(None, ["Pool=fast:+1TiB"])) for held in ([], snapshots)
        ]
    assert found[0] == found[1]
    assert found[0].changed != found[0].unchanged


# ---- the command


def test_an_impossible_change_is_rejected_with_available_values(golden: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "burst_buffer.conf"
    wrong.write_text("StageInTimeout=60\nStageInTimeuot=60\n", encoding="utf-8")
    for words, sentences in (
        (("--set", "Pool=fasst:+1GiB"), ("pool 'fasst' does not exist", "use one of: fast, wide")),
        (("--set", "Pool=fast:-2PiB"), ("pool fast has only 100GiB", "remove less")),
        (("--set", "Pool=fast"), ("has no size", "NAME:+SIZE")),
        (("--set", "Pool=fast:+many"), ("does not start with a number",)),
        (("--set", "Pool=fast:1GiB", "--set", "Pool=fast:2GiB"), ("pool 'fast' is changed twice",)),
        (("--set", "MaxPases=3"), ("the key 'MaxPases' is unknown", "did you mean MaxPasses?")),
        (("--set", "MaxPasses=three"), ("MaxPasses",)),
        (("--set", "MaxPasses=3", "--set", "maxpasses=4"), ("maxpasses is changed twice",)),
        (("--set", "fast"), ("has no =",)),
        (("--set", "Nodes=-3"), ("adds no nodes", "Nodes=+N")),
        (("--policy", wrong), ("line 2, column 1: the key 'StageInTimeuot' is unknown",)),
        (("--policy", tmp_path / "absent"), ("cannot be read",)),
    ):
        done = typed("audit", "whatif", "--data", golden, "--from", 100, "--to", 200, *words)
        assert done.exit_code in (ExitCode.BAD_INPUT, ExitCode.NOT_FOUND), done.output
        assert all(sentence in done.stderr for sentence in sentences), (words, done.stderr)
        assert done.stdout == ""


def test_an_impossible_window_is_rejected_with_the_available_range(golden: Path) -> None:
    for words, code, sentence in (
        (("--from", 99_999), ExitCode.NOT_FOUND, "the ledger ends with revision "),
        (("--to", 99_999), ExitCode.NOT_FOUND, "revision 99999 is not settled"),
        (("--from", 900, "--to", 800), ExitCode.NOT_FOUND, "the window ends at revision 800"),
        (("--from", 900, "--to", 900), ExitCode.NOT_FOUND, "the window ends at revision 900"),
        (("--from", "2024-01-01T00:00:00Z"), ExitCode.NOT_FOUND, "nothing was settled from 2024-01-01"),
        (("--to", "2020-01-01T00:00:00Z"), ExitCode.NOT_FOUND, "nothing was settled between"),
        (("--from", "yesteryear"), ExitCode.BAD_INPUT, "is not a past time"),
    ):
        done = typed("audit", "whatif", "--data", golden, *words)
        assert done.exit_code == code, (words, done.output)
        assert sentence in done.stderr, (words, done.stderr)


def test_a_policy_file_is_applied_and_only_the_page_is_written(golden: Path, tmp_path: Path) -> None:
    policy, page = tmp_path / "burst_buffer.conf", tmp_path / "page.html"
    policy.write_text("StageInTimeout=60\nFlags=TeardownFailure\n", encoding="utf-8")

    def kept() -> dict[Path, tuple[int, int]]:
        # Who reads a ledger is noted in LMDB's table of readers.
        files = (path for path in golden.rglob("*") if path.name != "lock.mdb")
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = kept()
    found = found_in(golden, "--from", 1100, "--policy", policy, "--set", "Pool=fast:+30GiB", "--html", page)
    assert found["changes"] == [f"the configuration of {policy}", "pool fast: +30GiB"]
    assert found["changed"]["pools"] != found["unchanged"]["pools"]
    assert kept() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["burst_buffer.conf", "page.html"]


def test_the_table_shows_assumptions_and_accuracy(golden: Path) -> None:
    done = real("audit", "whatif", "--data", golden, "--to", 400, "--set", "Pool=fast:+1TiB")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Calibration +\d+ of \d+ starts \(100.0%\) are at the recorded time", done.stdout)
    assert "RECORDED" in done.stdout and "UNCHANGED" in done.stdout and "CHANGED" in done.stdout
    assert "pool fast: held, peak" in done.stdout
    assert "Assumed:\n- Users, operators" in done.stdout


HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_the_page_shows_the_json_figures_and_escapes_names(tmp_path: Path) -> None:
    made = Driven(pool=1)
    for _ in range(3):
        made.submit(30)
    world = made.run().world
    written(tmp_path / "r1", [(1, encode_batch(batch)) for batch in world.ledger])
    page = tmp_path / "page.html"
    done = typed("audit", "whatif", "--data", tmp_path / "r1", "--json", "--set", "Pool=fast:+1", "--html", page)
    assert done.exit_code == 0, done.output
    found = msgspec.json.decode(done.stdout, type=WhatIf)
    text = page.read_text(encoding="utf-8")
    assert found.changed is not None
    assert found.gaining
    rows = comparison_rows(text)
    assert rows["jobs started"] == [str(world.started) for world in (found.recorded, found.unchanged, found.changed)]
    assert rows["jobs submitted"] == ["3", "3", "3"]
    again = re.search(r"forebay audit whatif [^<]*", text)
    assert again is not None and "--set=Pool=fast:+1" in again[0].replace("&#x27;", "'")
    assert f"--from={found.source.first_revision - 1}" in again[0]
    # Each job that moves has two bars: without the change, and with it.
    for job in (*found.gaining, *found.losing):
        assert len(re.findall(f"<title>{job.job} [^<]*: (?:starts|does not start)", text)) == 2
    # The page loads nothing and runs no scripts.
    assert "default-src 'none'" in text.replace("&#x27;", "'")
    assert not re.search(r"(src|href)=", text)
    hostile = what_if_page(with_hostile_texts(found), HOSTILE)
    assert HOSTILE not in hostile
    assert "<script" not in hostile and "<img" not in hostile and "onerror=alert(2)>" not in hostile
    assert hostile.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 20


def with_hostile_texts(found: WhatIf) -> WhatIf:
    """Return the figures with every text in them that comes from a ledger or a command line replaced."""
    texts = msgspec.to_builtins(found)

    def spoiled(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {
                HOSTILE if key in ("ended", "left_out", "unproven", "jobs") else name: spoiled(one, name)
                for name, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [spoiled(one, key) for one in value]
        return HOSTILE if isinstance(value, str) and key != "unit" else value

    texts["left_out"] = texts["unproven"] = {"submit_job": 1}
    return msgspec.convert(spoiled(texts), WhatIf)


def comparison_rows(page: str) -> dict[str, list[str]]:
    """Return the rows of the first table of a page."""
    table = page[page.index("<table>") : page.index("</table>")]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")]
    return {row[0]: row[1:] for row in rows if row}


def test_reports_of_deleted_nodes_are_rejected_without_a_fault(tmp_path: Path) -> None:
    made = Driven(pool=2)
    made.submit(20)
    made.after(5, lambda: made.world.settle(c.RegisterNode("n1", 64, "i2", "s1"), agent("n1")))
    made.after(6, lambda: made.submit(20, options=NO_OPTIONS))
    both = asked(tmp_path, made.run().world, "Pool=fast:-1")
    assert both.unchanged == {1: 4, 2: 10}
    assert both.changed == {1: 4, 2: 32}
