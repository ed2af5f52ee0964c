"""Many commands at once about runs, arrays and buffers: each gets what it would have got by itself."""

from __future__ import annotations

from typing import Any

from forebay.cluster.config.config import Config
from forebay.replica.model.jobs import Hold
from tests.cluster.harness import PLAIN, Harness, story, until


async def all_of(harness: Harness, *commands: dict[str, Any], who: str = "alice") -> list[dict[str, Any]]:
    """Send commands in one request and return their results."""
    body = {"commands": [{"command_id": harness.new_id(), **command} for command in commands]}
    answer = await harness.ask("POST", "/v1/commands", body, who=who)
    assert answer.status == 200, answer
    results: list[dict[str, Any]] = answer.body["results"]
    return results


async def run_one(harness: Harness, cpus: int = 4) -> int:
    """Submit a job and have an agent say that its script runs; return its number."""
    agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": cpus}
    await harness.ask("POST", "/v1/agents/n1/register", agent, who="n1")
    job = int((await harness.submit(script=PLAIN)).body["job_id"])
    await until(lambda: harness.controller.state.jobs[job].state.name == "CONFIGURING")
    report = {
        "command_id": harness.new_id(), "job": job, "attempt": harness.controller.state.jobs[job].attempt,
        "stage": "run",
        "result": {"type": "started"},
    }  # fmt: skip
    await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [report]}, who="n1")
    return job


@story
async def test_runs_are_suspended_resumed_and_requeued_many_at_once(config: Config) -> None:
    async with Harness(config) as harness:
        await until(lambda: harness.controller.state.feature_level >= 1)
        jobs = [await run_one(harness), await run_one(harness)]
        for word, state in (("suspend_job", "SUSPENDED"), ("resume_job", "RUNNING")):
            results = await all_of(harness, *({"type": word, "job_id": job} for job in jobs))
            assert [(result["status"], result["job"]["state"]) for result in results] == [(200, state)] * 2
        results = await all_of(
            harness, {"type": "requeue_job", "job_id": str(jobs[0])}, {"type": "hold_job", "job_id": 99}
        )
        assert [result["status"] for result in results] == [200, 404]
        assert harness.controller.state.jobs[jobs[0]].effective_interruptions.requeueing


@story
async def test_what_cannot_be_done_to_a_run_is_said_in_bulk_as_one_by_one(config: Config) -> None:
    async with Harness(config) as harness:
        job = (await harness.submit(hold=True)).body["job_id"]
        words = {"suspend": "suspend_job", "resume": "resume_job", "requeue": "requeue_job", "clear": "clear_buffer"}
        results = await all_of(harness, *({"type": word, "job_id": job} for word in words.values()), who="operator")
        for result, path in zip(results, words, strict=True):
            alone = await harness.ask("POST", f"/v1/jobs/{job}/{path}", {"command_id": harness.new_id()})
            assert (result["status"], result["error"]) == (alone.status, alone.body["error"])
        (gone,) = await all_of(harness, {"type": "clear_buffer", "name": "lake", "discard": True}, who="operator")
        assert "persistent buffer 'lake' does not exist" in gone["error"]["sentence"]


@story
async def test_only_operators_clear_and_each_clear_names_one_buffer(config: Config) -> None:
    async with Harness(config) as harness:
        job = (await harness.submit(hold=True)).body["job_id"]
        (denied,) = await all_of(harness, {"type": "clear_buffer", "job_id": job})
        assert (denied["status"], denied["error"]["code"]) == (403, "permission_denied")
        neither, both = await all_of(
            harness, {"type": "clear_buffer"}, {"type": "clear_buffer", "job_id": job, "name": "lake"}, who="operator"
        )
        assert neither["status"] == both["status"] == 400
        assert "no buffer is named" in neither["error"]["sentence"]


@story
async def test_tasks_are_named_in_bulk_as_in_a_path_and_listed_by_the_same_words(config: Config) -> None:
    async with Harness(config) as harness:
        await until(lambda: harness.controller.state.feature_level >= 1)
        await harness.submit(array="1-4", hold=True)
        array = harness.controller.state.arrays[1]
        results = await all_of(
            harness,
            {"type": "release_job", "job_id": "1_[1-3]"},
            {"type": "cancel_job", "job_id": "1_2"},
            {"type": "hold_job", "job_id": "1_9"},
            {"type": "hold_job", "job_id": "1_[2"},
        )
        assert [result["status"] for result in results] == [200, 200, 404, 400]
        assert results[1]["job"]["job_id"] == array[2]
        assert (results[3]["error"]["place"], results[3]["error"]["code"]) == ("job_id", "invalid_field")
        jobs = harness.controller.state.jobs
        assert [jobs[array[task]].hold is Hold.USER for task in (1, 2, 3, 4)] == [False, False, False, True]
        assert jobs[array[2]].cancelled

        async def listed(job: str) -> list[int]:
            answer = await harness.ask("GET", f"/v1/jobs?job={job}")
            return [view["details"]["array_task_id"] for view in answer.body["jobs"]]

        assert await listed("1") == [1, 2, 3, 4]
        assert await listed("1_%5B2-3%5D") == [2, 3]
        assert await listed("1_4") == [4]
        by_page = await harness.ask("GET", f"/v1/jobs?job=1&after={array[2]}&limit=1")
        assert [view["job_id"] for view in by_page.body["jobs"]] == [array[3]] and by_page.body["truncated"]
        for job, status, place in (("9", 404, "query job"), ("1_9", 404, "job"), ("x", 400, "query job")):
            answer = await harness.ask("GET", f"/v1/jobs?job={job}")
            assert (answer.status, answer.body["error"]["place"]) == (status, place)


@story
async def test_waiting_jobs_are_changed_in_bulk_as_one_by_one(config: Config) -> None:
    async with Harness(config) as harness:
        await until(lambda: harness.controller.state.feature_level >= 1)
        await harness.submit(array="1-3", hold=True)
        plain = (await harness.submit(hold=True)).body["job_id"]
        results = await all_of(
            harness,
            {"type": "update_job", "job_id": "1_[1-2]", "name": "night"},
            {"type": "update_job", "job_id": plain, "comment": "later", "bb": "capacity=8MiB"},
            {"type": "update_job", "job_id": plain, "bb": "capacity=1XB"},
            {"type": "update_job", "job_id": 99, "name": "none"},
        )
        assert [result["status"] for result in results] == [200, 200, 400, 404]
        assert (results[0]["job"]["name"], results[1]["job"]["job_id"]) == ("night", plain)
        state = harness.controller.state
        assert [state.jobs[state.arrays[1][task]].request.name == "night" for task in (1, 2, 3)] == [True, True, False]
        assert state.buffers[plain].granted_bytes == 8 * 1024**2
        alone = await harness.ask(
            "POST", f"/v1/jobs/{plain}/update", {"command_id": harness.new_id(), "bb": "capacity=1XB"}
        )
        assert (results[2]["status"], results[2]["error"]) == (alone.status, alone.body["error"])
        (denied,) = await all_of(harness, {"type": "update_job", "job_id": plain, "name": "mine"}, who="bob")
        assert denied["status"] == 403


@story
async def test_a_task_that_waits_is_explained_by_what_people_call_it(config: Config) -> None:
    async with Harness(config) as harness:
        await until(lambda: harness.controller.state.feature_level >= 1)
        await harness.submit(array="1-2", hold=True)
        waiting = (await harness.submit(dependencies=["afterok:1"])).body["job_id"]
        why = (await harness.ask("GET", "/v1/jobs/1_2/why")).body
        assert (why["name"], why["job_id"]) == ("1_2", harness.controller.state.arrays[1][2])
        why = (await harness.ask("GET", f"/v1/jobs/{waiting}/why")).body
        assert why["name"] == str(waiting)
        assert why["blocking"] == ["1_1 (held)", "1_2 (held)"]
        assert why["blockers"] == [harness.controller.state.arrays[1][task] for task in (1, 2)]


@story
async def test_a_task_is_called_the_same_in_histories_buffers_and_transfers(config: Config) -> None:
    async with Harness(config) as harness:
        await until(lambda: harness.controller.state.feature_level >= 1)
        agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 4}
        await harness.ask("POST", "/v1/agents/n1/register", agent, who="n1")
        alone = (await harness.submit(script=PLAIN, bb="capacity=8MiB")).body["job_id"]
        await harness.submit(script=PLAIN, bb="capacity=8MiB", array="4-5")
        array = harness.controller.state.arrays[alone + 1]
        await until(lambda: harness.controller.state.buffers[array[5]].state.word == "staging-in")
        names = {alone: None, array[4]: f"{alone + 1}_4", array[5]: f"{alone + 1}_5"}
        for job, name in names.items():
            history = (await harness.ask("GET", f"/v1/jobs/{job}/history")).body
            assert (history["job_id"], history["task"]) == (job, name)
            assert (await harness.ask("GET", f"/v1/transfers/{job}")).body["transfer"]["task"] == name
        for path, field in (("/v1/buffers", "buffers"), ("/v1/transfers", "transfers")):
            rows = (await harness.ask("GET", path)).body[field]
            assert {row["job_id"]: row["task"] for row in rows} == names


@story
async def test_a_job_that_waits_is_shown_with_when_it_should_start_and_what_it_waits_for(config: Config) -> None:
    async with Harness(config) as harness:
        running = await run_one(harness, cpus=1)
        waiting = (await harness.submit(script=PLAIN)).body["job_id"]
        shown = (await harness.ask("GET", f"/v1/jobs/{waiting}")).body
        estimated = (await harness.ask("GET", f"/v1/jobs/{waiting}/estimate")).body
        assert shown["expected_start"] == estimated["start"] is not None
        assert shown["expected_after"] == [step["what"] for step in estimated["steps"]] == ["cpus"]
        shown = (await harness.ask("GET", f"/v1/jobs/{running}")).body
        assert (shown["expected_start"], shown["expected_after"]) == (None, [])
        held = (await harness.submit(script=PLAIN, hold=True)).body["job_id"]
        shown = (await harness.ask("GET", f"/v1/jobs/{held}")).body
        assert (shown["expected_start"], shown["expected_after"]) == (None, ["hold"])
