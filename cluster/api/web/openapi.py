"""OpenAPI document, generated from the table of operations and their types."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType
from typing import Any

import msgspec

from forebay.cluster.schemas import OPERATIONS, ApiOperation, ErrorAnswer

OPENAPI_VERSION = "3.1.0"
TEMPLATE = "#/components/schemas/{name}"


def document(version: str) -> dict[str, Any]:
    """Return the document for this release."""
    kinds = list(_kinds(OPERATIONS.values()))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=TEMPLATE)
    schema_of = dict(zip(map(id, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in OPERATIONS.values():
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, schema_of)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Forebay",
            "version": version,
            "description": (
                "API of a burst-buffer controller. Clients authenticate by mutual TLS: the certificate's CN is "
                "the name, its OU the role. Reads are linearizable by default. A replica that is not the leader "
                "responds 307. Every response has the header Forebay-Revision. Retry a write with the same "
                "command_id: it is carried out once."
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


def _kinds(rows: Iterable[ApiOperation[Any, Any]]) -> Iterable[Any]:
    seen: list[Any] = [ErrorAnswer]
    for row in rows:
        for kind in (row.request, row.answer):
            if kind is not NoneType and not any(kind is known for known in seen):
                seen.append(kind)
    return seen


def _operation(row: ApiOperation[Any, Any], schema_of: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": row.name,
        "summary": row.summary,
        "tags": [row.tag],
        "x-roles": sorted(row.roles),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in row.path_parameters
        ]
        + [
            {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
            for name, text in row.query.items()
        ],
        "responses": {
            str(row.status): {
                "description": "Success.",
                "headers": {"Forebay-Revision": {"schema": {"type": "integer"}}},
                "content": {row.content_type: {"schema": schema_of[id(row.answer)]}},
            },
            "default": {
                "description": "Error, with cause and remedy.",
                "content": {"application/json": {"schema": schema_of[id(ErrorAnswer)]}},
            },
        },
    }
    if row.has_body:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[id(row.request)]}},
        }
    if row.has_body or "stale" in row.query:
        operation["responses"]["307"] = {
            "description": "Another replica is the leader.",
            "headers": {"Location": {"schema": {"type": "string"}}},
        }
    return operation
