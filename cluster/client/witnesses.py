"""Requests to external witnesses, which are trusted by their signatures only and read within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import aiohttp
from yarl import URL

from forebay.cluster.client.attempt import cause_of
from forebay.cluster.config import WitnessConfig
from forebay.cluster.security import TlsError, open_client_context
from forebay.cluster.security.proofs import MAX_ANSWER_BYTES

ADD_CHECKPOINT: Final = "/add-checkpoint"

CONNECTIONS_MAX: Final = 32
"""Connections to all witnesses, count: two for each during a replacement."""

IDLE_S: Final = 45.0
"""Lifetime of an idle connection, seconds; checkpoints come every ten."""


class WitnessReply(NamedTuple):
    """Response: status, content type without parameters, and body."""

    status: int
    content_type: str
    body: bytes


class WitnessUnreachable(Exception):
    """No response arrived; the message gives the reason."""


class WitnessClient:
    """Connections to the witnesses of one replica."""

    def __init__(self, witnesses: Sequence[WitnessConfig]) -> None:
        """Prepare without connecting or reading files."""
        self._witnesses = {one.name: one for one in witnesses}
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._session: aiohttp.ClientSession | None = None

    def renew(self, witnesses: Sequence[WitnessConfig]) -> None:
        """Replace the witnesses, and reload their authorities."""
        self._witnesses = {one.name: one for one in witnesses}
        self._contexts.clear()

    async def add_checkpoint(self, witness: str, body: bytes) -> WitnessReply:
        """Send a request to the named witness; the caller bounds the time.

        Raises:
            WitnessUnreachable: No response arrived.
        """
        asked = self._witnesses[witness]
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding",),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        try:
            async with self._session.post(
                URL(asked.url + ADD_CHECKPOINT, encoded=True),
                data=body,
                headers={"Content-Type": "application/octet-stream"},
                allow_redirects=False,
                ssl=await self._tls(asked),
            ) as response:
                held = b""
                async for part in response.content.iter_any():
                    held += part
                    if len(held) > MAX_ANSWER_BYTES:
                        raise WitnessUnreachable(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
                return WitnessReply(response.status, response.content_type, held)
        except (aiohttp.ClientError, OSError, TlsError, asyncio.IncompleteReadError) as error:
            raise WitnessUnreachable(cause_of(error)) from error

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(OSError):
                await session.close()

    async def _tls(self, asked: WitnessConfig) -> ssl.SSLContext | Literal[True]:
        """Return the TLS context of a witness; aiohttp's default for one behind a local proxy."""
        if asked.url.startswith("http:"):
            return True
        if asked.name not in self._contexts:
            # In a thread, because reading the system's authorities takes tens of milliseconds.
            self._contexts[asked.name] = await asyncio.to_thread(open_client_context, asked.authority)
        return self._contexts[asked.name]
