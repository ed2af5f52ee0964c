"""Sending of one batch to a receiver: one signed POST, with every bound that an untrusted receiver needs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, NamedTuple

import aiohttp
from yarl import URL

from forebay.cluster.api.sinks.cloud_events import CONTENT_TYPE
from forebay.cluster.config import SinkConfig
from forebay.cluster.security import TlsError, open_client_context, read_secret
from forebay.cluster.system import Clock
from forebay.replica.values import MICROSECONDS_PER_SECOND, plain

SIGNATURE_HEADER: Final = "Forebay-Signature"
SINK_HEADER: Final = "Forebay-Sink"

CONNECT_S: Final = 10.0
"""Time limit of a connection, seconds."""

POST_S: Final = 30.0
"""Time limit of one request, seconds: a receiver stores a batch in less, and a hanging one must be noticed."""

RESPONSE_BYTES_MAX: Final = 64 * 1024
"""Size read of a response's body, bytes, so that the connection can be reused; the content is ignored."""

DRAIN_S: Final = 2.0
"""Time for the body of a response, seconds: its status is known already."""

SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 4 * 1024
"""Size of a signing key, bytes: 128 random bits at least."""

RETRY_AFTER_S_MAX: Final = 3_600.0
"""Longest pause that a receiver may request, seconds."""

IDLE_S: Final = 45.0
"""Lifetime of an idle connection, seconds."""

ERROR_CHARACTERS_MAX: Final = 200
"""Length of a reported error, characters."""

_GONE: Final = 410
_TEMPORARY: Final = frozenset({408, 425, 429})
"""Statuses from 400 to 499 that do not reject the request itself."""


class PostOutcome(StrEnum):
    """Outcome of one request."""

    ACCEPTED = "accepted"
    FAILED = "failed"
    """Temporary: no response, or one that announces a temporary error."""
    REFUSED = "refused"
    """Permanent until the receiver or the configuration changes: the request is rejected."""
    GONE = "gone"
    """The receiver wants no more events."""


class PostResult(NamedTuple):
    """Outcome and error of one request; `retry_after_s`: the pause that the receiver requests."""

    outcome: PostOutcome
    error: str = ""
    retry_after_s: float = 0.0


ACCEPTED: Final = PostResult(PostOutcome.ACCEPTED)


class SinkClient:
    """Connections to the receivers of one replica."""

    def __init__(self, clock: Clock) -> None:
        """Prepare without connecting; `clock` is this machine's, for the timestamps of signatures."""
        self._clock = clock
        self._contexts: dict[Path | None, ssl.SSLContext] = {}
        self._session: aiohttp.ClientSession | None = None

    def renew(self) -> None:
        """Read the authorities again before the next connection."""
        self._contexts.clear()

    async def post(self, sink: SinkConfig, body: bytes) -> PostResult:
        """Send a batch."""
        try:
            async with asyncio.timeout(POST_S):
                return await self._post(sink, body)
        except TimeoutError as error:
            return PostResult(PostOutcome.FAILED, _shown(str(error) or f"no response within {POST_S:.0f} s"))
        except (aiohttp.ClientError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            return PostResult(PostOutcome.FAILED, _shown(str(error) or type(error).__name__))
        except TlsError as error:
            return PostResult(PostOutcome.FAILED, _shown(str(error)))

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(OSError):
                await session.close()

    async def _post(self, sink: SinkConfig, body: bytes) -> PostResult:
        at_s = self._clock.now() // MICROSECONDS_PER_SECOND
        # In a thread, because it reads a file; the key can thus be replaced at any time.
        signature = await asyncio.to_thread(signature_of, sink.secret_file, at_s, body)
        headers = {"Content-Type": CONTENT_TYPE, SIGNATURE_HEADER: signature, SINK_HEADER: sink.name}
        async with self._open_session().post(
            URL(sink.url, encoded=True),
            data=body,
            headers=headers,
            allow_redirects=False,
            ssl=await self._tls(sink),
        ) as response:
            result = result_of(response.status, response.headers.get("Retry-After", ""), at_s)
            await _drain(response)
            return result

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(keepalive_timeout=IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding",),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session

    async def _tls(self, sink: SinkConfig) -> ssl.SSLContext | Literal[True]:
        """Return the TLS context of a receiver; aiohttp's default for one on this machine without TLS."""
        if sink.url.startswith("http:"):
            return True
        if sink.authority not in self._contexts:
            # In a thread, because reading the system's authorities takes tens of milliseconds.
            self._contexts[sink.authority] = await asyncio.to_thread(open_client_context, sink.authority)
        return self._contexts[sink.authority]


def signature_of(secret_file: Path, at_s: int, body: bytes) -> str:
    """Return the signature of a body sent at a time: HMAC-SHA256 over the time, a dot and the body.

    Raises:
        TlsError: The key cannot be used.
    """
    secret = read_secret(secret_file, bytes_max=SECRET_BYTES_MAX).strip()
    if len(secret) < SECRET_BYTES_MIN:
        raise TlsError(f"{secret_file}: the secret key has fewer than {SECRET_BYTES_MIN} bytes; make a longer one")
    digest = hmac.new(secret, b"%d." % at_s + body, hashlib.sha256).hexdigest()
    return f"t={at_s},v1={digest}"


def result_of(status: int, retry_after: str, now_s: int) -> PostResult:
    """Return the outcome that a response's status means."""
    if 200 <= status < 300:
        return ACCEPTED
    if 300 <= status < 400:
        return PostResult(PostOutcome.REFUSED, f"status {status}: redirects are not followed; correct the URL")
    if status == _GONE:
        return PostResult(PostOutcome.GONE, f"status {status}: the receiver wants no more events")
    if 400 <= status < 500 and status not in _TEMPORARY:
        return PostResult(PostOutcome.REFUSED, f"status {status}: the receiver rejects the request")
    return PostResult(PostOutcome.FAILED, f"status {status}", retry_after_s(retry_after, now_s))


def retry_after_s(text: str, now_s: int) -> float:
    """Return the pause in a header Retry-After, a number of seconds or a date; 0 if it is absent or malformed."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return min(RETRY_AFTER_S_MAX, float(text[:9]))
    try:
        until = parsedate_to_datetime(text)
        until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
        pause_s = (until - datetime.fromtimestamp(now_s, UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(RETRY_AFTER_S_MAX, max(0.0, pause_s))


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the body, so that the connection can be reused; close it if the body is long, broken or late."""
    size_bytes = 0
    try:
        async with asyncio.timeout(DRAIN_S):
            async for part in response.content.iter_any():
                size_bytes += len(part)
                if size_bytes > RESPONSE_BYTES_MAX:
                    response.close()
                    return
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError):
        response.close()


def _shown(text: str) -> str:
    """Return an error to display, without control characters."""
    return plain(text)[:ERROR_CHARACTERS_MAX]
