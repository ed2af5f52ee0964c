"""Accounts, QOS, licences, reservations, rules and estimates over HTTP: as they are written, so they are read."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.replica.grammar.account_limits import LimitTextError, format_limits, parse_limits
from forebay.replica.model.accounts import Limit, LimitKind
from tests.cluster.harness import Harness, story


def sent(harness: Harness, **fields: Any) -> dict[str, Any]:
    return {"command_id": harness.new_id(), **fields}


@story
async def test_what_an_operator_sets_is_listed_and_what_he_deletes_is_gone(config: Config) -> None:
    async with Harness(config) as harness:
        body = {
            "users": ["alan"],
            "limits": {"GrpBB:bb/fast": "10MiB", "MaxJobsPerUser": "4"},
            "user_limits": {"alan": {"MaxBBPerJob:bb/native": "0"}},
        }
        answer = await harness.ask("PUT", "/v1/accounts/a", sent(harness, **body))
        assert answer.status == 200, answer.body
        row = answer.body["accounts"][0]
        assert {key: row[key] for key in body} == body
        for kind, fields in (
            ("qos", {"priority": 5, "limits": {"MinBB:bb/fast": "1KiB"}, "deny_on_limit": True}),
            ("licenses", {"total": 3}),
            ("reservations", {"end": "2100-01-01T00:00:00Z", "users": ["alan"], "burst_buffer": "native:1MiB"}),
        ):
            made = await harness.ask("PUT", f"/v1/{kind}/x", sent(harness, **fields))
            assert made.status == 200, made.body
            (listed,) = (await harness.ask("GET", f"/v1/{kind}")).body[kind]
            assert listed["name"] == "x"
            gone = await harness.ask("POST", f"/v1/{kind}/x/delete", sent(harness))
            assert (gone.status, gone.body[kind]) == (200, [])
        settings = [{"key": "SizePointsPerGiB", "value": "2"}, {"key": "DefaultAccount", "value": "a"}]
        changed = await harness.ask("POST", "/v1/configuration", sent(harness, settings=settings, partial=True))
        assert changed.status == 200, changed.body
        rules = await harness.ask("GET", "/v1/scheduling")
        assert (rules.status, rules.body["size_points_per_gib"], rules.body["default_account"]) == (200, 2, "a")


@story
async def test_a_limit_or_a_space_that_cannot_be_read_is_400_with_its_place(config: Config) -> None:
    async with Harness(config) as harness:
        for kind, fields, place in (
            ("accounts", {"limits": {"GrpBB": "1"}}, "limits"),
            ("accounts", {"limits": {"Nonsense": "1"}}, "limits"),
            ("accounts", {"user_limits": {"eve": {"MaxJobsPerUser": "1"}}}, "user_limits"),
            ("qos", {"limits": {"MaxJobsPerUser": "-1"}}, "limits"),
            ("reservations", {"end": "never", "burst_buffer": "1MiB", "users": ["a"]}, "end"),
            ("reservations", {"end": "2100-01-01T00:00:00Z", "burst_buffer": "lua:1MiB"}, "burst_buffer"),
            ("reservations", {"end": "2100-01-01T00:00:00Z", "burst_buffer": "1XB"}, "burst_buffer"),
        ):
            answer = await harness.ask("PUT", f"/v1/{kind}/x", sent(harness, **fields))
            assert (answer.status, answer.body["error"]["place"]) == (400, place), answer.body
            assert answer.body["error"]["remedy"]


@story
async def test_an_estimate_says_when_and_why(config: Config) -> None:
    async with Harness(config) as harness:
        job = (await harness.submit(hold=True)).body["job_id"]
        answer = await harness.ask("GET", f"/v1/jobs/{job}/estimate")
        assert (answer.status, answer.body["start"], answer.body["steps"][0]["what"]) == (200, None, "hold")
        assert (await harness.ask("GET", "/v1/jobs/999/estimate")).status == 404


def test_limits_are_read_as_they_are_written() -> None:
    limits = (Limit(LimitKind.GRP_BB, "fast", 10 * 1024**4), Limit(LimitKind.GRP_CPUS, "", 7))
    assert format_limits(limits) == {"GrpBB:bb/fast": "10TiB", "GrpCPUs": "7"}
    assert parse_limits(format_limits(limits)) == limits
    with pytest.raises(LimitTextError, match="names no resource"):
        parse_limits({"GrpBB:fast": "1"})
