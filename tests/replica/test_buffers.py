"""The transition table, over the whole product of states and inputs."""

from __future__ import annotations

import pytest

from forebay.replica.model.buffers import HOLDING, TRANSITIONS, BufferInput, BufferState, IllegalTransition, next_state

S, I = BufferState, BufferInput  # noqa: E741
EVER_RAN = {S.RUNNING, S.SUSPENDED, S.POST_RUN, S.STAGING_OUT}


def reachable(start: BufferState, without: BufferInput | None = None) -> set[BufferState]:
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (source, happening), following in TRANSITIONS.items():
            if source is state and happening is not without and following not in found:
                found.add(following)
                todo.append(following)
    return found


@pytest.mark.parametrize("state", BufferState)
@pytest.mark.parametrize("happening", BufferInput)
def test_every_state_and_input_has_exactly_one_outcome(state: BufferState, happening: BufferInput) -> None:
    if (state, happening) in TRANSITIONS:
        assert next_state(state, happening) is TRANSITIONS[state, happening]
    else:
        with pytest.raises(IllegalTransition, match=state.word):
            next_state(state, happening)


def test_there_are_slurms_sixteen_states_spelt_as_slurm_spells_them() -> None:
    assert {state.word for state in BufferState} == set(
        "pending allocating allocated deleting deleted staging-in staged-in pre-run alloc-revoke running suspended "
        "post-run staging-out teardown teardown-fail complete".split()
    )


def test_every_state_can_be_reached_and_every_state_reaches_an_end() -> None:
    assert reachable(S.PENDING) == set(BufferState)
    for state in BufferState:
        assert reachable(state) & {S.COMPLETE, S.DELETED}, f"{state.word} is a trap"


def test_space_is_taken_and_given_back_only_at_the_documented_steps() -> None:
    changes = {
        (state.word, happening.name, following.word)
        for (state, happening), following in TRANSITIONS.items()
        if (state in HOLDING) != (following in HOLDING)
    }
    assert changes == {
        ("pending", "ALLOCATED", "staging-in"),
        ("pending", "CREATION_STARTED", "allocating"),
        ("teardown", "TORN_DOWN", "complete"),
        ("teardown-fail", "CLEARED", "complete"),
        ("deleting", "DELETED", "deleted"),
    }


def test_a_script_that_may_have_run_never_runs_again_without_a_requeue() -> None:
    for state in EVER_RAN:
        assert S.PRE_RUN not in reachable(state, without=I.REQUEUED)


def test_results_are_only_given_up_by_a_teardown_that_somebody_started() -> None:
    leaving = {h for (state, h), following in TRANSITIONS.items() if state in EVER_RAN and following not in EVER_RAN}
    assert leaving == {I.TEARDOWN_STARTED}
