"""External jobs through the API: what another scheduler asks, what it is told, and what it is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.server import liveness
from tests.cluster.harness import Answer, Harness, story, until

MOVER = {"instance": "i", "storage_id": "s", "cpus": 0, "filesystems": {"bb": "the-one"}}


class Slurm:
    """A bridge of a Slurm, as far as the API sees it."""

    def __init__(self, harness: Harness, cluster: str = "6f1c") -> None:
        self.harness = harness
        self.cluster = cluster

    async def ready(self) -> None:
        """Have pools in a place, an agent that stages for it, and the name of the cluster bound."""
        shared = [(f"pools/{name}/change", {"filesystem": "bb"}) for name in self.harness.controller.state.pools]
        for path, change in (("filesystems/bb/add", {"path": "/bb"}), *shared):
            body = {"command_id": self.harness.new_id(), **change}
            assert (await self.harness.ask("POST", f"/v1/{path}", body, who="operator")).status == 200
        body = {"command_id": self.harness.new_id(), **MOVER}
        assert (await self.harness.ask("POST", "/v1/agents/n1/register", body, who="n1")).status == 200
        body = {"command_id": self.harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 4}
        assert (await self.harness.ask("POST", "/v1/agents/n2/register", body, who="n2")).status == 200
        assert (await self.register()).status == 200

    async def register(self, address: str = "head1") -> Answer:
        body = {"command_id": self.harness.new_id(), "cluster": self.cluster, "address": address}
        return await self.harness.ask("POST", "/v1/scheduler/register", body, who="slurm")

    async def tell(self, what: str, job: str = "42", **fields: Any) -> Answer:
        body = {"command_id": self.harness.new_id(), "cluster": self.cluster, **fields}
        return await self.harness.ask("POST", f"/v1/external-jobs/{job}/{what}", body, who="slurm")

    async def setup(self, job: str = "42", *lines: str, capacity: str = "8MiB pool=fast", **fields: Any) -> Answer:
        script = "\n".join(("#!/bin/sh", f"#BB_LUA jobdw capacity={capacity} access_mode=striped type=scratch", *lines))
        body = {"user": "alice", "uid": 1000, "gid": 1000, "script": script + "\n", **fields}
        return await self.tell("setup", job, **body)

    async def show(self, job: str = "42", query: str = "") -> dict[str, Any]:
        answer = await self.harness.ask("GET", f"/v1/external-jobs/{job}{query}", who="slurm")
        assert answer.status == 200, answer
        found: dict[str, Any] = answer.body
        return found

    async def done(self, stage: str, job: str = "42", **result: Any) -> None:
        """Have the agent report what is ordered for an external job."""
        found = await self.show(job)
        attempt = self.harness.controller.state.jobs[found["job_id"]].attempt
        report = {
            "command_id": self.harness.new_id(),
            "job": found["job_id"],
            "attempt": attempt,
            "stage": stage,
            "result": {"type": "done", "files": 1, "size_bytes": 1, **result},
        }
        answer = await self.harness.ask("POST", "/v1/agents/n1/reports", {"reports": [report]}, who="n1")
        assert answer.body["results"][0]["outcome"] == "accepted", answer


async def phase_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.body["phase"]


@story
async def test_an_external_job_goes_through_its_life_as_its_scheduler_says(config: Config) -> None:
    out = config.file.parent / "out" / "r"
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        answer = await slurm.setup("42", f"#BB_LUA stage_out type=file source=$DW_JOB_STRIPED/r destination={out}")
        assert (answer.status, answer.body["epoch"], answer.body["size"]) == (200, 1, 8 * 2**20)
        assert (await slurm.show(query="?while=waiting&wait_s=5"))["phase"] == "set-up"
        assert (await slurm.tell("stage-in")).body["phase"] == "staging-in"
        waiting = asyncio.ensure_future(slurm.show(query="?while=staging-in&wait_s=30"))
        await slurm.done("stage_in")
        assert (await waiting)["phase"] == "staged-in"
        for what, phase in (("begin-run", "running"), ("end-run", "post-run"), ("stage-out", "staging-out")):
            assert (await slurm.tell(what)).body["phase"] == phase
        await slurm.done("stage_out")
        assert (await slurm.tell("teardown")).body["phase"] == "teardown"
        await slurm.done("teardown")
        assert (await slurm.show())["phase"] == "over"
        history = await harness.ask("GET", "/v1/jobs/slurm:42/history", who="slurm")
        said = [row["sentence"] for row in history.body["rows"]]
        assert said[0] == "slurm:42 was set up, epoch 1, of user alice: it requests 8MiB of pool fast"
        assert "its scheduler began the job" in said


@story
async def test_people_name_an_external_job_as_its_scheduler_does(config: Config) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        assert (await slurm.setup()).status == 200
        assert (await harness.submit(hold=True)).status == 201
        for who in ("alice", "operator"):
            shown = await harness.ask("GET", "/v1/jobs/slurm:42", who=who)
            assert (shown.status, shown.body["external_job"], shown.body["phase"]) == (200, "slurm:42", "set-up")
            why = await harness.ask("GET", "/v1/jobs/slurm:42/why", who=who)
            assert "has not requested its stage-in" in why.body["sentence"]
        listed = await harness.ask("GET", "/v1/jobs?external_jobs=yes", who="alice")
        assert [job["external_job"] for job in listed.body["jobs"]] == ["slurm:42"]
        cancelled = await harness.ask("POST", "/v1/jobs/slurm:42/cancel", {"command_id": harness.new_id()})
        assert (cancelled.status, cancelled.code) == (409, "wrong_state")
        assert "use its scheduler" in cancelled.remedy
        gone = await harness.ask("GET", "/v1/jobs/slurm:43", who="alice")
        assert (gone.status, gone.sentence) == (404, "there is no external job 'slurm:43' in the state")
        estimate = await harness.ask("GET", "/v1/jobs/slurm:42/estimate", who="alice")
        assert (estimate.status, estimate.code) == (409, "wrong_state")


@story
async def test_a_scheduler_looks_at_its_own_external_jobs_and_nothing_else(config: Config) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        assert (await slurm.setup()).status == 200
        job = (await harness.submit(hold=True)).body["job_id"]
        for what in ("/v1/jobs/{}/why", "/v1/jobs/{}/history", "/v1/transfers/{}"):
            assert (await harness.ask("GET", what.format("slurm:42"), who="slurm")).status == 200
            for other in (job, 99_999):
                answer = await harness.ask("GET", what.format(other), who="slurm")
                assert (answer.status, answer.sentence) == (
                    403,
                    "scheduler slurm may read only its own external jobs",
                )


@story
async def test_why_an_external_job_waits_names_the_limit_that_keeps_it(config: Config) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        limited = {"command_id": harness.new_id(), "limits": {"GrpBB:bb/fast": "8MiB"}, "users": ["alice"]}
        default = {"settings": [{"key": "DefaultAccount", "value": "people"}], "partial": True}
        default["command_id"] = harness.new_id()
        for method, path, body in (("PUT", "/v1/accounts/people", limited), ("POST", "/v1/configuration", default)):
            answer = await harness.ask(method, path, body)
            assert answer.status == 200, answer.body
        assert (await slurm.setup()).body["phase"] == "set-up"
        assert (await slurm.setup("43")).body["phase"] == "waiting"
        why = (await harness.ask("GET", "/v1/jobs/slurm:43/why", who="alice")).body
        assert why["reason"] == "AssocGrpBB"
        assert why["sentence"] == "account people has reached a limit (in use 8MiB, asked 8MiB, limit 8MiB)"
        listed = (await harness.ask("GET", "/v1/jobs?external_jobs=yes", who="alice")).body["jobs"]
        assert [job["reason"] for job in listed if job["external_job"] == "slurm:43"] == ["AssocGrpBB"]


@story
async def test_the_free_space_that_a_scheduler_is_told_has_what_lingers_in_it(config: Config) -> None:
    async def free(harness: Harness) -> int:
        site = (await harness.ask("GET", "/v1/scheduler/site", who="slurm")).body
        found: int = next(pool["free"] for pool in site["pools"] if pool["name"] == "fast")
        return found // 2**20

    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        assert await free(harness) == 96
        await slurm.setup()
        assert await free(harness) == 88
        await slurm.tell("stage-in")
        await slurm.done("stage_in")
        assert (await slurm.tell("teardown", hurry=True)).body["phase"] == "lingering"
        assert await free(harness) == 96
        assert (await slurm.setup()).body["phase"] == "set-up"
        assert await free(harness) == 88
        assert (await slurm.setup("43", capacity="96MiB pool=fast")).body.get("phase") == "waiting"
        assert await free(harness) == 0  # whoever comes now would wait behind it
        await slurm.tell("teardown", "43")
        assert await free(harness) == 88
        site = (await harness.ask("GET", "/v1/scheduler/site", who="slurm")).body
        assert (site["setup_wait_s"], site["linger_s"], site["directive"]) == (20, 300, "BB_LUA")


@story
async def test_a_second_cluster_of_the_same_name_is_refused_with_the_address_of_the_first(config: Config) -> None:
    async with Harness(config) as harness:
        await Slurm(harness).ready()
        other = await Slurm(harness, "another").register("head7")
        assert (other.status, other.code) == (403, "permission_denied")
        assert "last seen at head1" in other.sentence
        listed = (await harness.ask("GET", "/v1/schedulers", who="alice")).body["schedulers"]
        assert [(row["scheduler"], row["address"]) for row in listed] == [("slurm", "head1")]
        body = {"command_id": harness.new_id()}
        assert (await harness.ask("POST", "/v1/schedulers/slurm/release", body)).status == 200
        assert (await Slurm(harness, "another").register("head7")).status == 200


@story
async def test_what_is_wrong_in_directives_has_its_line_and_column(config: Config) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        unknown = await slurm.setup(capacity="8MiB pool=fsat")
        assert (unknown.status, unknown.sentence) == (400, "pool 'fsat' does not exist")
        assert unknown.remedy == "use one of: fast, wide"
        size = await slurm.setup(capacity="8XiB")
        assert (size.status, size.place) == (400, "script line 2, column 25")
        root = await slurm.setup(user="root", uid=0)
        assert root.sentence == "User root can not allocate burst buffers"


@story
async def test_a_setup_grants_exactly_the_size_that_its_scheduler_took_off_its_books(config: Config) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        answer = await slurm.setup(capacity="9MiB pool=wide", pool="wide", size=64 * 2**20)
        assert (answer.body["pool"], answer.body["size"]) == ("wide", 64 * 2**20)


@story
async def test_a_listing_of_buffers_has_where_an_external_job_s_lies_for_its_user_and_operators(config: Config) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        await slurm.setup()
        await slurm.tell("stage-in")
        await slurm.done("stage_in")
        path = (await slurm.show())["path"]
        assert path.startswith("/bb/")
        for who, seen in (("alice", path), ("operator", path), ("bob", None)):
            [row] = (await harness.ask("GET", "/v1/buffers", who=who)).body["buffers"]
            assert (row["external_job"], row.get("path")) == ("slurm:42", seen), who


@story
async def test_results_that_are_retained_are_listed_and_exported_again(config: Config) -> None:
    out = config.file.parent / "out" / "r"
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        await slurm.setup("42", f"#BB_LUA stage_out type=file source=$DW_JOB_STRIPED/r destination={out}")
        await slurm.tell("stage-in")
        await slurm.done("stage_in")
        await slurm.tell("begin-run")
        assert (await slurm.tell("teardown")).body["phase"] == "retained"
        listed = (await harness.ask("GET", "/v1/buffers?retained=yes", who="alice")).body["buffers"]
        assert [(row["external_job"], row["phase"]) for row in listed] == [("slurm:42", "retained")]
        assert [row["path"] for row in listed] == [(await slurm.show())["path"]] and listed[0]["path"].startswith("/")
        body = {"command_id": harness.new_id()}
        denied = await harness.ask("POST", "/v1/jobs/slurm:42/export", body, who="bob")
        assert denied.status == 403
        body = {"command_id": harness.new_id()}
        assert (await harness.ask("POST", "/v1/jobs/slurm:42/export", body, who="alice")).status == 200
        await slurm.done("stage_out")
        assert (await slurm.show())["phase"] == "teardown"


@story
async def test_questions_that_wait_are_bounded_for_each_scheduler(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "EXTERNAL_JOB_POLLS_PER_SCHEDULER_MAX", 2)
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        await slurm.setup()
        watch = harness.controller.external_jobs
        waiting = [asyncio.ensure_future(slurm.show(query="?while=set-up&wait_s=30")) for _ in range(2)]
        await until(lambda: not watch.has_room("slurm"))
        refused = await harness.ask("GET", "/v1/external-jobs/42?while=set-up&wait_s=30", who="slurm")
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        await slurm.tell("stage-in")
        assert [(await one)["phase"] for one in waiting] == ["staging-in", "staging-in"]
        await until(lambda: watch.has_room("slurm"))


@story
async def test_a_question_that_waits_is_answered_in_time_and_by_who_leads(config: Config) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        await slurm.setup()
        assert (await slurm.show(query="?while=set-up&wait_s=1"))["phase"] == "set-up"
        waiting = asyncio.ensure_future(harness.ask("GET", "/v1/external-jobs/42?while=set-up&wait_s=30", who="slurm"))
        await until(lambda: bool(harness.controller.external_jobs._waiting))
        harness.engine.depose()
        assert (await waiting).status in (307, 503)


@story
async def test_a_command_is_answered_when_its_wait_is_over(config: Config) -> None:
    out = config.file.parent / "out" / "r"
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        answer = await slurm.setup("42", f"#BB_LUA stage_out type=file source=$DW_JOB_STRIPED/r destination={out}")
        assert answer.status == 200
        for what, during, stage, after in (
            ("stage-in?while=set-up,staging-in&wait_s=30", "staging-in", "stage_in", "staged-in"),
            ("begin-run", "", "", "running"),
            ("stage-out?while=post-run,staging-out&wait_s=30", "staging-out", "stage_out", "teardown"),
            ("teardown?while=teardown&wait_s=30", "teardown", "teardown", "over"),
        ):
            waiting = asyncio.ensure_future(slurm.tell(what))
            if stage:
                await until(lambda: bool(harness.controller.external_jobs._waiting))
                assert not waiting.done() and (await slurm.show())["phase"] == during
                await slurm.done(stage)
            assert await phase_of(await waiting) == (200, after)


@story
async def test_a_command_that_was_settled_is_a_success_whatever_becomes_of_its_wait(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()
        await slurm.setup()
        refused = await slurm.tell("stage-in?while=asleep&wait_s=5")
        assert (refused.status, refused.place) == (400, "query while")
        assert (await slurm.show())["phase"] == "set-up", "what is refused changes nothing"
        assert await phase_of(await slurm.tell("stage-in?while=staging-in&wait_s=1")) == (200, "staging-in")
        monkeypatch.setattr(liveness, "EXTERNAL_JOB_POLLS_PER_SCHEDULER_MAX", 0)
        assert await phase_of(await slurm.tell("stage-in?while=staging-in&wait_s=30")) == (200, "staging-in")
        monkeypatch.setattr(liveness, "EXTERNAL_JOB_POLLS_PER_SCHEDULER_MAX", 1)
        waiting = asyncio.ensure_future(slurm.tell("stage-in?while=staging-in&wait_s=30"))
        await until(lambda: bool(harness.controller.external_jobs._waiting))
        harness.engine.depose()
        assert await phase_of(await waiting) == (200, "staging-in")


@story
async def test_a_persistent_buffer_is_made_used_and_removed_for_the_user_whom_a_scheduler_names(
    config: Config,
) -> None:
    async with Harness(config) as harness:
        slurm = Slurm(harness)
        await slurm.ready()

        async def ask(what: str, **fields: Any) -> Answer:
            body = {"command_id": harness.new_id(), "cluster": "6f1c", "user": "alice", "uid": 1000, "gid": 1000}
            return await harness.ask("POST", f"/v1/persistent/lake/{what}", {**body, **fields}, who="slurm")

        async def report(stage: str, **result: Any) -> None:
            [order] = harness.controller.state.unfinished
            report = {
                "command_id": harness.new_id(), "job": order, "stage": stage,
                "attempt": harness.controller.state.jobs[order].attempt,
                "result": {"type": "done", "files": 0, "size_bytes": 0, **result},
            }  # fmt: skip
            answer = await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [report]}, who="n1")
            assert answer.body["results"][0]["outcome"] == "accepted", answer

        wanted = {"pool": "fast", "size": 8 * 2**20}
        refused = await ask("make", **wanted)
        assert refused.status == 403 and "Flags=EnablePersistent" in refused.remedy
        settings = [{"key": "Flags", "value": "EnablePersistent"}]
        body = {"command_id": harness.new_id(), "settings": settings, "partial": True}
        assert (await harness.ask("POST", "/v1/configuration", body, who="operator")).status == 200
        too_much = await ask("make", pool="fast", size=2**50)
        assert too_much.status in (400, 409), too_much
        asked = await ask("make", **wanted)
        assert (asked.status, asked.body["under_way"]) == (200, "make")
        await until(lambda: "lake" in harness.controller.state.persistent)
        await report("stage_in")
        made = await ask("make", **wanted)
        assert (made.body["state"], made.body["user"], made.body["size"]) == ("allocated", "alice", 8 * 2**20)
        listed = await harness.ask("GET", "/v1/persistent", who="slurm")
        assert [row["name"] for row in listed.body["buffers"]] == ["lake"]
        assert listed.body["buffers"][0]["path"].startswith("/bb/")
        other = await ask("remove", user="bob", uid=1001)
        assert (other.status, other.code) == (403, "permission_denied")
