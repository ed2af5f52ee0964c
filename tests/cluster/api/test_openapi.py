"""The OpenAPI document: it lists every route, and real answers are what it says."""

import re
from typing import Any

import msgspec

from forebay.cluster.api.web.openapi import document
from forebay.cluster.config.config import Config
from forebay.cluster.schemas.operations import OPERATIONS
from tests.cluster.harness import Harness, story


def test_the_document_lists_every_route_with_its_roles_parameters_and_body() -> None:
    found = document("1")
    listed = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    assert listed == {(route.method, route.path) for route in OPERATIONS.values()}
    for route in OPERATIONS.values():
        operation = found["paths"][route.path][route.method.lower()]
        assert operation["x-roles"] == sorted(route.roles)
        assert operation["summary"]
        names = {parameter["name"] for parameter in operation["parameters"]}
        assert names == set(re.findall(r"\{(\w+)\}", route.path)) | set(route.query)
        assert ("requestBody" in operation) == route.has_body
        assert (operation["operationId"], operation["tags"]) == (route.name, [route.tag])
    ids = [op["operationId"] for methods in found["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))


def check(value: Any, schema: dict[str, Any], components: dict[str, Any], place: str = "$") -> None:
    """Check a value against the part of JSON Schema that the document uses; anything else in a schema is an error."""
    if "$ref" in schema:
        return check(value, components[schema["$ref"].rsplit("/", 1)[-1]], components, place)
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            try:
                return check(value, option, components, place)
            except AssertionError:
                continue
        raise AssertionError(f"{place}: {value!r} is none of {schema['anyOf']}")
    if "enum" in schema:
        assert value in schema["enum"], f"{place}: {value!r}"
        return None
    kind = schema.get("type")
    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list}
    if kind == "object":
        assert isinstance(value, dict), f"{place}: {value!r}"
        properties = schema.get("properties", {})
        assert set(schema.get("required", [])) <= set(value), f"{place}: {sorted(value)}"
        for key, item in value.items():
            if properties:
                assert key in properties, f"{place}.{key} is not in the document"
                check(item, properties[key], components, f"{place}.{key}")
        return None
    if kind is None:
        return None
    assert isinstance(value, types[kind]), f"{place}: {value!r} is no {kind}"
    if kind == "array":
        for number, item in enumerate(value):
            if "items" in schema and schema["items"] is not False:
                check(item, schema["items"], components, f"{place}[{number}]")
    return None


@story
async def test_real_answers_are_what_the_served_document_says(config: Config) -> None:
    async with Harness(config) as harness:
        served = (await harness.ask("GET", "/v1/openapi.json", who="n1")).body
        assert served == msgspec.json.decode(msgspec.json.encode(document("test")))
        components = served["components"]["schemas"]
        agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2}
        pool = {"command_id": harness.new_id(), "quantity": "1GiB", "granularity": "1MiB"}
        cancel = {"command_id": harness.new_id()}
        bulk = {"commands": [{"type": "hold_job", "command_id": harness.new_id(), "job_id": 9}]}
        asked: list[tuple[str, str, str, Any, str, int]] = [
            ("POST", "/v1/agents/n1/register", "/v1/agents/{node}/register", agent, "n1", 200),
            ("POST", "/v1/jobs", "/v1/jobs", harness.job(dependencies=[]), "alice", 201),
            ("POST", "/v1/agents/n1/poll", "/v1/agents/{node}/poll", {"instance": "i", "wait_s": 0}, "n1", 200),
            ("PUT", "/v1/pools/new", "/v1/pools/{name}", pool, "operator", 200),
            ("POST", "/v1/commands", "/v1/commands", bulk, "operator", 200),
            ("POST", "/v1/snapshots", "/v1/snapshots", None, "operator", 200),
            ("GET", "/v1/jobs", "/v1/jobs", None, "alice", 200),
            ("GET", "/v1/jobs/1", "/v1/jobs/{id}", None, "alice", 200),
            ("GET", "/v1/jobs/1/history", "/v1/jobs/{id}/history", None, "alice", 200),
            ("GET", "/v1/jobs/1/why", "/v1/jobs/{id}/why", None, "alice", 200),
            ("GET", "/v1/pools", "/v1/pools", None, "alice", 200),
            ("GET", "/v1/buffers", "/v1/buffers", None, "alice", 200),
            ("GET", "/v1/nodes", "/v1/nodes", None, "alice", 200),
            ("GET", "/v1/transfers", "/v1/transfers", None, "alice", 200),
            ("GET", "/v1/members", "/v1/members", None, "r1", 200),
            ("GET", "/v1/status?digest=yes", "/v1/status", None, "alice", 200),
            ("GET", "/v1/ledger", "/v1/ledger", None, "operator", 200),
            ("POST", "/v1/jobs/1/cancel", "/v1/jobs/{id}/cancel", cancel, "alice", 200),
            ("GET", "/v1/jobs/99", "/v1/jobs/{id}", None, "alice", 404),
            ("GET", "/v1/ledger", "/v1/ledger", None, "alice", 403),
        ]
        for method, target, path, body, who, status in asked:
            answer = await harness.ask(method, target, body, who=who)
            assert answer.status == status, (target, answer)
            responses = served["paths"][path][method.lower()]["responses"]
            response = responses.get(str(status), responses["default"])
            check(answer.body, response["content"]["application/json"]["schema"], components, target)
            assert int(answer.headers["Forebay-Revision"]) >= 0
            assert status >= 400 or answer.body["revision"] <= harness.controller.state.revision
