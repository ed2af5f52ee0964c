"""Request to a replica: its response or its exact failure, in the same terms for every transport.

Two exchanges send requests: `exchange` many at a time on an event loop, `blocking` one at a time for the CLI. Neither
retries nor follows redirects; `cluster.client.calls` does. A failure states whether the request may have reached the
replica, because its outcome is then unknown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from forebay.cluster.client.errors import ANSWER_TOO_LARGE, NO_ANSWER, UNREACHABLE, UNTRUSTED, ApiError
from forebay.cluster.system import Address

if TYPE_CHECKING:
    # Access through a gateway needs no TLS.
    import ssl

    from forebay.cluster.security import TlsFiles

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest response read, bytes: a list of 50,000 jobs. Bounds the client's memory."""

CHUNK_BYTES: Final = 64 * 1024
"""Bytes per read, so that the bound above is checked before memory is allocated."""

IDLE_CONNECTION_S: Final = 30.0
"""Lifetime of an idle connection, seconds: below the server's limit, so that no request meets a closing connection."""

CONNECT_SHARE_MAX: Final = 0.9
"""Share of a request's time available for connecting.

A failed connect proves that nothing arrived, so it must end first.
"""

ATTEMPT_HEADER: Final = "Forebay-Attempt"
"""Header of a response from a gateway instead of a replica; its body is an AttemptView."""

_HOST_MISMATCHES: Final = frozenset({62, 64})
_CERTIFICATE_NOT_YET_VALID: Final = 9
_CERTIFICATE_HAS_EXPIRED: Final = 10


class HttpResponse(msgspec.Struct, frozen=True):
    """A complete response; missing `location` and `retry_after` headers are None.

    `unsure`: an earlier request of the same call got no response and may have taken effect.
    """

    status: int
    body: bytes
    location: str | None = None
    retry_after: str | None = None
    unsure: bool = False


class AttemptError(ApiError):
    """A request without a complete response.

    `may_have_arrived`: the replica may have executed it. `untrusted`: one side rejected the other's certificate, so
    retries are useless.
    """

    def __init__(
        self,
        sentence: str,
        *,
        code: str = UNREACHABLE,
        may_have_arrived: bool,
        remedy: str = "",
        nobody_listens: bool = False,
    ) -> None:
        super().__init__(NO_ANSWER, code, sentence, remedy=remedy)
        self.may_have_arrived = may_have_arrived
        self.nobody_listens = nobody_listens
        """True if the host reported that no process listens at the address."""

    @property
    def is_untrusted(self) -> bool:
        """Return True if a certificate was rejected."""
        return self.code == UNTRUSTED


class AttemptView(msgspec.Struct, frozen=True):
    """AttemptError as sent by a gateway."""

    code: str
    sentence: str
    remedy: str
    may_have_arrived: bool
    nobody_listens: bool

    @classmethod
    def of(cls, failure: AttemptError) -> AttemptView:
        """Convert a failure for sending."""
        return cls(failure.code, failure.sentence, failure.remedy, failure.may_have_arrived, failure.nobody_listens)

    def failure(self) -> AttemptError:
        """Convert a received view to an exception."""
        return AttemptError(
            self.sentence,
            code=self.code,
            may_have_arrived=self.may_have_arrived,
            remedy=self.remedy,
            nobody_listens=self.nobody_listens,
        )


class Sending(Protocol):
    """Transport of requests to replicas under one identity."""

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> HttpResponse:
        """Send one request and return the response with any status.

        `connect_s` limits a new connection including the TLS handshake; `timeout_s` limits the whole request.

        Raises:
            AttemptError: No complete response arrived in time.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class Streaming(Sending, Protocol):
    """Transport that can also read endless responses."""

    def stream(
        self, address: Address, target: str, *, connect_s: float, idle_s: float
    ) -> AbstractAsyncContextManager[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """Open a GET with an endless response: yield (response without body, chunks).

        A status other than 200 has a body and no chunks.

        Raises:
            AttemptError: The stream broke, or was silent for `idle_s`.
        """
        ...


@contextmanager
def connect_failures(address: Address, connect_s: float, tls: TlsFiles) -> Iterator[None]:
    """Convert every failure to connect, including the TLS handshake, into an AttemptError."""
    import ssl

    try:
        yield
    except TimeoutError as error:
        raise no_handshake(address, connect_s) from error
    except ssl.SSLCertVerificationError as error:
        raise server_refused(address, error, tls) from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise unreachable(address, error) from error
    except ssl.SSLError as error:
        raise client_refused(address, error, tls) from error
    except OSError as error:
        raise unreachable(address, error) from error


def unreachable(address: Address, error: OSError) -> AttemptError:
    """Return the error of a failed connection attempt."""
    reason = error.strerror or str(error)
    nobody = isinstance(error, ConnectionRefusedError)
    return AttemptError(f"{address} cannot be reached ({reason})", may_have_arrived=False, nobody_listens=nobody)


def no_handshake(address: Address, connect_s: float) -> AttemptError:
    """Return the error of a connection or TLS handshake that timed out."""
    return AttemptError(f"{address} did not finish a handshake within {connect_s:.3g} s", may_have_arrived=False)


def no_answer(address: Address, timeout_s: float) -> AttemptError:
    """Return the error of a replica that did not respond in time."""
    return AttemptError(f"{address} did not answer within {timeout_s:.3g} s", may_have_arrived=True)


def cause_of(error: Exception) -> str:
    """Return the text of an error; of asyncio's, which counts bytes, that the connection was closed."""
    return "the connection was closed" if isinstance(error, EOFError) else str(error) or type(error).__name__


def broken(address: Address, error: Exception, tls: TlsFiles | None) -> AttemptError:
    """Return the error of a connection that broke before the response was complete."""
    return AttemptError(
        f"the connection to {address} broke before the answer was complete ({cause_of(error)})",
        may_have_arrived=True,
        # A TLS 1.3 server can reject a client after the handshake; asyncio then reports a close without an alert.
        remedy="" if tls is None else f"if every replica does this, it may be rejecting {_shown_certificate(tls)}",
    )


def server_refused(address: Address, error: Exception, tls: TlsFiles) -> AttemptError:
    """Return the error of a rejected replica certificate, naming the expected authority."""
    code = getattr(error, "verify_code", None)
    if code in _HOST_MISMATCHES:
        sentence = f"the certificate of {address} is for another address"
        remedy = f"issue the replica a certificate that names {address.host}"
    elif code in (_CERTIFICATE_HAS_EXPIRED, _CERTIFICATE_NOT_YET_VALID):
        when = "has expired" if code == _CERTIFICATE_HAS_EXPIRED else "is not valid yet"
        sentence = f"the certificate of {address} {when}"
        remedy = "issue a new one, or set this machine's clock"
    else:
        from forebay.cluster.security import describe_authority

        expected = describe_authority(tls.authority)
        sentence = f"the certificate of {address} is not signed by the expected authority, {expected}"
        remedy = "use the ca.pem of that replica's cluster, or the address of a replica of this one"
    return AttemptError(sentence, code=UNTRUSTED, may_have_arrived=False, remedy=remedy)


def client_refused(address: Address, error: ssl.SSLError, tls: TlsFiles) -> AttemptError:
    """Return the error of a replica that rejected the client's certificate, naming that certificate."""
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return AttemptError(
        f"{address} rejected {_shown_certificate(tls)}: {reason}",
        code=UNTRUSTED,
        may_have_arrived=False,
        remedy="use a certificate that the authority of that replica's cluster issued",
    )


def too_large(address: Address, bytes_max: int) -> AttemptError:
    """Return the error of a response larger than `bytes_max`."""
    return AttemptError(
        f"the answer of {address} has more than {bytes_max} bytes",
        code=ANSWER_TOO_LARGE,
        may_have_arrived=True,
        remedy="request less, for example with a limit",
    )


def _shown_certificate(tls: TlsFiles) -> str:
    from forebay.cluster.security import describe_certificate

    return "a client without a certificate" if tls.shows_nothing else describe_certificate(tls.certificate)


def is_alert(error: ssl.SSLError) -> bool:
    """Return True if the peer rejected the connection with a TLS alert."""
    return "ALERT" in (error.reason or "").upper() or "certificate required" in str(error).lower()
