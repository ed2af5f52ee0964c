"""Routing: maps a request to its operation, path parameters and query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from forebay.cluster.api.web.problems import Problem, bad_request
from forebay.cluster.schemas import OPERATIONS, ApiOperation
from forebay.cluster.schemas.operations import REST

SEGMENT_CHARACTERS_MAX = 256
"""Length of one path segment, characters; names have at most 64."""


def _tables() -> dict[int, list[tuple[tuple[str, ...], dict[str, ApiOperation[Any, Any]]]]]:
    found: dict[int, list[tuple[tuple[str, ...], dict[str, ApiOperation[Any, Any]]]]] = {}
    for operation in OPERATIONS.values():
        parts = tuple(operation.path.strip("/").split("/"))
        rows = found.setdefault(len(parts), [])
        methods = next((methods for known, methods in rows if known == parts), None)
        if methods is None:
            methods = {}
            rows.append((parts, methods))
        methods[operation.method] = operation
    return found


_TABLES = _tables()


def find_operation(method: str, raw_path: str) -> tuple[ApiOperation[Any, Any], dict[str, str]]:
    """Return the operation and the decoded path parameters.

    Raises:
        Problem: 404 or 405.
    """
    parts = _join_wildcard(raw_path.strip("/").split("/"))
    for known, methods in _TABLES.get(len(parts), ()):
        if all(wanted == part or wanted[0] == "{" for wanted, part in zip(known, parts, strict=True)):
            params = {
                wanted[1:-1]: _segment(part) for wanted, part in zip(known, parts, strict=True) if wanted[0] == "{"
            }
            operation = methods.get(method)
            if operation is None:
                allowed = ", ".join(sorted(methods))
                raise Problem(
                    405,
                    "method_not_allowed",
                    f"{method} is not possible here",
                    f"use {allowed}",
                    headers={"Allow": allowed},
                )
            return operation, params
    raise Problem(
        404, "unknown_route", f"no resource has the path {raw_path[:SEGMENT_CHARACTERS_MAX]}", "see /v1/openapi.json"
    )


_LONG = tuple(
    operation.path.strip("/").split("/")[:-1] for operation in OPERATIONS.values() if f"{{{REST}}}" in operation.path
)


def _join_wildcard(parts: list[str]) -> list[str]:
    """Join the path segments that belong to one wildcard parameter."""
    for begin in _LONG:
        if len(parts) > len(begin) and parts[: len(begin)] == begin:
            return [*begin, "/".join(parts[len(begin) :])]
    return parts


def _segment(part: str) -> str:
    try:
        text = unquote(part, errors="strict")
    except UnicodeDecodeError as error:
        raise Problem(400, "invalid_field", "the path is not UTF-8", "encode it as UTF-8", "path") from error
    if not text or len(text) > SEGMENT_CHARACTERS_MAX or not text.isprintable():
        raise bad_request(f"{text[:64]!r} cannot be part of a path", "write a name or a number", "path")
    return text


def check_query(operation: ApiOperation[Any, Any], query: Mapping[str, str], names: list[str]) -> None:
    """Reject unknown or repeated query parameters and unknown values.

    Raises:
        Problem: 400, if there are any.
    """
    for name in names:
        if name not in operation.query:
            known = ", ".join(sorted(operation.query)) or "none"
            sentence = f"the query parameter {name!r} is unknown here"
            raise bad_request(sentence, f"known are: {known}", f"query {name}", "unknown_query")
    if len(names) != len(set(names)):
        raise bad_request("a query parameter is given twice", "give each once", "query")
    for name, word in (
        ("stale", "ok"),
        ("digest", "yes"),
        ("live", "yes"),
        ("external_jobs", "yes"),
        ("retained", "yes"),
        ("alone", "yes"),
        ("expected", "yes"),
    ):
        if query.get(name, word) != word:
            raise bad_request(f"{name} is {query[name]!r}", f"write {name}={word}, or leave it out", f"query {name}")
