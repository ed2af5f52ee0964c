"""The time set back by an operator: what the clock had measured counts from there, what people wrote stays."""

import pytest

from forebay.replica.fold.apply import apply_batch
from forebay.replica.fold.fold import fold
from forebay.replica.fold.history import HistoryFold
from forebay.replica.messages import StateDigested
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.model.job_states import JobState
from forebay.replica.scheduler import SchedulingIndex, run_cycle
from forebay.replica.state.digest import state_digest
from forebay.replica.state.invariants import find_violations
from forebay.replica.state.state import EMPTY
from forebay.replica.values import Instant, LedgerViolation, Rejection, RejectionCode, Revision, seconds
from tests.replica.external_job_world import ExternalJobWorld
from tests.replica.world import OPERATOR, World, user

HOUR_S = 3600


def set_back(world: World, by_s: int) -> None:
    """Set the clock back, as the leader does: what follows is at the time that was set."""
    at = Instant(world.at - seconds(by_s))
    assert not isinstance(world.settle(c.SetClock(at)), Rejection)
    assert world.at == at
    assert find_violations(world.state) == []


def test_a_retry_that_the_wrong_clock_had_set_is_due_and_not_in_an_hour() -> None:
    world = World({"fast": 100}, stage_retries=3, retry_backoff_s=2)
    world.advance(HOUR_S)
    job = world.submit("capacity=40")
    world.report(job, c.OperationFailed("the worker died"))
    assert world.state.jobs[job].retry_at > world.at
    set_back(world, HOUR_S)
    world.advance(3)
    assert world.shown(job) == ("PENDING", "BurstBufferStageIn", "staging-in")
    assert world.state.jobs[job].retry_at == 0 and world.state.jobs[job].attempt > 1


def test_what_runs_has_its_whole_time_from_there_and_is_charged_no_more_than_that() -> None:
    world = World({"fast": 100})
    world.advance(HOUR_S)
    job = world.submit("capacity=40")
    world.done(job)
    world.report(job, c.ScriptStarted())
    submitted_at = world.state.jobs[job].submitted_at
    set_back(world, HOUR_S)
    assert world.state.jobs[job].started_at == world.at
    assert world.state.jobs[job].submitted_at == submitted_at, "that is in the ledger"
    assert world.state.buffers[job].created_at <= world.at
    world.advance(8)
    world.report(job, c.ScriptEnded(JobState.COMPLETED))
    ended = world.state.jobs[job]
    assert ended.ended_at - ended.started_at == seconds(8)


def test_what_people_wrote_stays_and_counts_by_the_right_time() -> None:
    world = World({"fast": 100})
    begin_at = Instant(world.at + seconds(HOUR_S // 2))
    job = world.submit("capacity=40", begin_at=begin_at)
    world.advance(HOUR_S // 4)
    set_back(world, HOUR_S // 8)
    assert world.state.jobs[job].request.begin_at == begin_at
    assert world.reason(job) == "BeginTime"
    world.advance(HOUR_S // 2)
    assert world.reason(job) != "BeginTime"


@pytest.mark.parametrize("later_s", [0, 1, HOUR_S])
def test_the_clock_is_never_set_forward(later_s: int) -> None:
    world = World()
    rejection = world.settle(c.SetClock(Instant(world.at + seconds(later_s))))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.WRONG_STATE


def test_only_an_operator_may_set_it() -> None:
    world = World()
    rejection = world.settle(c.SetClock(Instant(world.at - 1)), user("ada"))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED


def test_nothing_may_follow_it_in_its_batch() -> None:
    world = World()
    world.advance(10)
    state, at = world.state, world.at
    entries = tuple(
        Entry(b"", OPERATOR, "set_clock", (event,))
        for event in (e.ClockSet(Instant(at - 5)), e.NodeDrained("n1", "after it"))
    )
    for order in (entries, entries[::-1]):
        batch = Batch(Revision(state.revision), at, order)
        if order is entries:
            with pytest.raises(LedgerViolation, match="follows one that set the clock"):
                apply_batch(state, batch)
        else:
            after = apply_batch(state, batch)
            assert after is not None and after.at == at - 5


def test_an_index_that_followed_it_decides_what_a_new_one_decides() -> None:
    world = World({"fast": 100})
    for _ in range(3):
        world.submit("capacity=60")
    world.advance(HOUR_S)
    index = SchedulingIndex(world.state)
    index.catch_up()
    jobs = tuple(sorted(world.state.unfinished))
    event = e.ClockSet(Instant(world.at - seconds(HOUR_S)), jobs)
    after = fold(world.state, [event], world.at)
    index.advance(after, [event])
    assert run_cycle(index, Instant(after.at)) == run_cycle(SchedulingIndex(after), Instant(after.at))
    assert state_digest(after) != state_digest(world.state)


def test_the_state_before_it_is_held_for_the_digest_that_is_recorded_of_it() -> None:
    world = World({"fast": 100})
    world.advance(HOUR_S)
    world.submit("capacity=40")
    recorded = StateDigested(world.state.revision, state_digest(world.state))
    set_back(world, HOUR_S)
    world.commit(Entry(b"", c.CONTROLLER, "record_state_digest", (recorded,)))
    history = HistoryFold(EMPTY)
    for index, batch in enumerate(world.ledger, start=1):
        history.take(index, batch)
    history.digests.finish()
    assert (history.digests.recorded, history.digests.compared) == (1, 1)


def test_nothing_that_the_clock_measures_of_an_external_job_is_ahead_of_a_clock_that_was_set() -> None:
    world = ExternalJobWorld()
    world.advance(HOUR_S)
    world.setup()
    before = world.external_job().external_job
    assert before is not None and before.since == world.at
    set_back(world, HOUR_S)
    after = world.external_job().external_job
    assert after is not None and after.since == world.at
