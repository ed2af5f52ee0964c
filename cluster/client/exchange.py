"""One request to one replica: what came back, or how exactly it failed.

Nothing is retried here and no redirect is followed: `cluster.client.calls` decides that. What matters is whether the
request may have reached the replica, because then its outcome is unknown.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import msgspec
from yarl import URL

from cluster.client.errors import ANSWER_TOO_LARGE, NO_ANSWER, UNREACHABLE, UNTRUSTED, ApiError
from cluster.security import Credentials, TlsFiles, describe_authority, describe_certificate
from cluster.system import Address

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest answer that is read, bytes: a list of 50,000 jobs; nobody can fill a client's memory."""

CHUNK_BYTES: Final = 64 * 1024
"""Bytes read at once, so that the bound above is checked before memory is taken."""

CONNECTIONS_MAX: Final = 1024
"""Connections of one client, count: what the benchmark's largest crowd uses."""

IDLE_CONNECTION_S: Final = 30.0
"""Seconds that an unused connection is kept: below the server's own limit, so that no request meets a closing one."""

CONNECT_SHARE_MAX: Final = 0.9
"""Share of a request's time that connecting may take: it must end first, for only then has nothing arrived for sure."""

_HOST_MISMATCHES: Final = frozenset({62, 64})
_CERTIFICATE_NOT_YET_VALID: Final = 9
_CERTIFICATE_HAS_EXPIRED: Final = 10


class Answer(msgspec.Struct, frozen=True):
    """A complete answer; `location` and `retry_after` are headers, None where they are missing.

    `unsure`: an earlier request of the same call got no answer and may have been carried out.
    """

    status: int
    body: bytes
    location: str | None = None
    retry_after: str | None = None
    unsure: bool = False


class AttemptFailed(ApiError):
    """A request that got no complete answer.

    `may_have_arrived`: the replica may have carried it out. `untrusted`: one side refused the other's certificate, so
    that asking again cannot help.
    """

    def __init__(self, sentence: str, *, code: str = UNREACHABLE, may_have_arrived: bool, remedy: str = "") -> None:
        super().__init__(NO_ANSWER, code, sentence, remedy=remedy)
        self.may_have_arrived = may_have_arrived

    @property
    def untrusted(self) -> bool:
        """Whether a certificate was refused."""
        return self.code == UNTRUSTED


class Exchange:
    """Connections to the replicas with one identity."""

    def __init__(self, tls: TlsFiles) -> None:
        """Read the certificate and key; TlsRefused if they cannot be used. Nothing is connected yet."""
        self._tls = tls
        self._credentials = Credentials(tls)
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> Answer:
        """Send one request and return the answer, whatever its status; AttemptFailed if there is none in time.

        `connect_s`: how long a new connection may take, TLS handshake included; an answer may take until `timeout_s`.
        """
        connect_s = min(connect_s, CONNECT_SHARE_MAX * timeout_s)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
        async with self._attempt(address, timeout_s, connect_s):
            async with self._request(address, method, target, body, timeout) as response:
                return _answer(response, await _read_bounded(response, address))

    @contextlib.asynccontextmanager
    async def stream(
        self, address: Address, target: str, *, connect_s: float, idle_s: float
    ) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        """Open a GET whose answer never ends: yields (answer without body, chunks).

        A status other than 200 comes with its body and no chunks. AttemptFailed if it breaks or is silent for `idle_s`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=idle_s)
        async with self._attempt(address, idle_s, connect_s):
            async with self._request(address, "GET", target, None, timeout, accept="text/event-stream") as response:
                body = b"" if response.status == 200 else await _read_bounded(response, address)
                yield _answer(response, body), response.content.iter_chunked(CHUNK_BYTES)

    async def close(self) -> None:
        """Close all connections; the exchange may be used again and then opens new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _request(
        self,
        address: Address,
        method: str,
        target: str,
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,
        accept: str = "application/json",
    ) -> "aiohttp.client._RequestContextManager":
        self._credentials.refresh()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=IDLE_CONNECTION_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                # An answer that grows when it is unpacked would get past the bound on what is read.
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding",),
            )
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/json"
        url = URL(address.url + target, encoded=True)
        return self._session.request(
            method,
            url,
            data=body,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            # A pooled connection is for requests of its own context: one of an earlier certificate is left to idle out.
            ssl=self._credentials.client_context(),
        )

    @contextlib.asynccontextmanager
    async def _attempt(self, address: Address, timeout_s: float, connect_s: float) -> AsyncIterator[None]:
        """Turn every way in which a request can fail into an AttemptFailed."""
        try:
            yield
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._server_refused(address, error.certificate_error) from error
        except (aiohttp.ClientConnectorSSLError, aiohttp.ClientConnectorError) as error:
            tls_error = _tls_error(error)
            if isinstance(tls_error, ssl.SSLCertVerificationError):
                raise self._server_refused(address, tls_error) from error
            if tls_error is not None:
                raise self._client_refused(address, tls_error) from error
            reason = error.os_error.strerror or str(error.os_error)
            raise AttemptFailed(f"{address} cannot be reached ({reason})", may_have_arrived=False) from error
        except aiohttp.ConnectionTimeoutError as error:
            sentence = f"{address} did not finish a handshake within {connect_s:.3g} s"
            raise AttemptFailed(sentence, may_have_arrived=False) from error
        except (aiohttp.ServerTimeoutError, TimeoutError) as error:
            sentence = f"{address} did not answer within {timeout_s:.3g} s"
            raise AttemptFailed(sentence, may_have_arrived=True) from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            tls_error = _tls_error(error)
            if tls_error is not None and _is_alert(tls_error):
                raise self._client_refused(address, tls_error) from error
            raise AttemptFailed(
                f"the connection to {address} broke before the answer was complete ({error or type(error).__name__})",
                may_have_arrived=True,
                # TLS 1.3 lets a server refuse a client after the handshake; asyncio then closes without an alert.
                remedy=f"if every replica does this, it may be refusing {describe_certificate(self._tls.certificate)}",
            ) from error

    def _server_refused(self, address: Address, error: Exception) -> AttemptFailed:
        """Say why the certificate of a replica was refused, and whose signature was expected."""
        expected = describe_authority(self._tls.authority)
        code = getattr(error, "verify_code", None)
        if code in _HOST_MISMATCHES:
            sentence = f"the certificate of {address} is for another address"
            remedy = f"issue the replica a certificate that names {address.host}"
        elif code in (_CERTIFICATE_HAS_EXPIRED, _CERTIFICATE_NOT_YET_VALID):
            when = "has expired" if code == _CERTIFICATE_HAS_EXPIRED else "is not valid yet"
            sentence = f"the certificate of {address} {when}"
            remedy = "issue a new one, or set this machine's clock"
        else:
            sentence = f"the certificate of {address} is not signed by the expected authority, {expected}"
            remedy = "use the ca.pem of that replica's cluster, or the address of a replica of this one"
        return AttemptFailed(sentence, code=UNTRUSTED, may_have_arrived=False, remedy=remedy)

    def _client_refused(self, address: Address, error: ssl.SSLError) -> AttemptFailed:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        mine = describe_certificate(self._tls.certificate)
        return AttemptFailed(
            f"{address} refused {mine}: {reason}",
            code=UNTRUSTED,
            may_have_arrived=False,
            remedy="use a certificate that the authority of that replica's cluster issued",
        )


def _answer(response: aiohttp.ClientResponse, body: bytes) -> Answer:
    return Answer(response.status, body, response.headers.get("Location"), response.headers.get("Retry-After"))


async def _read_bounded(response: aiohttp.ClientResponse, address: Address) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        size_bytes += len(chunk)
        if size_bytes > ANSWER_BYTES_MAX:
            response.close()
            raise AttemptFailed(
                f"the answer of {address} has more than {ANSWER_BYTES_MAX} bytes",
                code=ANSWER_TOO_LARGE,
                may_have_arrived=True,
                remedy="ask for less, for example with a limit",
            )
        parts.append(chunk)
    return b"".join(parts)


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the TLS error in the chain of causes of `error`, if any."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLError):
            return seen
        inner = getattr(seen, "os_error", None)
        if isinstance(inner, ssl.SSLError):
            return inner
        seen = seen.__cause__ or seen.__context__
    return None


def _is_alert(error: ssl.SSLError) -> bool:
    return "ALERT" in (error.reason or "").upper() or "certificate required" in str(error).lower()
