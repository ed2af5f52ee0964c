"""Reconstruction of commands from their events: possible and impossible kinds, and no guessed commands."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from forebay.cluster.audit.rebuild import REBUILDERS, rebuilt
from forebay.replica.fold.apply import SpeculativeState
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import JobChange
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import TransferReceipt
from forebay.replica.state.state import EMPTY
from tests.golden.make_ledger import lived
from tests.replica.world import World

NEVER_MADE_AGAIN = {"raise_feature_level"}
"""Commands that the ledger lacks data for, by law 1; `REBUILDERS` names the data."""


def settled(batches: list[Batch]) -> Iterator[tuple[SpeculativeState, Entry]]:
    """Yield the entries of a ledger, each with the state before it; the entry is settled before the next one."""
    state = EMPTY
    for batch in batches:
        if batch.base != state.revision:
            continue  # void
        growing = SpeculativeState(state, batch.at)
        for entry in batch.entries:
            yield growing, entry
            growing.add(entry)
        state = growing.state()


@pytest.fixture(scope="module")
def day() -> list[Batch]:
    return lived()


def test_every_command_kind_has_a_rebuilder_or_a_reason() -> None:
    assert set(REBUILDERS) == set(get_args(c.Command))
    never = {word for word, kind in c.KINDS.items() if REBUILDERS[kind].candidates is None}
    assert never == NEVER_MADE_AGAIN
    assert all(REBUILDERS[c.KINDS[word]].lacks for word in never)


def test_every_command_of_the_recorded_day_is_rebuilt_or_explained(
    day: list[Batch],
) -> None:
    made, missed = Counter[str](), Counter[str]()
    for before, entry in settled(day):
        command = rebuilt(before, entry)
        if command is not None:
            assert c.kind_of(command) == entry.command
            made[entry.command] += 1
        elif entry.events:
            missed[entry.command] += 1
    unexplained = {kind for kind in missed if not REBUILDERS[c.KINDS[kind]].lacks}
    assert not unexplained, missed
    happened = {entry.command for batch in day for entry in batch.entries if entry.events}
    assert happened == set(c.KINDS) - NEVER_MADE_AGAIN == set(made)
    # The agents in that ledger count files in teardowns, which real agents do not.
    assert missed.total() - sum(missed[kind] for kind in NEVER_MADE_AGAIN) <= 0.02 * made.total(), missed


def last(world: World) -> tuple[SpeculativeState, Entry]:
    """Return the last command of a world, with the state before it."""
    place = max(at for at, batch in enumerate(world.ledger) if batch.entries[0].command != "run_scheduling_cycle")
    *_, before = settled(world.ledger[:place])
    return SpeculativeState(before[0].state(), world.ledger[place].at), world.ledger[place].entries[0]


FAILURES = [
    c.OperationFailed("no such file: /in/a: b", final=True),
    c.OperationFailed("no such file", operation="setup"),
    c.OperationFailed(""),
    c.OperationFailed("disk full", receipt=TransferReceipt(Stage.STAGE_IN, 1, complete=False, files=3)),
    c.OperationFailed("Duplicate", operation="create_persistent"),
]


def rebuilt_report(world: World) -> object:
    """Return the result in the last report of a world, made again."""
    command = rebuilt(*last(world))
    assert isinstance(command, c.ReportOperation)
    return command.result


@pytest.mark.parametrize("result", FAILURES)
def test_the_report_of_a_failed_operation_is_rebuilt_with_its_message(
    result: c.OperationFailed,
) -> None:
    world = World()
    job = world.submit("capacity=10")
    world.report(job, result)
    assert rebuilt_report(world) == result


@pytest.mark.parametrize("result", [c.OperationDone(), c.OperationDone(1, 1)])
def test_the_report_of_a_post_run_is_rebuilt_with_or_without_counts(
    result: c.OperationDone,
) -> None:
    world = World()
    job = world.submit("capacity=10")
    for _ in ("stage-in", "run"):
        world.done(job)
    world.report(job, result)
    assert rebuilt_report(world) == result


def test_the_report_of_a_cancelled_script_is_rebuilt() -> None:
    world = World()
    job = world.submit("capacity=10")
    world.done(job)
    world.report(job, c.ScriptStarted())
    world.settle(c.CancelJob(job))
    ended = c.ScriptEnded(JobState.FAILED, 0, 15)
    world.report(job, ended)
    assert rebuilt_report(world) == ended


def test_the_registration_of_an_unchanged_node_is_rebuilt() -> None:
    world = World()
    world.register("n1")
    before, entry = last(world)
    assert entry.events == ()
    assert rebuilt(before, entry) == c.RegisterNode("n1", 8, "i1", "s1")


def test_a_candidate_with_another_digest_is_rejected() -> None:
    world = World()
    world.submit("capacity=10")
    before, entry = last(world)
    assert isinstance(entry.events[0], e.JobSubmitted)
    assert rebuilt(before, entry) is not None
    for digest in (b"", bytes(8)):
        assert rebuilt(before, msgspec.structs.replace(entry, digest=digest)) is None


@pytest.mark.parametrize("output", ["", "out-%j.log", "/out/%u/%x-%j", "plain.txt", "7/%j-1"])
def test_a_submit_is_rebuilt_with_symbols_in_paths(output: str) -> None:
    world = World()
    script = "#!/bin/sh\n#DW jobdw type=scratch capacity=10 access_mode=striped\n"
    script += "#DW stage_out type=file source=$DW_JOB_STRIPED/r destination=/out/r-%j\n"
    world.submit(script=script, output=output)
    before, entry = last(world)
    command = rebuilt(before, entry)
    assert isinstance(command, c.SubmitJob)
    assert command.request.output == output
    assert command.request.buffer is not None
    assert command.request.buffer.stage_out[0].outside == "/out/r-%j"


def test_an_update_is_rebuilt_with_unchanged_fields() -> None:
    world = World()
    job = world.submit("capacity=10", hold=Hold.USER)
    update = c.UpdateJob(job, JobChange(priority=0, time_limit_s=60, comment="later", dependencies=(), any_of=False))
    world.settle(update)
    before, entry = last(world)
    assert [event.change for event in entry.events] == [JobChange(priority=0, comment="later")]
    assert rebuilt(before, entry) == update


def test_the_restart_of_operations_is_rebuilt_with_unaffected_jobs() -> None:
    world = World(restart_policy="slurm")
    stuck, other = world.submit("capacity=10"), world.submit("capacity=10")
    world.report(stuck, c.OperationFailed("no such file", final=True))
    restart = c.RestartOperations((stuck, other))
    world.settle(restart, c.CONTROLLER)
    before, entry = last(world)
    assert {event.job for event in entry.events} == {other}
    assert rebuilt(before, entry) == restart


def test_configuration_by_keys_is_rebuilt_and_by_file_is_not() -> None:
    world = World()
    world.configure(MaxPasses="7", OtherTimeout="120")
    assert rebuilt(*last(world)) is not None
    file = (ConfSetting("MaxPasses", "8", "burst_buffer.conf", 3, 11),)
    world.settle(c.ConfigureSite(file, partial=True))
    assert rebuilt(*last(world)) is None
