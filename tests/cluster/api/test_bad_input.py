"""Bad input is refused at the earliest moment, with a sentence that names place and remedy, and changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from forebay.cluster.api.web.bodies import BODY_BYTES_MAX
from forebay.cluster.api.web.problems import STATUS_OF
from forebay.cluster.config.config import Config
from forebay.replica.values.errors import RejectionCode
from forebay.replica.values.limits import SCRIPT_BYTES_MAX
from tests.cluster.harness import PLAIN, Harness, story

Changes = Callable[[Config], dict[str, Any]]


def directive(text: str) -> dict[str, Any]:
    return {"script": f"#!/bin/sh\n{text}\ntrue\n"}


def dw(capacity: str, pool: str = "") -> dict[str, Any]:
    return directive(f"#DW jobdw capacity={capacity} access_mode=striped type=scratch{pool}")


# name: (changes of a good submission, status, code, words of the sentence, place, whether decided (one rejected entry))
CASES: dict[str, tuple[dict[str, Any], int, str, tuple[str, ...], str, bool]] = {
    "unknown pool": (dw("1GiB", " pool=nope"), 400, "unknown_pool", ("nope",), "script line 2", True),
    "over the total": (dw("1TiB"), 400, "capacity_over_total", ("fast",), "script line 2", True),
    "zero": (dw("0"), 400, "invalid_capacity", ("zero",), "script line 2, column", False),
    "negative": (dw("-5GiB"), 400, "invalid_capacity", ("sign",), "script line 2, column", False),
    "overflow": (dw("99999999PiB"), 400, "invalid_capacity", ("overflow",), "script line 2, column", False),
    "unknown unit": (dw("5parsec"), 400, "invalid_capacity", ("parsec",), "script line 2, column", False),
    "unknown directive": (
        directive("#DW conjure capacity=1GiB"),
        400,
        "invalid_directive",
        ("conjure",),
        "script line 2, column 5",
        False,
    ),
    "bad --bb": (
        {"script": PLAIN, "bb": "capacity=abc"},
        400,
        "invalid_capacity",
        ("abc",),
        "--bb line 1, column 10",
        False,
    ),
    "empty --bb": ({"script": PLAIN, "bb": ""}, 400, "invalid_directive", ("empty",), "--bb", False),
    "missing source": (
        directive(
            "#DW jobdw capacity=8MiB access_mode=striped type=scratch\n"
            "#DW stage_in type=file destination=$DW_JOB_STRIPED/a"
        ),
        400,
        "invalid_directive",
        ("source",),
        "script line 3",
        False,
    ),
    "foreign path": (
        directive(
            "#DW jobdw capacity=8MiB access_mode=striped type=scratch\n"
            "#DW stage_in type=file source=/etc/shadow destination=$DW_JOB_STRIPED/a"
        ),
        403,
        "path_not_allowed",
        ("/etc/shadow",),
        "script line 3",
        True,
    ),
    "large script": (
        {"script": "#!/bin/sh\n" + "#" * SCRIPT_BYTES_MAX},
        413,
        "limit_exceeded",
        (str(SCRIPT_BYTES_MAX),),
        "script",
        False,
    ),
    "no interpreter": ({"script": "true\n"}, 400, "invalid_field", ("script",), "script line 1", True),
    "unknown field": ({"walltime": 3}, 400, "invalid_field", ("walltime",), "walltime", False),
    "wrong type": ({"cpus": "two"}, 400, "invalid_field", ("str",), "cpus", False),
    "no cpus": ({"cpus": 0}, 400, "invalid_field", ("cpus",), "cpus", True),
    "endless": ({"time_limit_s": 10**12}, 400, "invalid_field", ("time_limit_s",), "time_limit_s", True),
    "bad begin": ({"begin_at": "tomorrow"}, 400, "invalid_field", ("tomorrow",), "begin_at", False),
    "no zone": ({"begin_at": "2026-01-31T12:00:00"}, 400, "invalid_field", ("is invalid",), "begin_at", False),
    "odd dependency": ({"dependencies": ["later:1"]}, 400, "invalid_field", ("later:1",), "dependencies", False),
    "no dependency": ({"dependencies": ["afterok:9"]}, 400, "unknown_dependency", ("9",), "dependencies", True),
    "odd array": ({"array": "3-1"}, 400, "invalid_field", ("3-1",), "array", False),
    "odd licence": ({"licenses": ["a b"]}, 400, "invalid_field", ("a b",), "licenses", False),
    "a licence twice": ({"licenses": ["a:1", "a:2"]}, 400, "invalid_field", ("twice",), "licenses", False),
    "negative nodes": ({"nodes": -1}, 400, "invalid_field", (">= 0",), "nodes", False),
    "many nodes": ({"nodes": 2}, 400, "invalid_field", ("one",), "nodes", True),
    "no nodes": (
        {"script": PLAIN, "nodes": 0},
        400,
        "invalid_field",
        ("Node count specification invalid",),
        "nodes",
        True,
    ),
    "odd mail type": ({"mail_types": ["never"]}, 400, "invalid_field", ("never",), "mail_types", True),
    "--bb makes a persistent buffer": (
        {"script": PLAIN, "bb": "#BB create_persistent name=a capacity=1G"},
        400,
        "invalid_directive",
        ("create_persistent",),
        "--bb line 1, column 5",
        False,
    ),
    "persistent buffers are for operators": (
        directive("#BB create_persistent name=a capacity=8MiB") | {"user": "alice"},
        403,
        "permission_denied",
        ("Burst Buffer permission denied",),
        "script line 2, column 30",
        True,
    ),
    "id not uuid7": ({"command_id": "0" * 32}, 400, "invalid_field", ("UUIDv7",), "command_id", False),
    "id not hex": ({"command_id": "x" * 32}, 400, "invalid_field", ("regex",), "command_id", False),
    "other user": ({"user": "bob"}, 403, "permission_denied", ("bob",), "user", False),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_bad_submission_is_refused_with_its_place_and_changes_nothing(config: Config, case: str) -> None:
    changes, status, code, words, place, decided = CASES[case]

    @story
    async def run() -> None:
        async with Harness(config) as harness:
            before = harness.controller.state
            answer = await harness.submit(**changes)
            assert (answer.status, answer.code) == (status, code), answer
            error = answer.body["error"]
            for word in words:
                assert word in error["sentence"], error
            assert error["place"].startswith(place), error
            assert error["remedy"], error
            assert error["outcome"] == "rejected"
            after = harness.controller.state
            assert after.revision == before.revision + decided
            for field in ("jobs", "buffers", "pools", "nodes", "held_bytes", "next_job"):
                assert getattr(after, field) == getattr(before, field), field

    run()


@story
async def test_all_wrong_directives_are_named_at_once_each_with_its_place(config: Config) -> None:
    """Alone, among many commands, and in a script that is so long that it is read in a thread."""
    wrong = "#DW jobdw capacity=many\n#DW stage_in type=files\n#DW wobble"
    places = ["--bb line 1, column 10", *(f"script line {line}, column" for line in (2, 3, 4))]
    async with Harness(config) as harness:
        for script in (directive(wrong), {"script": directive(wrong)["script"] + "# text\n" * 20_000}):
            asked = script | {"bb": "capacity=few"}
            alone = (await harness.submit(**asked)).body["error"]
            command = harness.job(**asked) | {"type": "submit_job", "command_id": harness.new_id()}
            bulk = await harness.ask("POST", "/v1/commands", {"commands": [command]})
            for error in (alone, bulk.body["results"][0]["error"]):
                found = [error, *error["others"]]
                assert len(found) == len(places) and all(one["remedy"] for one in found)
                for one, place in zip(found, places, strict=True):
                    assert one["place"].startswith(place)


@story
async def test_what_is_not_json_or_not_as_expected_is_refused_with_its_place(config: Config) -> None:
    async with Harness(config) as harness:
        revision = harness.controller.state.revision

        async def refused(
            method: str, path: str, status: int, code: str, word: str, *, who: str = "operator", **options: Any
        ) -> None:
            answer = await harness.ask(method, path, who=who, **options)
            assert (answer.status, answer.code) == (status, code), answer
            assert word in answer.sentence + answer.body["error"]["place"], answer
            assert answer.body["error"]["remedy"], answer

        await refused("POST", "/v1/jobs", 400, "invalid_json", "JSON", data=b"{")
        await refused("POST", "/v1/jobs", 400, "invalid_json", "JSON", data=b'{"name": "\xff"}')
        await refused("POST", "/v1/jobs", 400, "invalid_field", "body", data=b"[]")
        await refused("POST", "/v1/jobs", 400, "invalid_field", "array", data=b"[" * 100_000)
        await refused("POST", "/v1/jobs", 400, "invalid_field", "command_id", data=b"{}")
        await refused("POST", "/v1/jobs", 413, "limit_exceeded", "bytes", data=b" " * (BODY_BYTES_MAX + 1))
        await refused(
            "POST", "/v1/jobs", 415, "unsupported_type", "xml", data=b"{}", headers={"Content-Type": "text/xml"}
        )
        await refused(
            "POST",
            "/v1/jobs",
            415,
            "unsupported_encoding",
            "compressed",
            data=b"x",
            headers={"Content-Encoding": "gzip"},
        )
        await refused("GET", "/v1/jobs/99", 404, "unknown_job", "job 99 does not exist")
        await refused("GET", "/v1/jobs/99/why", 404, "unknown_job", "job 99 did not exist")
        await refused("GET", "/v1/jobs/99/history", 404, "unknown_job", "job 99 does not exist")
        await refused("GET", "/v1/jobs/one", 400, "invalid_field", "'one'")
        await refused("GET", "/v1/jobs/%FF", 400, "invalid_field", "UTF-8")
        await refused("GET", "/v1/jobs?colour=red", 400, "unknown_query", "colour")
        await refused("GET", "/v1/jobs?limit=0", 400, "invalid_field", "limit")
        await refused("GET", "/v1/jobs?limit=1&limit=2", 400, "invalid_field", "twice")
        await refused("GET", "/v1/jobs?state=BORED", 400, "invalid_field", "BORED")
        await refused("GET", "/v1/jobs?stale=maybe", 400, "invalid_field", "maybe")
        await refused("GET", "/v1/nothing", 404, "unknown_route", "/v1/nothing")
        await refused("DELETE", "/v1/jobs", 405, "method_not_allowed", "DELETE")
        await refused("GET", "/v1/jobs?user=" + "u" * 5000, 414, "limit_exceeded", "characters")
        assert harness.controller.state.revision == revision
        for path, body in (
            ("/v1/jobs/99/cancel", {"command_id": harness.new_id()}),
            ("/v1/jobs/99/hold", {"command_id": harness.new_id()}),
        ):
            await refused("POST", path, 404, "unknown_job", "99", body=body)
        pool = {"command_id": harness.new_id(), "quantity": "10GB", "granularity": "5furlong"}
        await refused("PUT", "/v1/pools/fast", 400, "invalid_capacity", "granularity", body=pool)
        drain = {"command_id": harness.new_id(), "reason": "dust"}
        await refused("POST", "/v1/nodes/n9/drain", 404, "unknown_node", "n9", body=drain)
        assert not harness.controller.state.jobs


def test_every_rejection_has_a_status() -> None:
    assert set(STATUS_OF) == set(RejectionCode)
    assert set(STATUS_OF.values()) <= {400, 403, 404, 409, 503}


@story
@pytest.mark.parametrize("field", ["time_limit_s", "cpus", "priority", "nice", "nodes"])
@pytest.mark.parametrize("number", [2**63, -(2**63), 2**64, 10**40])
async def test_a_number_that_no_field_of_the_ledger_holds_is_refused_by_its_place(
    config: Config, field: str, number: int
) -> None:
    async with Harness(config) as harness:
        answer = await harness.submit(**{field: number})
        assert (answer.status, answer.code) == (400, "invalid_field")
        assert field in answer.body["error"]["place"]
