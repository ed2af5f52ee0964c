"""Partitions, usage and changes of waiting jobs over HTTP: as they are written, so they are read, and who may."""

from __future__ import annotations

from typing import Any

from forebay.cluster.api.render.events import as_json, sentence_of
from forebay.cluster.config.config import Config
from forebay.replica.messages import events as e
from forebay.replica.model.requests import Dependency, DependencyKind, JobChange
from forebay.replica.values.units import NEVER
from tests.cluster.harness import Harness, story


def sent(harness: Harness, **fields: Any) -> dict[str, Any]:
    return {"command_id": harness.new_id(), **fields}


@story
async def test_a_partition_is_listed_as_it_was_set_and_gone_when_it_is_deleted(config: Config) -> None:
    async with Harness(config) as harness:
        body = {
            "nodes": "n[1-3],x7",
            "state": "DRAIN",
            "default": True,
            "max_time_s": 3600,
            "min_nodes": 0,
            "max_nodes": 1,
            "users": ["alice"],
            "accounts": ["physics"],
        }
        answer = await harness.ask("PUT", "/v1/partitions/batch", sent(harness, **body))
        assert answer.status == 200, answer.body
        (row,) = answer.body["partitions"]
        assert {key: row[key] for key in body} == body and row["name"] == "batch"
        every = await harness.ask("PUT", "/v1/partitions/all-of-it", sent(harness, nodes="ALL", default=True))
        listed = {row["name"]: row for row in every.body["partitions"]}
        assert (listed["all-of-it"]["nodes"], listed["all-of-it"]["max_time_s"]) == ("ALL", None)
        assert [name for name, row in listed.items() if row["default"]] == ["all-of-it"]
        gone = await harness.ask("POST", "/v1/partitions/batch/delete", sent(harness))
        assert [row["name"] for row in gone.body["partitions"]] == ["all-of-it"]
        assert (await harness.ask("GET", "/v1/partitions", who="alice")).body["partitions"] == gone.body["partitions"]


@story
async def test_a_partition_that_cannot_be_is_400_with_its_place(config: Config) -> None:
    async with Harness(config) as harness:
        for fields, place in (
            ({"nodes": "n[3-1]"}, "nodes"),
            ({"nodes": "n1", "max_time_s": 0}, "max_time_s"),
            ({"nodes": "n1", "max_nodes": -1}, "partition.max_nodes"),
            ({"state": "SIDEWAYS"}, "state"),
            ({"users": ["a b"]}, "partition.users"),
        ):
            answer = await harness.ask("PUT", "/v1/partitions/x", sent(harness, **fields))
            assert (answer.status, answer.body["error"]["place"]) == (400, place), answer.body


@story
async def test_a_waiting_job_is_changed_as_it_is_asked_and_shows_it(config: Config) -> None:
    async with Harness(config) as harness:
        await harness.ask("PUT", "/v1/qos/high", sent(harness))
        await harness.ask("PUT", "/v1/partitions/p", sent(harness))
        first = (await harness.submit(hold=True)).body["job_id"]
        job = (await harness.submit(hold=True)).body["job_id"]
        change = {
            "name": "another",
            "time_limit_s": 30,
            "nice": 5,
            "qos": "high",
            "partition": "p",
            "comment": "why not",
            "begin_at": "2100-01-01T00:00:00Z",
            "deadline": "2100-02-01T00:00:00Z",
            "dependencies": [f"afterok:{first}", "singleton"],
            "dependency_any": True,
            "requeue": False,
            "mail_types": ["end"],
            "bb": "capacity=5MiB pool=fast",
        }
        answer = await harness.ask("POST", f"/v1/jobs/{job}/update", sent(harness, **change))
        assert answer.status == 200, answer.body
        shown = (await harness.ask("GET", f"/v1/jobs/{job}")).body
        details = shown["details"]
        assert (shown["name"], shown["time_limit_s"], shown["capacity_bytes"]) == ("another", 30, 8 * 2**20)
        assert shown["dependencies"] == [f"afterok:{first}"] and details["singleton"] and details["dependency_any"]
        assert (details["qos"], details["partition"], details["comment"]) == ("high", "p", "why not")
        assert (details["nice"], details["requeue"], details["mail_types"]) == (5, False, ["end"])
        assert (shown["eligible_time"][:4], details["deadline"][:7]) == ("2100", "2100-02")
        cleared = {"qos": "", "comment": "", "deadline": "", "begin_at": "", "dependencies": []}
        answer = await harness.ask("POST", f"/v1/jobs/{job}/update", sent(harness, **cleared))
        details = answer.body["details"]
        assert (details["qos"], details["comment"], details["deadline"]) == (None, None, None)
        assert answer.body["dependencies"] == [] and not details["singleton"] and not details["dependency_any"]
        history = (await harness.ask("GET", f"/v1/jobs/{job}/history")).body
        words = str(history)
        assert "changed: name another; time_limit_s 30" in words and "its request is now 8MiB of pool fast" in words


@story
async def test_a_change_that_is_refused_names_its_place_and_changes_nothing(config: Config) -> None:
    async with Harness(config) as harness:
        job = (await harness.submit(hold=True, user="alice")).body["job_id"]
        before = harness.controller.state.jobs[job]
        for fields, who, status, place in (
            ({"time_limit_s": 9999}, "alice", 403, "time_limit_s"),
            ({"bb": "capacity=9999GiB pool=fast"}, "alice", 400, "--bb line 1, column 1"),
            ({"bb": "capacity=nonsense"}, "alice", 400, None),
            ({"bb": " "}, "alice", 400, "--bb"),
            ({"bbf": "nothing of the kind\n"}, "alice", 400, None),
            ({"begin_at": "soon"}, "alice", 400, "begin_at"),
            ({"dependencies": ["often:1"]}, "alice", 400, "dependencies"),
            ({"dependency_any": True}, "alice", 400, "dependencies"),
            ({"licenses": ["a:0"]}, "alice", 400, "licenses"),
            ({"colour": "blue"}, "alice", 400, "colour"),
        ):
            answer = await harness.ask("POST", f"/v1/jobs/{job}/update", sent(harness, **fields), who=who)
            found = answer.body["error"]["place"]
            assert answer.status == status and (place is None or found == place), (fields, answer.body)
        assert harness.controller.state.jobs[job] == before
        assert (await harness.ask("POST", "/v1/jobs/99/update", sent(harness, name="x"))).status == 404


@story
async def test_one_of_several_dependencies_is_asked_for_at_submit(config: Config) -> None:
    async with Harness(config) as harness:
        first = (await harness.submit(hold=True)).body["job_id"]
        second = (await harness.submit(hold=True)).body["job_id"]
        wanted = [f"afterok:{first}", f"afterany:{second}"]
        job = (await harness.submit(dependencies=wanted, dependency_any=True)).body["job_id"]
        why = (await harness.ask("GET", f"/v1/jobs/{job}/why")).body
        assert why["reason"] == "Dependency" and f"afterok:{first}?afterany:{second}" in str(why)


@story
async def test_usage_is_listed_each_for_himself_where_data_is_private_and_reset_by_name(config: Config) -> None:
    async with Harness(config) as harness:
        answer = await harness.ask("GET", "/v1/usage")
        assert (answer.status, answer.body["usage"]) == (200, [])
        for fields in ({}, {"account": "a", "qos": "q"}):
            refused = await harness.ask("POST", "/v1/usage/reset", sent(harness, **fields))
            assert (refused.status, refused.body["error"]["place"]) == (400, "account")
        unknown = await harness.ask("POST", "/v1/usage/reset", sent(harness, qos="none"))
        assert (unknown.status, unknown.body["error"]["place"]) == (400, "qos")


def test_only_what_is_changed_of_a_job_is_told() -> None:
    change = JobChange(
        comment="x", licenses=(("a", 2),), dependencies=(Dependency(DependencyKind.AFTER_OK, 7),), deadline=NEVER
    )
    event = e.JobUpdated(3, change)
    assert sentence_of(event) == "changed: deadline none; dependencies afterok:7; licenses a:2; comment x"
    told = as_json(event, private=False)["change"]
    assert told == {
        "deadline": None,
        "dependencies": [{"kind": "after_ok", "job": 7}],
        "licenses": [["a", 2]],
        "comment": "x",
    }
