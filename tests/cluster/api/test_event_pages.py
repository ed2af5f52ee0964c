"""What happened, who led and what differs, over the API: to whom it is told, and in which stretches."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.schemas.event_kinds import kind_name
from forebay.replica.messages import EVENTS
from tests.cluster.api.test_agents import register
from tests.cluster.api.test_history_service_process import configure, jobs_over, purge
from tests.cluster.harness import PLAIN, Harness, story, until


async def told(harness: Harness, query: str, who: str = "operator") -> list[dict[str, Any]]:
    answer = await harness.ask("GET", f"/v1/history?{query}", who=who)
    assert answer.status == 200, answer.body
    assert answer.body["read"] == answer.body["last"]
    rows: list[dict[str, Any]] = answer.body["rows"]
    return rows


async def changed(harness: Harness, query: str, who: str = "operator") -> dict[tuple[str, str], dict[str, Any]]:
    answer = await harness.ask("GET", f"/v1/diff?{query}", who=who)
    assert answer.status == 200, answer.body
    return {(one["kind"], one["name"]): one for one in answer.body["changes"]}


async def add_pool(harness: Harness, name: str, quantity: str) -> Any:
    body = {"command_id": harness.new_id(), "quantity": quantity, "granularity": "1MiB"}
    return await harness.ask("POST", f"/v1/pools/{name}/add", body)


@story
async def test_who_changed_a_pool_and_what_was_refused_is_told_by_name(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 2)
        assert (await add_pool(harness, "slow", "8MiB")).status == 200
        assert (await add_pool(harness, "slow", "9MiB")).status == 409
        refused = await harness.ask("POST", "/v1/jobs/77/hold", {"command_id": harness.new_id()}, who="alice")
        assert refused.status == 404
        (row,) = await told(harness, "of=pool&name=slow")
        assert (row["actor"], row["event"], row["job_id"]) == ("operator", "pool_set", None)
        rows = await told(harness, "kind=rejected")
        assert [(row["actor"], row["command"]) for row in rows][-2:] == [
            ("operator", "change_pool"),
            ("user alice", "hold_job"),
        ]
        assert all(row["sentence"] and row["remedy"] for row in rows)
        mine = await told(harness, "job=2&kind=job_submitted,job_cancelled")
        assert [(row["job_id"], row["event"], row["user"]) for row in mine] == [
            (2, "job_submitted", "alice"),
            (2, "job_cancelled", "alice"),
        ]
        assert len(await told(harness, "actor=user%20alice")) == len(await told(harness, "actor=alice")) > 8
        assert await told(harness, "account=none&from=1") == []


@story
async def test_an_event_has_the_same_place_in_its_command_whatever_was_asked_for(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        await harness.submit()
        await until(lambda: bool(harness.controller.state.jobs[1].attempt))
        await register(harness, "n1", "another")
        kinds = [kind_name(kind) for kind in EVENTS]
        whole = await told(harness, "kind=" + ",".join(kinds))
        places = {(row["revision"], row["sequence"]): row["event"] for row in whole}
        assert len(places) == len(whole) and {sequence for _, sequence in places} > {0}
        for kind in kinds:
            rows = await told(harness, f"kind={kind}")
            assert {(row["revision"], row["sequence"]) for row in rows} == {
                place for place, event in places.items() if event == kind
            }, kind


@story
async def test_a_history_in_stretches_of_one_command_is_the_one_in_one_go(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 2)
        whole = await told(harness, "from=3")
        assert whole[0]["revision"] == 3
        for query in ("", "job=1&", "kind=rejected&", "of=node&"):
            found, read = [], 2
            while True:
                answer = (await harness.ask("GET", f"/v1/history?{query}limit=1&after={read}")).body
                found += answer["rows"]
                if answer["read"] >= answer["last"]:
                    break
                assert answer["read"] > read and len({row["revision"] for row in answer["rows"]}) <= 1
                read = answer["read"]
            assert found == await told(harness, f"{query}from=3")
        last = whole[-1]["at"]
        assert await told(harness, f"from={last}") == [row for row in whole if row["at"] >= last]
        first = whole[0]["at"]
        assert [row for row in await told(harness, f"to={first}") if row["revision"] >= 3] == [
            row for row in whole if row["at"] <= first
        ]


@story
async def test_what_is_private_is_not_told_to_others_nor_what_they_were_refused(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 1)
        await harness.ask("POST", "/v1/jobs/78/hold", {"command_id": harness.new_id()}, who="alice")
        before = int(harness.controller.state.revision)

        async def jobs(who: str) -> set[int | None]:
            return {row["job_id"] for row in await told(harness, "", who)}

        assert 1 in await jobs("bob"), "it is open to all"
        assert await told(harness, "kind=rejected", "bob") == []
        assert len(await told(harness, "kind=rejected", "alice")) == 1
        await configure(harness, "PrivateData")
        await harness.submit(script=PLAIN, hold=True)
        assert 1 in await jobs("alice") and 1 in await jobs("operator")
        assert await jobs("bob") == {None}
        assert ("job", "2") in await changed(harness, f"from={before}", "alice")
        assert ("job", "2") not in await changed(harness, f"from={before}", "bob")
        assert ("site", "") in await changed(harness, f"from={before}")
        assert ("site", "") not in await changed(harness, f"from={before}", "alice")
        purge(harness.controller, harness, 1)
        await until(lambda: 1 not in harness.controller.state.jobs)
        assert 1 in await jobs("alice") and 1 not in await jobs("bob"), "it is private when it is purged, too"


@story
async def test_a_difference_says_what_each_field_was_and_who_changed_it(config: Config) -> None:
    async with Harness(config) as harness:
        await harness.submit(script=PLAIN, hold=True)
        before = int(harness.controller.state.revision)
        assert await changed(harness, f"from={before}") == {}
        await harness.ask("POST", "/v1/jobs/1/cancel", {"command_id": harness.new_id()}, who="alice")
        await harness.submit(script=PLAIN, hold=True)
        await add_pool(harness, "slow", "8MiB")
        found = await changed(harness, f"from={before}")
        assert found["job", "1"]["fields"]["state"] == ["pending", "cancelled"]
        assert (found["job", "1"]["actor"], found["job", "1"]["command"]) == ("user alice", "cancel_job")
        assert (found["job", "2"]["change"], found["pool", "slow"]["change"]) == ("new", "new")
        assert found["pool", "slow"]["actor"] == "operator"
        assert set(await changed(harness, f"from={before}&job=2")) == {("job", "2")}
        assert set(await changed(harness, f"from={before}&of=pool")) == {("pool", "slow")}
        body = (await harness.ask("GET", f"/v1/diff?from={before}&limit=1")).body
        assert body["more"] and len(body["changes"]) == 1
        text = str(await changed(harness, "from=1"))
        assert "echo" not in text and "environment" not in text, "scripts and environments are nobody else's"


@pytest.mark.parametrize(
    "target, place, sentence",
    [
        ("/v1/history?from=yesterday", "query from", "from is 'yesterday'"),
        ("/v1/history?to=999999", "query to", "has not happened yet"),
        ("/v1/history?kind=pool_sett", "query kind", "no event is named 'pool_sett'"),
        ("/v1/history?of=cloud", "query of", "of is 'cloud'"),
        ("/v1/history?name=fast", "query name", "name is given without of"),
        ("/v1/history?job=1&of=pool", "query of", "exclude each other"),
        ("/v1/history?limit=0", "query limit", "limit is '0'"),
        ("/v1/history/leaders?limit=many", "query limit", "limit is 'many'"),
        ("/v1/diff", "query from", "the start of the period is missing"),
        ("/v1/diff?from=2&to=1", "query from", "is after the end"),
    ],
)
def test_a_question_about_the_past_that_is_none_is_refused_by_name(
    config: Config, target: str, place: str, sentence: str
) -> None:
    @story
    async def run() -> None:
        async with Harness(config) as harness:
            await jobs_over(harness, 1)
            error = (await harness.ask("GET", target)).body["error"]
            assert error["place"] == place and sentence in error["sentence"] and error["remedy"]

    run()


@story
async def test_who_led_is_told_with_how_long_nobody_did(config: Config) -> None:
    async with Harness(config) as harness:
        await harness.submit(script=PLAIN, hold=True)
        harness.engine.lead()
        await until(lambda: harness.controller.leads)
        await harness.submit(script=PLAIN, hold=True)
        terms = (await harness.ask("GET", "/v1/history/leaders")).body["terms"]
        assert [term["leader"] for term in terms[-2:]] == ["r1", "r1"]
        assert terms[-1]["term"] == terms[-2]["term"] + 1 and terms[-1]["silent_s"] >= 0
        assert terms[-1]["first_index"] == terms[-2]["last_index"] + 1
        assert len((await harness.ask("GET", "/v1/history/leaders?limit=1")).body["terms"]) == 1
