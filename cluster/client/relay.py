"""Requests forwarded for another client on an event loop, for the gateway and the status page's proxy."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Final

import aiohttp
from yarl import URL

from forebay.cluster.client.attempt import (
    IDLE_CONNECTION_S,
    broken,
    client_refused,
    is_alert,
    no_answer,
    no_handshake,
    server_refused,
    unreachable,
)
from forebay.cluster.security import Credentials, TlsFiles
from forebay.cluster.system import Address

CONNECTIONS_MAX: Final = 1024
"""Connections of one relay, count: those of a gateway's clients."""


class Relay:
    """Connections to the replicas under one identity."""

    def __init__(self, tls: TlsFiles) -> None:
        """Read certificate and key without connecting.

        Raises:
            TlsError: The files cannot be used.
        """
        self._tls = tls
        self._credentials = None if tls.shows_nothing else Credentials(tls)
        self._session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def relay(
        self,
        address: Address,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: AsyncIterator[bytes] | None,
        *,
        connect_s: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Forward a client's request and pass its response on as it arrives.

        Only connecting is bounded in time; the client disconnects if it takes too long.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        async with self._attempt(address, connect_s, connect_s):
            async with self._request(address, method, target, body, timeout, headers) as response:
                yield response

    async def close(self) -> None:
        """Close all connections; later requests open new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _request(
        self,
        address: Address,
        method: str,
        target: str,
        body: bytes | AsyncIterator[bytes] | None,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str],
    ) -> "aiohttp.client._RequestContextManager":
        if self._credentials is not None:
            self._credentials.refresh()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                cookie_jar=aiohttp.DummyCookieJar(),
                # A compressed response could exceed the size limit after decompression.
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding",),
            )
        url = URL(self._base(address) + target, encoded=True)
        headers = {**headers, **self._more_headers(address, method, target, body)}
        return self._session.request(
            method,
            url,
            data=body,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            # The pool separates connections by context, so those of an old certificate are left to idle out.
            ssl=self._context(),
        )

    def _connector(self) -> aiohttp.BaseConnector:
        # Names are resolved for each connection, because a replica may have moved.
        return aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=IDLE_CONNECTION_S, use_dns_cache=False)

    def _base(self, address: Address) -> str:
        return address.url

    def _context(self) -> ssl.SSLContext | bool:
        assert self._credentials is not None
        return self._credentials.client_context()

    def _more_headers(
        self, address: Address, method: str, target: str, body: bytes | AsyncIterator[bytes] | None
    ) -> Mapping[str, str]:
        """Return additional headers."""
        return {}

    @contextlib.asynccontextmanager
    async def _attempt(self, address: Address, timeout_s: float, connect_s: float) -> AsyncIterator[None]:
        """Convert every kind of request failure into an AttemptError."""
        try:
            yield
        except aiohttp.ClientConnectorCertificateError as error:
            raise server_refused(address, error.certificate_error, self._tls) from error
        except (aiohttp.ClientConnectorSSLError, aiohttp.ClientConnectorError) as error:
            tls_error = _tls_error(error)
            if isinstance(tls_error, ssl.SSLCertVerificationError):
                raise server_refused(address, tls_error, self._tls) from error
            if tls_error is not None:
                raise client_refused(address, tls_error, self._tls) from error
            raise unreachable(address, error.os_error) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise no_handshake(address, connect_s) from error
        except (aiohttp.ServerTimeoutError, TimeoutError) as error:
            raise no_answer(address, timeout_s) from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            tls_error = _tls_error(error)
            if tls_error is not None and is_alert(tls_error):
                raise client_refused(address, tls_error, self._tls) from error
            raise broken(address, error, self._tls) from error


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the TLS error among the causes of `error`, or None."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLError):
            return seen
        inner = getattr(seen, "os_error", None)
        if isinstance(inner, ssl.SSLError):
            return inner
        seen = seen.__cause__ or seen.__context__
    return None
