"""The OpenAPI document, made from the table of routes and the types of bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from cluster.api.routes import ROUTES, Route
from cluster.schemas import ErrorAnswer

OPENAPI_VERSION = "3.1.0"
TEMPLATE = "#/components/schemas/{name}"

_PARAMETER = re.compile(r"\{([a-z_]+)\}")
_TEXT = frozenset({"/healthz", "/readyz", "/metrics"})


def document(version: str) -> dict[str, Any]:
    """Return the document for this release."""
    kinds = list(_kinds(ROUTES))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=TEMPLATE)
    schema_of = dict(zip(map(id, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Forebay",
            "version": version,
            "description": (
                "Burst-buffer controller. Mutual TLS: the certificate's CN is the name, its OU the role. Reads are "
                "linearizable by default; a replica that does not lead answers 307. Every answer carries the header "
                "Forebay-Revision. A write is retried with the same command_id and happens once."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"certificate": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"certificate": {"type": "mutualTLS"}},
        },
    }


def _kinds(routes: Iterable[Route]) -> Iterable[Any]:
    seen: list[Any] = [ErrorAnswer]
    for route in routes:
        for kind in (route.body, route.answer):
            if kind is not None and not any(kind is known for known in seen):
                seen.append(kind)
    return seen


def _operation(route: Route, schema_of: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "x-roles": sorted(route.roles),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(route.path)
        ]
        + [
            {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
            for name, text in route.query.items()
        ],
        "responses": {
            str(route.status): {
                "description": "The answer.",
                "headers": {"Forebay-Revision": {"schema": {"type": "integer"}}},
                "content": {_content_type(route): {"schema": schema_of[id(route.answer)]}},
            },
            "default": {
                "description": "Why not.",
                "content": {"application/json": {"schema": schema_of[id(ErrorAnswer)]}},
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[id(route.body)]}},
        }
    if route.roles and (route.body is not None or "stale" in route.query):
        operation["responses"]["307"] = {
            "description": "Another replica leads.",
            "headers": {"Location": {"schema": {"type": "string"}}},
        }
    return operation


def _content_type(route: Route) -> str:
    if route.path in _TEXT:
        return "text/plain"
    return "text/event-stream" if route.path == "/v1/events" else "application/json"
