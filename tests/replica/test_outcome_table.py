"""The product of all states of a job's buffer and all that can be asked or reported: one outcome each."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.buffers import PERSISTENT_STATES, BufferState
from forebay.replica.state.invariants import find_violations
from tests.replica.reference.outcome_table import STATES, happenings, outcome, specimen, table

TABLE = table()
NAMES = tuple(dict.fromkeys(name for name, _ in TABLE))


def test_the_table_has_every_state_that_a_jobs_buffer_can_have() -> None:
    assert set(STATES) == set(BufferState) - PERSISTENT_STATES - {BufferState.DELETED}
    assert set(TABLE) == set(product(NAMES, STATES))


@pytest.mark.parametrize("state", STATES)
def test_each_specimen_is_a_state_that_can_be(state: BufferState) -> None:
    assert find_violations(specimen(state)) == []


@pytest.mark.parametrize(("name", "state"), list(product(NAMES, STATES)))
def test_every_pair_has_exactly_one_outcome_and_says_why_where_nothing_changes(name: str, state: BufferState) -> None:
    one = TABLE[name, state]
    assert sum(map(bool, (one.becomes, one.ignored, one.refused))) == 1
    here = specimen(state)
    actor, command = happenings(here.jobs[1], here.buffers[1])[name]
    assert outcome(here, name, actor, command) == one


def test_everything_that_people_and_agents_ask_about_a_job_is_in_the_table() -> None:
    here = specimen(BufferState.RUNNING)
    asked = {type(command) for _, command in happenings(here.jobs[1], here.buffers[1]).values()}
    about_jobs = {kind for kind in get_args(c.Command) if kind.__annotations__.get("job") == "int"}
    assert about_jobs <= asked


CANCELLING = {
    "pending": ("complete, CANCELLED", "complete, CANCELLED"),
    "staging-in": ("teardown, CANCELLED", "teardown, CANCELLED"),
    "staged-in": ("teardown, CANCELLED", "teardown, CANCELLED"),
    "pre-run": ("pre-run (ending)", "pre-run (ending)"),
    "running": ("running (ending)", "running (ending)"),
    "suspended": ("suspended (ending)", "suspended (ending)"),
    "post-run": ("", "teardown, COMPLETED"),
    "staging-out": ("", "teardown, COMPLETED"),
    "teardown": ("", ""),
}
"""State -> what cancelling does, plain and with --hurry; empty: it goes on (SEMANTICS.md, "Cancelling")."""


@pytest.mark.parametrize("state", CANCELLING)
def test_cancelling_does_what_the_table_of_the_semantics_says(state: str) -> None:
    buffer_state = next(one for one in STATES if one.word == state)
    found = TABLE["cancel", buffer_state], TABLE["cancel --hurry", buffer_state]
    assert tuple(one.becomes for one in found) == CANCELLING[state]
