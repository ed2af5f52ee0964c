"""The configuration and live pools through the API: operators only, one entry, dry runs, and who sees what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.replica.messages.events import SiteConfigured
from forebay.replica.state.digest import state_digest
from tests.cluster.harness import Answer, Harness, story, until

CONF = "/v1/configuration"
DIFF = "/v1/configuration/diff"


def settings(**values: str) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": value, "file": "burst_buffer.conf", "line": line, "column": len(key) + 2}
        for line, (key, value) in enumerate(values.items(), start=1)
    ]


async def configure(harness: Harness, who: str = "operator", **values: str) -> Answer:
    return await harness.ask("POST", CONF, {"command_id": harness.new_id(), "settings": settings(**values)}, who=who)


def value_of(answer: Answer, key: str) -> str:
    return str(next(row["value"] for row in answer.body["settings"] if row["key"] == key))


@story
async def test_a_configuration_is_applied_in_one_entry_shown_and_survives_a_restart(config: Config) -> None:
    async with Harness(config) as harness:
        shown = await harness.ask("GET", CONF)
        assert (shown.body["changed_revision"], value_of(shown, "Flags")) == (0, "DisablePersistent")
        before = harness.controller.state.revision
        applied = await configure(harness, AllowUsers="alice,bob", StageInTimeout="600", Flags="PrivateData")
        assert applied.status == 200, applied
        assert applied.body["changed_revision"] == before + 1
        assert value_of(applied, "StageInTimeout") == "600" and value_of(applied, "DefaultPool") == "fast"
        assert applied.body["burst_buffer_conf"].startswith(
            "AllowUsers=alice,bob\nDefaultPool=fast\nFlags=PrivateData\nStageInTimeout=600\n# of Forebay: "
        )
        found = [
            entry.events
            for row in await harness.applied()
            if row.batch is not None
            for entry in row.batch.entries
            if entry.command == "configure_site"
        ]
        assert [[type(event) for event in events] for events in found] == [[SiteConfigured]]
        await harness.ask("POST", "/v1/snapshots")
        await harness.restart()
        again = await harness.ask("GET", CONF)
        assert again.body["text"] == applied.body["text"]
        assert again.body["changed_revision"] == applied.body["changed_revision"]


@story
async def test_a_dry_run_says_what_would_change_or_why_it_would_be_refused_and_changes_nothing(config: Config) -> None:
    async with Harness(config) as harness:
        before = state_digest(harness.controller.state)
        answer = await harness.ask("POST", DIFF, {"settings": settings(OtherTimeout="9", DefaultPool="wide")})
        assert answer.status == 200, answer
        assert answer.body["differences"] == [
            {"key": "DefaultPool", "before": "fast", "after": "wide"},
            {"key": "OtherTimeout", "before": "300", "after": "9"},
        ]
        refused = await harness.ask("POST", DIFF, {"settings": settings(StageInTimeout="60", DefaultPool="ssd")})
        assert (refused.status, refused.code) == (400, "unknown_pool")
        assert refused.body["error"]["place"] == "burst_buffer.conf line 2, column 13"
        assert state_digest(harness.controller.state) == before


@story
async def test_a_change_based_on_an_older_revision_is_refused_and_a_retry_gets_the_first_answer(config: Config) -> None:
    async with Harness(config) as harness:
        seen = (await harness.ask("POST", DIFF, {"settings": []})).body["revision"]
        body = {"command_id": harness.new_id(), "settings": settings(OtherTimeout="9"), "expect_revision": seen}
        first = await harness.ask("POST", CONF, body)
        again = await harness.ask("POST", CONF, body)
        assert (first.status, again.status) == (200, 200)
        assert first.body["changed_revision"] == again.body["changed_revision"]
        later = {"command_id": harness.new_id(), "settings": settings(OtherTimeout="8"), "expect_revision": seen}
        refused = await harness.ask("POST", CONF, later)
        assert (refused.status, refused.code) == (409, "wrong_state")
        assert f"changed at revision {first.body['changed_revision']}" in refused.sentence
        assert harness.controller.state.site.other_timeout_s == 9


@pytest.mark.parametrize("who", ["alice", "n1"])
@story
async def test_only_operators_see_and_change_configuration_and_pools(config: Config, who: str) -> None:
    async with Harness(config) as harness:
        revision = harness.controller.state.revision
        answers = [
            await harness.ask("GET", CONF, who=who),
            await harness.ask("POST", DIFF, {"settings": []}, who=who),
            await configure(harness, who, OtherTimeout="9"),
            await harness.ask("POST", "/v1/pools/x/add", {"command_id": harness.new_id(), "quantity": "1"}, who=who),
            await harness.ask("POST", "/v1/pools/fast/change", {"command_id": harness.new_id()}, who=who),
            await harness.ask("POST", "/v1/pools/fast/remove", {"command_id": harness.new_id()}, who=who),
        ]
        assert {answer.status for answer in answers} == {403}
        assert harness.controller.state.revision == revision


@pytest.mark.parametrize(
    "body",
    [
        {"settings": [{"key": "OtherTimeout", "value": "9", "extra": 1}]},
        {"settings": [{"key": "k" * 65, "value": "9"}]},
        {"settings": [{"key": "OtherTimeout", "value": "9"}] * 257},
        {"settings": [{"key": "OtherTimeout", "value": 9}]},
        {"settings": [], "expect_revision": -1},
        {"settings": [], "partially": True},
    ],
)
@story
async def test_what_is_malformed_is_refused_before_anything_is_decided(config: Config, body: dict[str, Any]) -> None:
    async with Harness(config) as harness:
        answer = await harness.ask("POST", CONF, {"command_id": harness.new_id(), **body})
        assert answer.status == 400, answer
        assert not harness.controller.state.site.revision


# Pools ----------------------------------------------------------------------------------------------------------------


async def pool(harness: Harness, name: str, what: str, **body: Any) -> Answer:
    return await harness.ask("POST", f"/v1/pools/{name}/{what}", {"command_id": harness.new_id(), **body})


@story
async def test_a_pool_is_added_resized_drained_and_removed_while_the_cluster_runs(config: Config) -> None:
    async with Harness(config) as harness:
        added = await pool(harness, "tape", "add", quantity="1.5TB", granularity="1GB")
        assert (added.status, added.body["quantity_bytes"], added.body["granularity_bytes"]) == (
            200,
            15 * 10**11,
            10**9,
        )
        resized = await pool(harness, "tape", "change", quantity="2TB")
        assert resized.body["quantity_bytes"] == 2 * 10**12
        drained = await pool(harness, "tape", "change", out_of_service="all")
        assert (drained.body["free_bytes"], drained.body["out_of_service_bytes"]) == (0, 2 * 10**12)
        assert (await pool(harness, "tape", "change", out_of_service="0")).body["free_bytes"] == 2 * 10**12
        assert (await pool(harness, "tape", "change", default=True)).body["is_default"]
        removed = await pool(harness, "tape", "remove")
        assert (removed.status, [row["name"] for row in removed.body["pools"]]) == (200, ["fast", "wide"])
        assert (await pool(harness, "tape", "remove")).code == "unknown_pool"


@story
async def test_a_pool_that_shrinks_below_what_is_in_use_says_so_and_cannot_be_removed(config: Config) -> None:
    async with Harness(config) as harness:
        agent = {"command_id": harness.new_id(), "instance": "i1", "storage_id": "s1", "cpus": 4}
        assert (await harness.ask("POST", "/v1/agents/n1/register", agent, who="n1")).status == 200
        submitted = await harness.submit()
        job = submitted.body["job_id"]
        await until(lambda: harness.controller.state.held_bytes.get("fast", 0) > 0)
        shrunk = await pool(harness, "fast", "change", quantity="8MiB")
        assert (shrunk.body["held_bytes"], shrunk.body["free_bytes"]) == (16 * 2**20, 0)
        assert shrunk.body["overcommitted_bytes"] == 8 * 2**20
        refused = await pool(harness, "fast", "remove")
        assert refused.status == 409 and f"job {job} of alice holds 16MiB" in refused.sentence


@story
async def test_a_pool_may_count_nodes(config: Config) -> None:
    async with Harness(config) as harness:
        added = await pool(harness, "nodes", "add", quantity="40N", granularity="1N", unit="nodes")
        assert (added.body["quantity_bytes"], added.body["unit"]) == (40, "nodes")
        refused = await pool(harness, "nodes", "change", quantity="40GiB")
        assert (refused.status, refused.code) == (400, "invalid_capacity")
        assert refused.body["error"]["place"] == "quantity column 1"
        assert (await pool(harness, "nodes", "change", quantity="0")).body["quantity_bytes"] == 0
        assert (await pool(harness, "nodes", "change", unit="tapes")).status == 400


# Who sees what --------------------------------------------------------------------------------------------------------


@story
async def test_with_private_data_users_see_their_own_buffers_and_operators_all(config: Config) -> None:
    async with Harness(config) as harness:
        for who in ("alice", "bob"):
            answer = await harness.ask("POST", "/v1/jobs", harness.job(), who=who)
            assert answer.status == 201, answer

        async def users(path: str, key: str, who: str) -> list[str]:
            return [row["user"] for row in (await harness.ask("GET", path, who=who)).body[key]]

        assert await users("/v1/buffers", "buffers", "alice") == ["alice", "bob"]
        assert (await configure(harness, Flags="PrivateData")).status == 200
        assert await users("/v1/buffers", "buffers", "alice") == ["alice"]
        assert await users("/v1/buffers", "buffers", "bob") == ["bob"]
        assert await users("/v1/buffers", "buffers", "operator") == ["alice", "bob"]
        jobs = (await harness.ask("GET", "/v1/jobs", who="alice")).body["jobs"]
        assert [(row["user"], row["burst_buffer"] is None, row["capacity_bytes"] > 0) for row in jobs] == [
            ("alice", False, True),
            ("bob", True, False),
        ]
        shown = await harness.ask("GET", "/v1/jobs/2", who="alice")
        assert shown.status == 200 and shown.body["pool"] is None
        assert (await harness.ask("GET", "/v1/jobs/2", who="bob")).body["pool"] == "fast"
        for path in ("/v1/jobs/2/history", "/v1/jobs/2/why", "/v1/jobs/2/estimate"):
            refused = await harness.ask("GET", path, who="alice")
            assert (refused.status, refused.code) == (403, "permission_denied")
            for who in ("bob", "operator"):
                assert (await harness.ask("GET", path, who=who)).status == 200
        assert (await harness.ask("GET", "/v1/transfers", who="alice")).status == 200


@story
async def test_with_private_data_the_stream_of_events_tells_others_only_that_something_happened(config: Config) -> None:
    async with Harness(config) as harness:
        assert (await configure(harness, Flags="PrivateData")).status == 200
        for who in ("alice", "bob"):
            assert (await harness.ask("POST", "/v1/jobs", harness.job(), who=who)).status == 201

        async def details(who: str) -> dict[int, bool]:
            found: dict[int, bool] = {}
            async with harness.session(who).get(harness.url + "/v1/events?from=0") as response:
                async for raw in response.content:
                    if raw.startswith(b"data: "):
                        event = json.loads(raw[6:])
                        if event["event"] == "job_submitted":
                            found[event["job_id"]] = bool(event["detail"])
                    if len(found) == 2:
                        return found
            raise AssertionError("the stream ended early")

        assert await details("alice") == {1: True, 2: False}
        assert await details("bob") == {1: False, 2: True}
        assert await details("operator") == {1: True, 2: True}


@story
async def test_the_lists_of_users_are_enforced_through_the_api_with_slurms_sentence(config: Config) -> None:
    async with Harness(config) as harness:
        assert (await configure(harness, DenyUsers="bob:mallory")).status == 200
        assert (await harness.submit()).status == 201
        refused = await harness.ask("POST", "/v1/jobs", harness.job(), who="bob")
        assert (refused.status, refused.code) == (403, "permission_denied")
        assert refused.sentence == "User found in DenyUsers"
