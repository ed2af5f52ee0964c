"""One request to one replica: what came back, or how exactly it failed, in the same words however it was sent.

Two exchanges send requests: many at a time on an event loop (`exchange`), or one at a time, for a command that is typed
(`blocking`). Nothing is retried here and no redirect is followed: `cluster.client.calls` decides that. What matters is
whether the request may have reached the replica, because then its outcome is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from cluster.client.errors import ANSWER_TOO_LARGE, NO_ANSWER, UNREACHABLE, UNTRUSTED, ApiError
from cluster.system import Address

if TYPE_CHECKING:
    # Whoever comes by a gateway loads no TLS.
    import ssl

    from cluster.security import TlsFiles

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest answer that is read, bytes: a list of 50,000 jobs; nobody can fill a client's memory."""

CHUNK_BYTES: Final = 64 * 1024
"""Bytes read at once, so that the bound above is checked before memory is taken."""

IDLE_CONNECTION_S: Final = 30.0
"""Seconds that an unused connection is kept: below the server's own limit, so that no request meets a closing one."""

CONNECT_SHARE_MAX: Final = 0.9
"""Share of a request's time that connecting may take: it must end first, for only then has nothing arrived for sure."""

ATTEMPT_HEADER: Final = "Forebay-Attempt"
"""Header of an answer that is no replica's: its body is an AttemptView."""

_HOST_MISMATCHES: Final = frozenset({62, 64})
_CERTIFICATE_NOT_YET_VALID: Final = 9
_CERTIFICATE_HAS_EXPIRED: Final = 10


class HttpResponse(msgspec.Struct, frozen=True):
    """A complete answer; `location` and `retry_after` are headers, None where they are missing.

    `unsure`: an earlier request of the same call got no answer and may have been carried out.
    """

    status: int
    body: bytes
    location: str | None = None
    retry_after: str | None = None
    unsure: bool = False


class AttemptError(ApiError):
    """A request that got no complete answer.

    `may_have_arrived`: the replica may have carried it out. `untrusted`: one side refused the other's certificate, so
    that asking again cannot help.
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
        """Whether the machine itself said that nothing listens at the address."""

    @property
    def is_untrusted(self) -> bool:
        """Whether a certificate was refused."""
        return self.code == UNTRUSTED


class AttemptView(msgspec.Struct, frozen=True):
    """An AttemptError as a gateway tells it."""

    code: str
    sentence: str
    remedy: str
    may_have_arrived: bool
    nobody_listens: bool

    @classmethod
    def of(cls, failure: AttemptError) -> AttemptView:
        """Return a failure as it is told."""
        return cls(failure.code, failure.sentence, failure.remedy, failure.may_have_arrived, failure.nobody_listens)

    def failure(self) -> AttemptError:
        """Return it as the client has it."""
        return AttemptError(
            self.sentence,
            code=self.code,
            may_have_arrived=self.may_have_arrived,
            remedy=self.remedy,
            nobody_listens=self.nobody_listens,
        )


class Sending(Protocol):
    """What carries requests to replicas with one identity."""

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> HttpResponse:
        """Send one request and return the answer, whatever its status; AttemptError if there is none in time.

        `connect_s`: how long a new connection may take, TLS handshake included; an answer may take until `timeout_s`.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def unreachable(address: Address, error: OSError) -> AttemptError:
    """Return the failure to connect to a replica."""
    reason = error.strerror or str(error)
    nobody = isinstance(error, ConnectionRefusedError)
    return AttemptError(f"{address} cannot be reached ({reason})", may_have_arrived=False, nobody_listens=nobody)


def no_handshake(address: Address, connect_s: float) -> AttemptError:
    """Return the failure of a replica that was connected to, or not even that, and did not shake hands in time."""
    return AttemptError(f"{address} did not finish a handshake within {connect_s:.3g} s", may_have_arrived=False)


def no_answer(address: Address, timeout_s: float) -> AttemptError:
    """Return the failure of a replica that was asked and did not answer in time."""
    return AttemptError(f"{address} did not answer within {timeout_s:.3g} s", may_have_arrived=True)


def broken(address: Address, error: Exception, tls: TlsFiles | None) -> AttemptError:
    """Return the failure of a connection that ended before the answer was complete."""
    return AttemptError(
        f"the connection to {address} broke before the answer was complete ({error or type(error).__name__})",
        may_have_arrived=True,
        # TLS 1.3 lets a server refuse a client after the handshake; asyncio then closes without an alert.
        remedy="" if tls is None else f"if every replica does this, it may be refusing {_shown_certificate(tls)}",
    )


def server_refused(address: Address, error: Exception, tls: TlsFiles) -> AttemptError:
    """Say why the certificate of a replica was refused, and whose signature was expected."""
    code = getattr(error, "verify_code", None)
    if code in _HOST_MISMATCHES:
        sentence = f"the certificate of {address} is for another address"
        remedy = f"issue the replica a certificate that names {address.host}"
    elif code in (_CERTIFICATE_HAS_EXPIRED, _CERTIFICATE_NOT_YET_VALID):
        when = "has expired" if code == _CERTIFICATE_HAS_EXPIRED else "is not valid yet"
        sentence = f"the certificate of {address} {when}"
        remedy = "issue a new one, or set this machine's clock"
    else:
        from cluster.security import describe_authority

        expected = describe_authority(tls.authority)
        sentence = f"the certificate of {address} is not signed by the expected authority, {expected}"
        remedy = "use the ca.pem of that replica's cluster, or the address of a replica of this one"
    return AttemptError(sentence, code=UNTRUSTED, may_have_arrived=False, remedy=remedy)


def client_refused(address: Address, error: ssl.SSLError, tls: TlsFiles) -> AttemptError:
    """Say that a replica refused our certificate, and which that is."""
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return AttemptError(
        f"{address} refused {_shown_certificate(tls)}: {reason}",
        code=UNTRUSTED,
        may_have_arrived=False,
        remedy="use a certificate that the authority of that replica's cluster issued",
    )


def too_large(address: Address, bytes_max: int) -> AttemptError:
    """Return the failure of an answer that nobody reads to its end."""
    return AttemptError(
        f"the answer of {address} has more than {bytes_max} bytes",
        code=ANSWER_TOO_LARGE,
        may_have_arrived=True,
        remedy="ask for less, for example with a limit",
    )


def _shown_certificate(tls: TlsFiles) -> str:
    from cluster.security import describe_certificate

    return "who shows no certificate" if tls.shows_nothing else describe_certificate(tls.certificate)


def is_alert(error: ssl.SSLError) -> bool:
    """Say whether the other side said that it refuses us."""
    return "ALERT" in (error.reason or "").upper() or "certificate required" in str(error).lower()
