"""Reading what clients send, within bounds of size and time, and decoding it strictly."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from cluster.api.problems import Problem, bad

BODY_BYTES_MAX = 8 * 1024 * 1024
"""One request's body, bytes: a full bulk request of ordinary scripts, or one script of the largest size, escaped."""

BODIES_BYTES_MAX = 64 * 1024 * 1024
"""Bodies being read at once, bytes, over all connections: slow senders share this, and no more memory than this."""

BODY_READ_S = 20.0
"""Time for a whole body to arrive, seconds: who is slower than 400 kB/s with the largest one is cut."""

QUERY_CHARACTERS_MAX = 4096
"""Path and query together, characters."""

_T = TypeVar("_T")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_PLACE = re.compile(r" - at `\$\.?(.*?)`$")


class BodyBudget:
    """How many bytes of bodies are held by requests that are being read or decoded."""

    def __init__(self, bytes_max: int = BODIES_BYTES_MAX) -> None:
        self._left_bytes = bytes_max

    def take(self, size_bytes: int) -> None:
        """Reserve; Problem 503 where there is no room."""
        if size_bytes > self._left_bytes:
            raise Problem(
                503,
                "too_busy",
                "this replica is reading as many requests as it may",
                "try again in a moment",
                headers={"Retry-After": "1"},
            )
        self._left_bytes -= size_bytes

    def give(self, size_bytes: int) -> None:
        """Give back what was reserved."""
        self._left_bytes += size_bytes


async def read_body(request: web.BaseRequest, budget: BodyBudget, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """Return the body; Problem 413, 408, 411 or 415 for one that is too large, too slow, of unknown or odd form."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Problem(415, "unsupported_encoding", "the body is compressed", "send plain JSON")
    announced = request.content_length
    if announced is None and request.body_exists:
        raise Problem(411, "length_required", "the request does not say how long its body is", "send Content-Length")
    if not announced:
        return b""
    if announced > bytes_max:
        raise _too_large(announced, bytes_max)
    budget.take(announced)
    try:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        if request.content.is_eof() and request.content.exception() is None:
            # All of it is here already, as it is with most requests: nothing to wait for.
            return request.content.read_nowait(-1)
        parts: list[bytes] = []
        size_bytes = 0
        async with asyncio.timeout(BODY_READ_S):
            while True:
                part = await request.content.readany()
                if not part:
                    break
                size_bytes += len(part)
                if size_bytes > bytes_max:
                    raise _too_large(size_bytes, bytes_max)
                parts.append(part)
        return b"".join(parts)
    except TimeoutError as error:
        raise Problem(
            408, "too_slow", f"the body did not arrive within {BODY_READ_S:g} s", "send it faster, or in parts"
        ) from error
    finally:
        budget.give(announced)


def _too_large(size_bytes: int, bytes_max: int) -> Problem:
    return Problem(
        413,
        "limit_exceeded",
        f"the body has {size_bytes} bytes; at most {bytes_max} are read",
        "send less in one request",
        "body",
    )


def decode(data: bytes, kind: type[_T]) -> _T:
    """Return the JSON body as `kind`; Problem 400 names the place, unknown fields included."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PLACE.search(text)
        place = found.group(1) if found and found.group(1) else "body"
        unknown = _UNKNOWN.search(text)
        if unknown:
            place = unknown.group(1) if place == "body" else f"{place}.{unknown.group(1)}"
        sentence = _PLACE.sub("", text)
        raise bad(sentence[:1].lower() + sentence[1:], "see /v1/openapi.json for what is expected", place) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is not JSON: {error}", "send one JSON object", "body", "invalid_json") from error


def encode(view: Any) -> bytes:
    """Return the answer as JSON."""
    return msgspec.json.encode(view)
