"""Request bodies: reading within bounds of size and time, and strict decoding."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TypeVar

import msgspec
from aiohttp import web

from forebay.cluster.api.web.problems import Problem, bad_request, too_busy
from forebay.cluster.schemas import BODY_BYTES_MAX
from forebay.cluster.security import Identity, Role

SMALL_BODY_BYTES = 64 * 1024
"""Largest body that uses the quota for small bodies, bytes: a submit, a hold, a drain."""

AGENT_BODY_BYTES = 2 * 1024 * 1024
"""Largest agent body that uses the quota for agents, bytes: a full poll, and results by the hundred."""

BODY_READ_S = 5.0
"""Time for a body to arrive, seconds, in addition to its size at BODY_BYTES_S: a lost packet or two."""

BODY_BYTES_S = 512 * 1024
"""Slowest rate of a body, bytes a second: 21 seconds for the largest."""

QUERY_CHARACTERS_MAX = 4096
"""Length of path and query together, characters."""

_T = TypeVar("_T")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_PLACE = re.compile(r" - at `\$\.?(.*?)`$")


class BodyQuota(msgspec.Struct, frozen=True):
    """Memory for bodies of one kind: `bytes_max` for all senders, `share_bytes` for each."""

    bytes_max: int
    share_bytes: int


class BodyQuotas(msgspec.Struct, frozen=True):
    """Body quotas of a replica, 64 MiB in all. No kind and no identity can exhaust another's quota."""

    large: BodyQuota = BodyQuota(40 * 1024 * 1024, 16 * 1024 * 1024)
    """All other bodies: two of the largest size for each identity."""
    small: BodyQuota = BodyQuota(8 * 1024 * 1024, 2 * 1024 * 1024)
    """Bodies of users up to SMALL_BODY_BYTES: 32 of that size for each, and submits by the hundred."""
    agents: BodyQuota = BodyQuota(16 * 1024 * 1024, AGENT_BODY_BYTES)
    """Bodies of agents up to AGENT_BODY_BYTES."""


class _Account:
    def __init__(self, room: BodyQuota) -> None:
        self.room = room
        self.held_bytes = 0
        self.held_by: Counter[Identity] = Counter()


class BodyClaim:
    """Memory held by one body while it is read; it grows with received data, not with the declared length."""

    def __init__(self, account: _Account, who: Identity) -> None:
        self._account = account
        self._who = who
        self._held_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Reserve further bytes.

        Raises:
            Problem: 503, if the quota is exhausted.
        """
        account, who = self._account, self._who
        if account.held_by[who] + size_bytes > account.room.share_bytes:
            raise too_busy(f"this replica is already reading as many bytes of {who} as the limit allows")
        if account.held_bytes + size_bytes > account.room.bytes_max:
            raise too_busy("this replica is already reading as many bytes of requests as the limit allows")
        self._hold(size_bytes)

    def give(self) -> None:
        """Release all bytes."""
        self._hold(-self._held_bytes)

    def _hold(self, size_bytes: int) -> None:
        self._held_bytes += size_bytes
        self._account.held_bytes += size_bytes
        self._account.held_by[self._who] += size_bytes
        if not self._account.held_by[self._who]:
            del self._account.held_by[self._who]


class BodyBudget:
    """Memory of bodies being read, by kind and sender."""

    def __init__(self, rooms: BodyQuotas | None = None) -> None:
        rooms = rooms or BodyQuotas()
        self._large, self._small, self._agents = _Account(rooms.large), _Account(rooms.small), _Account(rooms.agents)

    def claim(self, who: Identity, announced_bytes: int) -> BodyClaim:
        """Return an empty claim on the quota for a body of this size and sender."""
        if who.role is Role.AGENT and announced_bytes <= AGENT_BODY_BYTES:
            return BodyClaim(self._agents, who)
        return BodyClaim(self._small if announced_bytes <= SMALL_BODY_BYTES else self._large, who)

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies being read."""
        return self._large.held_bytes + self._small.held_bytes + self._agents.held_bytes


async def read_body(
    request: web.BaseRequest, budget: BodyBudget, who: Identity, bytes_max: int = BODY_BYTES_MAX
) -> bytes:
    """Return the body.

    Raises:
        Problem: 413, 408, 411 or 415, if the body is too large, too slow, without a length or of another type; 400, if
            its sender disconnected; 503, if the quota of `who`, or of all senders, is exhausted.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Problem(415, "unsupported_encoding", "the body is compressed", "send plain JSON")
    announced = request.content_length
    if announced is None and request.body_exists:
        raise Problem(
            411, "length_required", "the request does not declare the length of its body", "send Content-Length"
        )
    if not announced:
        return b""
    if announced > bytes_max:
        raise _too_large(announced, bytes_max)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    if request.content.is_eof() and request.content.exception() is None:
        # The body has arrived completely, as usual, so it needs no quota.
        return request.content.read_nowait(-1)
    claim = budget.claim(who, announced)
    within_s = BODY_READ_S + announced / BODY_BYTES_S
    try:
        parts: list[bytes] = []
        size_bytes = 0
        async with asyncio.timeout(within_s):
            while True:
                part = await request.content.readany()
                if not part:
                    break
                size_bytes += len(part)
                if size_bytes > bytes_max:
                    raise _too_large(size_bytes, bytes_max)
                claim.take(len(part))
                parts.append(part)
        return b"".join(parts)
    except TimeoutError as error:
        raise Problem(
            408, "too_slow", f"the body did not arrive within {within_s:.3g} s", "send it faster, or in parts"
        ) from error
    except ConnectionError as error:
        # The sender has disconnected, so the response is not read.
        words = "the connection ended before the body had arrived"
        raise bad_request(words, "send it again", "body", "incomplete_body") from error
    finally:
        claim.give()


def _too_large(size_bytes: int, bytes_max: int) -> Problem:
    return Problem(
        413,
        "limit_exceeded",
        f"the body has {size_bytes} bytes; at most {bytes_max} are read",
        "send less in one request",
        "body",
    )


def decode(data: bytes, kind: type[_T]) -> _T:
    """Decode a JSON body as `kind`.

    Raises:
        Problem: 400, with the position of the fault; unknown fields are faults, too.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise body_problem(error) from error


def body_problem(error: Exception) -> Problem:
    """Return the error of a body that could not be decoded, with position and expected type."""
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"the body is not JSON: {error}", "send one JSON object", "body", "invalid_json")
    text = str(error)
    found = _PLACE.search(text)
    place = found.group(1) if found and found.group(1) else "body"
    unknown = _UNKNOWN.search(text)
    if unknown:
        place = unknown.group(1) if place == "body" else f"{place}.{unknown.group(1)}"
    sentence = _PLACE.sub("", text)
    return bad_request(sentence[:1].lower() + sentence[1:], "see /v1/openapi.json for what is expected", place)
