"""Arrays over the API: one submit, references such as 1_3 and 1_[2-4], and reasons from an index that follows."""

from __future__ import annotations

import pytest

from forebay.cluster.api.render.reasons import Verdicts
from forebay.cluster.config.config import Config
from forebay.replica.fold.apply import apply_batch
from forebay.replica.state.state import EMPTY
from forebay.replica.views.jobs import verdict_of
from tests.cluster.harness import Harness, story, until

SCRIPT = "#!/bin/sh\n#DW jobdw capacity=10MiB access_mode=striped type=scratch\ntrue\n"


async def ready(harness: Harness) -> None:
    await until(lambda: harness.controller.state.feature_level >= 1)
    agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2}
    await harness.ask("POST", "/v1/agents/n1/register", agent, who="n1")


@story
async def test_tasks_are_shown_explained_and_cancelled_by_what_people_call_them(config: Config) -> None:
    async with Harness(config) as harness:
        await ready(harness)
        await harness.submit(script=SCRIPT, array="1-4%2")
        array = harness.controller.state.arrays[1]
        assert dict(array) == {1: 1, 2: 2, 3: 3, 4: 4}
        shown = await harness.ask("GET", "/v1/jobs/1_3", who="alice")
        assert shown.body["job_id"] == 3 and shown.body["reason"] == "JobArrayTaskLimit"
        why = await harness.ask("GET", "/v1/jobs/1_3/why", who="alice")
        assert why.body["reason"] == "JobArrayTaskLimit" and "at most 2 tasks" in why.body["sentence"]
        history = await harness.ask("GET", "/v1/jobs/1_3/history", who="alice")
        assert history.body["rows"][0]["event"] == "job_submitted" and history.body["complete"]
        assert "tasks 1-4 of array 1, at most 2 at once" in history.body["rows"][0]["sentence"]
        [node] = [one for one in (await harness.ask("GET", "/v1/nodes")).body["nodes"] if one["name"] == "n1"]
        assert node["jobs"] == [1, 2] and node["tasks"] == {"1": "1_1", "2": "1_2"}
        cancelled = await harness.ask(
            "POST", "/v1/jobs/1_%5B3-4%5D/cancel", {"command_id": harness.new_id()}, who="alice"
        )
        assert cancelled.status == 200 and cancelled.body["job_id"] == 3
        assert [harness.controller.state.jobs[job].state.name for job in (1, 2, 3, 4)] == [
            "PENDING", "PENDING", "CANCELLED", "CANCELLED",
        ]  # fmt: skip
        held = await harness.ask("POST", "/v1/jobs/1/hold", {"command_id": harness.new_id()}, who="alice")
        assert held.status == 200
        assert {harness.controller.state.jobs[job].hold.name for job in (1, 2)} == {"USER"}


@story
async def test_what_names_no_task_is_refused_in_words(config: Config) -> None:
    async with Harness(config) as harness:
        await ready(harness)
        await harness.submit(script=SCRIPT, array="1-2")
        for path, status, words in (
            ("/v1/jobs/1_9", 404, "no task 9"),
            ("/v1/jobs/1_x", 400, "is not a job ID"),
            ("/v1/jobs/1_%5B1-2%5D", 400, "several tasks"),
            ("/v1/jobs/7", 404, "job 7 does not exist"),
        ):
            answer = await harness.ask("GET", path, who="alice")
            assert answer.status == status and words in answer.sentence


@story
async def test_what_is_said_follows_from_state_to_state_and_is_what_a_walk_says(config: Config) -> None:
    async with Harness(config) as harness:
        await ready(harness)
        verdicts = Verdicts(harness.controller.applied_log)
        built = 0
        for number in range(12):
            await harness.submit(
                script=SCRIPT.replace("10MiB", f"{10 + 7 * number % 40}MiB"), array="1-3" if number % 3 else None
            )
            if number % 4 == 3:
                await harness.ask("POST", f"/v1/jobs/{number}/cancel", {"command_id": harness.new_id()}, who="alice")
            state = harness.controller.state
            before = verdicts._index
            known = await verdicts.verdicts_of(state, state.jobs, harness.work)
            built += verdicts._index is not before
            for job_id in state.jobs:
                assert known.of(job_id) == verdict_of(state, job_id)
                assert known.reason(job_id) == str(verdict_of(state, job_id).reason)
        assert built == 1  # made once, then it followed the ledger
        older = EMPTY
        for applied in await harness.applied():
            if applied.batch is not None and applied.revision <= state.revision - 3:
                older = apply_batch(older, applied.batch) or older
        known = await verdicts.verdicts_of(older, older.jobs, harness.work)
        for job_id in older.jobs:
            assert known.of(job_id) == verdict_of(older, job_id)
        verdicts.drop()
        assert (await verdicts.verdicts_of(state, [1], harness.work)).of(1) == verdict_of(state, 1)


@pytest.mark.parametrize("gap", [0, 3])
@story
async def test_an_index_that_cannot_follow_is_made_anew(
    config: Config, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        await ready(harness)
        monkeypatch.setattr("forebay.cluster.api.render.reasons.FOLLOWED_MAX", gap)
        verdicts = Verdicts(harness.controller.applied_log)
        await harness.submit(script=SCRIPT)
        await verdicts.verdicts_of(harness.controller.state, [1], harness.work)
        first = verdicts._index
        for _ in range(4):
            await harness.submit(script=SCRIPT)
        state = harness.controller.state
        assert (await verdicts.verdicts_of(state, [5], harness.work)).of(5) == verdict_of(state, 5)
        assert verdicts._index is not first
