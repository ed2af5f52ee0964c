"""Each function of Slurm's burst-buffer API has its counterpart: one test a row of docs/reference/plugin-api.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.cluster.schemas.operations import OPERATIONS
from forebay.replica.fold.apply import apply_batch
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.grammar.directives import read_request
from forebay.replica.grammar.lexer import DirectiveRejected
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.buffers import HOLDING, BufferState
from forebay.replica.model.requests import CreatePersistent
from forebay.replica.scheduler.estimates import Estimate, estimate, jobs_ahead_in
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.state.state import EMPTY
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.views.burst import MEGABYTE, burst_of, job_tres, tres_count
from tests.replica.reference import plugin_api as api
from tests.replica.world import World, user

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "plugin-api.md"
MB, GB = MEGABYTE, 1024 * MEGABYTE
BB = "#DW jobdw capacity=40MiB access_mode=striped type=scratch"


def world(**fields: object) -> World:
    return World(pools={"fast": 100 * MB, "slow": 3 * GB}, granularity=MB, **fields)  # type: ignore[arg-type]


def events_of(here: World) -> list[e.Event]:
    return [event for batch in here.ledger for entry in batch.entries for event in entry.events]


def test_every_function_of_the_table_has_a_test_of_its_name() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len(rows) == 17
    names = {name for name in globals() if name.startswith("test_")}
    assert {row for row in rows if not any(name.startswith(f"test_{row}_") for name in names)} == set()


def test_load_state_gives_every_answer_that_was_given_before() -> None:
    here = world()
    job = here.submit(BB)
    state = EMPTY
    for batch in here.ledger:
        following = apply_batch(state, batch)
        assert following is not None
        state = following
    assert burst_of(state) == burst_of(here.state)
    assert api.job_test_stage_in(state, job) == api.job_test_stage_in(here.state, job) == api.UNDER_WAY


def test_state_pack_tells_a_user_the_users_own_where_data_is_private() -> None:
    here = world()
    here.submit(BB, who="alan")
    here.submit(BB, who="beth")
    assert {buffer.user for buffer in burst_of(here.state).buffers} == {"alan", "beth"}
    assert {buffer.user for buffer in burst_of(here.state, only_user="beth").buffers} == {"beth"}
    assert "show_burst" in OPERATIONS


def test_reconfig_changes_what_is_shown_in_one_entry() -> None:
    here = world()
    assert not isinstance(here.settle(c.ConfigureSite((ConfSetting("StageInTimeout", "7"),), partial=True)), Rejection)
    assert burst_of(here.state).stage_in_timeout_s == 7


def test_get_system_size_is_the_space_of_all_pools_in_mb_and_nothing_for_another_plugin() -> None:
    state = world().state
    assert api.get_system_size(state) == api.get_system_size(state, "native") == 100 + 3 * 1024
    assert api.get_system_size(state, "datawarp") == 0


def test_job_validate_refuses_a_bad_request_with_its_place() -> None:
    with pytest.raises(DirectiveRejected) as refused:
        read_request("#!/bin/sh\n#DW jobdw capacity=-5 access_mode=striped type=scratch\n")
    assert refused.value.rejection.place.startswith("script line 2, column")


def test_job_validate2_refuses_what_the_pools_cannot_give() -> None:
    refused = world().try_submit(BB.replace("40MiB", "40GiB"))
    assert isinstance(refused, Rejection) and refused.code is RejectionCode.CAPACITY_OVER_TOTAL


def test_job_set_tres_cnt_counts_the_buffer_and_what_the_job_makes_persistent_in_mb() -> None:
    here = world()
    job = here.submit(BB)
    assert tres_count(here.state, job) == 40
    assert job_tres(here.state, job) == "cpu=1,node=1,bb/native=40M"
    plain = here.submit()
    assert (tres_count(here.state, plain), job_tres(here.state, plain)) == (0, "cpu=1,node=1")
    assert not isinstance(
        here.settle(c.ConfigureSite((ConfSetting("Flags", "EnablePersistent"),), partial=True)), Rejection
    )
    asked = read_request("", BB.replace("40MiB", "1MiB")).request
    assert asked is not None
    maker = here.submit(buffer=replace(asked, creates=(CreatePersistent("lake", MB + 1),)))
    assert tres_count(here.state, maker) == 1 + 2


def test_job_get_est_start_is_a_time_with_what_the_job_waits_for_until_then() -> None:
    here = world()
    holder = here.submit(BB.replace("40MiB", "80MiB"), time_limit_s=600)
    waiting = here.submit(BB)

    def starts(job: int) -> Estimate:
        index = SchedulingIndex(here.state)
        index.catch_up()
        return estimate(here.state, job, here.at, jobs_ahead_in(index))

    first, second = starts(holder), starts(waiting)
    assert here.at <= first.start_at < first.start_at + 600 * 1_000_000 <= second.start_at
    assert second.steps[0].what == "space" and second.steps[0].sentence
    here.finish(holder)
    assert here.at <= starts(waiting).start_at < second.start_at


def test_job_try_stage_in_gives_space_to_who_may_have_it_now() -> None:
    here = world()
    job = here.submit(BB)
    assert [event.job for event in events_of(here) if isinstance(event, e.BufferAllocated)] == [job]


def test_job_test_stage_in_is_0_1_and_minus_1() -> None:
    here = world(stage_retries=0)
    first, second = here.submit(BB), here.submit(BB.replace("40MiB", "80MiB"))
    assert (api.job_test_stage_in(here.state, first), api.job_test_stage_in(here.state, second)) == (0, -1)
    plain = here.submit()
    assert api.job_test_stage_in(here.state, plain) == 1
    here.report(first, c.OperationFailed("no such file", final=True))
    assert api.job_test_stage_in(here.state, first) == -1
    held = world(cpus=1)
    busy, staged = held.submit(BB), held.submit(BB)
    held.done(busy)
    held.done(staged)
    assert held.state.buffers[staged].state is BufferState.STAGED_IN
    assert api.job_test_stage_in(held.state, staged) == 1
    assert api.job_test_stage_in(held.state, busy) == -1


def test_job_begin_claims_the_buffer_for_the_run() -> None:
    here = world()
    job = here.submit(BB)
    here.done(job)
    assert [event.job for event in events_of(here) if isinstance(event, e.RunOrdered)] == [job]
    assert here.state.buffers[job].state is BufferState.PRE_RUN


def test_job_revoke_alloc_keeps_the_space_until_the_teardown_is_over() -> None:
    assert BufferState.ALLOC_REVOKE in HOLDING and BufferState.TEARDOWN in HOLDING
    here = world()
    job = here.submit(BB)
    here.done(job)
    here.report(job, c.OperationFailed("mount failed", final=True, operation="pre_run"))
    revoked = [event for event in events_of(here) if isinstance(event, e.AllocationRevoked | e.PreRunFailed)]
    assert [event.job for event in revoked] == [job]
    assert here.state.held_bytes["fast"] == 40 * MB


def test_job_start_stage_out_follows_post_run() -> None:
    here = world()
    job = here.submit(BB)
    for _ in range(3):
        here.done(job)
    assert [event.job for event in events_of(here) if isinstance(event, e.StageOutStarted)] == [job]


def stages_of_a_run() -> list[tuple[BufferState, int, int]]:
    """Return each state that a buffer is seen in, with what the two tests after the run say."""
    here = world()
    job = here.submit(BB)
    seen = []
    while True:
        state = here.state.buffers[job].state
        seen.append((state, api.job_test_post_run(here.state, job), api.job_test_stage_out(here.state, job)))
        if state is BufferState.COMPLETE:
            return seen
        here.done(job)


def test_job_test_post_run_is_minus_1_before_0_during_and_1_after_it() -> None:
    found = {state: post_run for state, post_run, _ in stages_of_a_run()}
    assert found[BufferState.STAGING_IN] == -1
    assert found[BufferState.POST_RUN] == 0
    assert found[BufferState.STAGING_OUT] == found[BufferState.TEARDOWN] == found[BufferState.COMPLETE] == 1


def test_job_test_stage_out_is_0_1_and_minus_1() -> None:
    found = {state: stage_out for state, _, stage_out in stages_of_a_run()}
    assert found[BufferState.STAGING_IN] == -1
    assert found[BufferState.POST_RUN] == found[BufferState.STAGING_OUT] == 0
    assert found[BufferState.TEARDOWN] == found[BufferState.COMPLETE] == 1
    here = world(stage_retries=0)
    job = here.submit(BB)
    for _ in range(3):
        here.done(job)
    here.report(job, c.OperationFailed("EIO", final=True))
    assert api.job_test_stage_out(here.state, job) == -1
    waiting = here.submit(BB.replace("40MiB", "90MiB"))
    assert api.job_test_stage_out(here.state, waiting) == 1  # nothing was staged in, so nothing is to come out


def test_job_cancel_ends_the_staging_and_gives_the_space_back() -> None:
    here = world()
    job = here.submit(BB)
    assert not isinstance(here.settle(c.CancelJob(job), user()), Rejection)
    here.finish(job)
    assert here.state.buffers[job].state is BufferState.COMPLETE
    assert "fast" not in here.state.held_bytes
    assert "cancel_job" in OPERATIONS


@pytest.mark.parametrize(
    ("asked", "tres"),
    [
        (BB, "bb/native=40M"),
        ("#DW jobdw capacity=2GiB pool=slow access_mode=striped type=scratch", "bb/native=2G"),
        ("#DW jobdw capacity=2049MiB pool=slow access_mode=striped type=scratch", "bb/native=2049M"),
        ("#BB create_persistent name=lake capacity=3GiB pool=slow", "bb/native=3G"),
        ("#DW persistentdw name=lake", ""),
        ("capacity=2GiB pool=slow type=scratch access=striped", "bb/native=2G"),
    ],
)
def test_xlate_bb_2_tres_str_gives_the_request_as_tres(asked: str, tres: str) -> None:
    assert api.xlate_bb_2_tres_str(world().state, asked) == tres
