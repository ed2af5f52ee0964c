"""Reads at a moment of the past: what is answered is what was answered then, to whom it may be told now and then."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.schemas.operations import EXPLAIN_JOB, OPERATIONS
from tests.cluster.api.test_history_service_process import configure, jobs_over, purge
from tests.cluster.harness import PLAIN, Harness, story, until
from tests.contract.day import Repeated, requests
from tests.contract.in_memory import InMemory

THEN = [one for one in OPERATIONS.values() if "at" in one.query and one is not EXPLAIN_JOB]
"""Operations that may be asked about the past."""

WHO = ("operator", "user ada", "user ben")

EVERY = 9
"""After every so many requests of the day all of them are asked, count."""

NOT_OF_THE_STATE = frozenset({"expected_start", "expected_after", "uid", "at"})
"""Fields that come from a clock or from the accounts of a machine."""


def target_of(path: str, replica: InMemory, chance: random.Random) -> str:
    """Return what is asked of an operation; of a job one that is there, or one that is not."""
    return path.replace("{id}", str(chance.choice([*replica.state.jobs, int(replica.state.next_job)])))


def plain(found: Any) -> Any:
    """Return an answer without what is no part of a state."""
    if isinstance(found, dict):
        if isinstance(found.get("error"), dict):
            return found["error"]["code"]
        return {key: plain(value) for key, value in found.items() if key not in NOT_OF_THE_STATE}
    return [plain(one) for one in found] if isinstance(found, list) else found


def test_there_are_reads_of_the_past_for_all_that_is_listed() -> None:
    assert {one.name for one in THEN} == {
        "list_jobs", "show_job", "list_pools", "list_filesystems", "list_buffers", "show_burst", "list_nodes",
        "show_configuration", "show_state_digest",
    }  # fmt: skip


@pytest.mark.campaign(3)
def test_every_read_of_a_moment_is_answered_as_it_was_answered_then() -> None:
    async def run() -> int:
        day, chance, compared = Repeated(), random.Random(1), 0
        replica = day.replica
        for number, line in enumerate(requests()):
            await day.do(line)
            if number % EVERY or not replica.state.revision:
                continue
            # As a follower answers: what agents have just said is no part of any state.
            replica.service.controller.leads = False
            for one in THEN:
                who, target = chance.choice(WHO), target_of(one.path, replica, chance)
                now = await replica.ask(who, "GET", target)
                then = await replica.ask(who, "GET", f"{target}?at={replica.state.revision}")
                assert then.status == now.status, (number, who, target)
                assert plain(then.body) == plain(now.body), (number, who, target)
                compared += now.status == 200
            replica.service.controller.leads = True
        return compared

    assert asyncio.run(run()) > 300


@story
async def test_a_listing_of_a_moment_shows_jobs_pools_and_settings_as_they_were(config: Config) -> None:
    async with Harness(config) as harness:
        await harness.submit(script=PLAIN, hold=True, name="first")
        before, at = int(harness.controller.state.revision), (await harness.ask("GET", "/v1/jobs")).body["revision"]
        assert before == at
        await harness.submit(script=PLAIN, hold=True, name="second")
        await harness.ask("POST", "/v1/jobs/1/cancel", {"command_id": harness.new_id()}, who="alice")
        await configure(harness, "TeardownFailure")
        for who in ("operator", "alice"):
            answer = await harness.ask("GET", f"/v1/jobs?at={before}", who=who)
            assert (answer.status, answer.body["revision"]) == (200, before)
            assert [(job["name"], job["state"]) for job in answer.body["jobs"]] == [("first", "PENDING")]
            assert answer.body["at"] is not None
        assert [job["state"] for job in (await harness.ask("GET", "/v1/jobs")).body["jobs"]] == ["CANCELLED", "PENDING"]
        by_time = await harness.ask("GET", f"/v1/jobs?at={answer.body['at']}")
        assert len(by_time.body["jobs"]) == 1
        assert (await harness.ask("GET", f"/v1/jobs/2?at={before}")).status == 404
        then = (await harness.ask("GET", f"/v1/configuration?at={before}")).body
        assert "TeardownFailure" not in then["text"] and then["revision"] == before
        assert (await harness.ask("GET", f"/v1/configuration?at={before}", who="alice")).status == 403
        text = await harness.ask("GET", f"/v1/burst?format=text&at={before}")
        assert text.status == 200


@pytest.mark.parametrize(
    "at, status, sentence",
    [
        ("999999", 404, "revision 999999 has not happened yet"),
        ("2999-01-01T00:00:00Z", 404, "is in the future"),
        ("yesterday", 400, "at is 'yesterday'"),
        ("0", 400, "at is '0'"),
        ("1e3", 400, "at is '1e3'"),
    ],
)
def test_a_moment_that_is_none_is_refused_by_name(config: Config, at: str, status: int, sentence: str) -> None:
    @story
    async def run() -> None:
        async with Harness(config) as harness:
            for target in ("/v1/jobs", "/v1/pools", "/v1/nodes"):
                answer = await harness.ask("GET", f"{target}?at={at}")
                assert (answer.status, answer.body["error"]["place"]) == (status, "query at")
                assert sentence in answer.body["error"]["sentence"]

    run()


@story
async def test_what_is_private_now_or_was_so_then_is_no_other_user_s_to_see_in_the_past(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 1)
        open_then = int(harness.controller.state.revision)
        await configure(harness, "PrivateData")
        await harness.submit(script=PLAIN, hold=True, workdir="/s3cret")
        private_then = int(harness.controller.state.revision)
        purge(harness.controller, harness, 1)
        await until(lambda: 1 not in harness.controller.state.jobs)

        async def seen(who: str, at: int) -> list[str]:
            rows = (await harness.ask("GET", f"/v1/jobs?at={at}", who=who)).body["jobs"]
            return [row["workdir"] for row in rows]

        assert "(private)" not in await seen("alice", private_then)
        assert await seen("bob", open_then) == ["(private)"], "it was open, and is not now"
        await configure(harness, "")
        assert "(private)" in await seen("bob", private_then), "it was private"
        assert "(private)" not in await seen("bob", open_then)
        assert "(private)" not in await seen("operator", private_then)
