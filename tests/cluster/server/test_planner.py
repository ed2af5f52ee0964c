"""The leader's scheduling index follows its decisions, and its cycles equal those of a walk over all jobs."""

import asyncio

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.server import planner as planning
from forebay.cluster.server.planner import Planner
from forebay.replica.decide.decide import decide
from forebay.replica.fold.apply import SpeculativeState
from forebay.replica.grammar.directives import parse_request
from forebay.replica.messages import commands as c
from forebay.replica.messages.entries import Acceptance, Entry
from forebay.replica.messages.events import Event
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import JobRequest
from forebay.replica.model.stages import Stage
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.scheduling_cycle import run_cycle
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import PLAIN, SCRIPT, Harness, story, until
from tests.cluster.server.test_proposer import ALICE, OPERATOR, START, batches, command_id, submit
from tests.replica.reference.reference_scheduler import next_due
from tests.replica.reference.reference_scheduler import run_cycle as reference_events
from tests.replica.scheduler.contents import contents
from tests.replica.world import SCRIPT as TRUE
from tests.replica.world import World

NODE = c.Actor(c.ActorRole.AGENT, "n1")


class Compared:
    """Counts the cycles of all indexes, and compares each with a walk over all jobs of the same state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        self.built = 0
        real, build = run_cycle, SchedulingIndex.__init__

        def compare(index: SchedulingIndex, at: Instant) -> tuple[Event, ...]:
            self.passes += 1
            found = real(index, at)
            assert found == reference_events(index.state, at)
            return found

        def count(index: SchedulingIndex, *arguments: object) -> None:
            self.built += 1
            build(index, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(planning, "run_cycle", compare)
        monkeypatch.setattr(SchedulingIndex, "__init__", count)


async def work(harness: Harness, rounds: int) -> None:
    """Submit, report and cancel, with several batches in flight at a time."""
    register = c.RegisterNode("n1", 2, "instance", "disk")
    answers = [harness.controller.submit(c.Request(command_id(), NODE, register))]
    for number in range(rounds):
        answers.append(submit(harness, script=SCRIPT if number % 2 else PLAIN, hold=Hold.NONE))
        if number % 5 == 4:
            answers.append(harness.controller.submit(c.Request(command_id(), ALICE, c.CancelJob(number))))
        if number % 7 == 6:
            policy = c.DrainNode("n1", "x") if number % 2 else c.ResumeNode("n1")
            answers.append(harness.controller.submit(c.Request(command_id(), OPERATOR, policy)))
        for job in list(harness.controller.state.jobs.values()):
            if job.state is JobState.CONFIGURING:
                report = c.ReportOperation("n1", job.id, job.attempt, Stage.RUN, c.ScriptStarted())
                answers.append(harness.controller.submit(c.Request(command_id(), NODE, report)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if number % 3 == 2:
            harness.engine.commit()
    while not all(decision.done() for decision in answers):
        harness.engine.commit()
        await asyncio.sleep(0)


@story
async def test_cycles_with_batches_in_flight_equal_a_full_walk_with_one_index(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config, automatic=False, clock=ManualClock(START)) as harness:
        compared = Compared(monkeypatch)
        harness.controller.proposer._planner.forget()
        await work(harness, 30)
        assert compared.passes >= 15
        assert compared.built == 1


@story
async def test_lost_leadership_drops_the_index_and_the_next_uses_the_agreed_state(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config, automatic=False, clock=ManualClock(START)) as harness:
        compared = Compared(monkeypatch)
        await work(harness, 6)
        decision = submit(harness, script=SCRIPT, hold=Hold.NONE)
        await until(lambda: harness.engine.uncommitted > 0)
        harness.engine.depose(lose=True)
        assert decision.done() and decision.exception() is not None
        assert harness.controller.proposer._planner._index is None
        harness.engine.lead()
        before = compared.passes
        await work(harness, 6)
        assert compared.passes > before


@story
async def test_new_leader_indexes_jobs_in_portions_and_answers_commands_meanwhile(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config, automatic=False, clock=ManualClock(START)) as harness:
        await work(harness, 20)
        unfinished = len(harness.controller.state.unfinished)
        assert unfinished > 5
        compared, portions = Compared(monkeypatch), 0
        real = SchedulingIndex.prepare

        def prepare(index: SchedulingIndex, jobs_max: int) -> bool:
            nonlocal portions
            portions += not compared.passes
            return real(index, jobs_max)

        monkeypatch.setattr(SchedulingIndex, "prepare", prepare)
        monkeypatch.setattr(planning, "JOBS_PER_TURN", 1)
        harness.controller.proposer._planner.forget()
        decision = submit(harness, script=SCRIPT, hold=Hold.NONE)
        await until(lambda: harness.engine.uncommitted == 1)
        (batch,) = batches(harness)[-1:]
        assert [entry.command for entry in batch.entries] == ["submit_job"]
        harness.engine.commit()
        assert (await decision).rejection is None
        await until(lambda: compared.passes > 0)
        assert portions >= unfinished


def test_batch_on_another_state_than_the_indexs_makes_a_new_index() -> None:
    world, other = World(), World()
    planner = Planner()
    for state in (world.state, other.state):
        batch = SpeculativeState(state, Instant(state.at))
        assert planner.prepare(batch)
        assert planner.run_cycle(batch) == ()
        planner.closed(batch)
        assert planner._index is not None and planner._index.state is state


def test_next_due_uses_the_applied_state_and_is_immediate_while_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(stage_in_timeout_s=10, timeouts="fixed")
    for _ in range(3):
        world.submit("capacity=10")
    planner = Planner()
    monkeypatch.setattr(planning, "JOBS_PER_TURN", 1)
    assert planner.next_due(world.state, world.at) == world.at
    monkeypatch.undo()
    assert planner.next_due(world.state, world.at) == next_due(world.state, world.at) == world.at + 10_000_000


def test_entry_after_the_cycle_is_indexed_too() -> None:
    world = World({"fast": 100})
    planner, state = Planner(), world.state
    for _ in range(3):
        batch = SpeculativeState(state, world.at)
        for _ in range(2):
            request = c.Request(command_id(), c.Actor(c.ActorRole.USER, "alan"), _submit())
            decided = decide(batch.facts, request, world.at)
            assert isinstance(decided, Acceptance)
            batch.add(Entry(request.id, request.actor, "submit_job", decided.events))
            assert planner.prepare(batch)
        assert planner.run_cycle(batch) == reference_events(batch.state(), world.at)
        planner.closed(batch)
        state = batch.state()
    assert planner._index is not None and contents(planner._index) == contents(SchedulingIndex(state))


def _submit() -> c.SubmitJob:
    return c.SubmitJob(JobRequest("job", "alan", TRUE, "/out", 60, buffer=parse_request(TRUE, "capacity=40")))
