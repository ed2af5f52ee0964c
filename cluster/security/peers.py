"""Open connections of one replica by certificate. A connection ends when its certificate does.

TLS checks a certificate only in the handshake, but the connection can outlive the certificate. All listeners and links
therefore register their connections here. Connections are closed when the certificate expires or is revoked, or when
the authorities of this replica change.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

from forebay.cluster.security.identity import Identity, IdentityError, Role, identify
from forebay.cluster.security.tls import valid_until
from forebay.cluster.system import Clock
from forebay.replica.model import Revocation
from forebay.replica.values import Instant

LOGGER = logging.getLogger(__name__)

CHECK_PERIOD_S: Final = 0.25
"""Interval of checks of all connections, seconds: connections of a revoked certificate end within a second.

Five thousand connections take about a millisecond.
"""


class PeerCertificate(msgspec.Struct, frozen=True):
    """Identity and certificate of a connection's peer."""

    identity: Identity
    serial: str
    """Hexadecimal digits, lower case, without leading zeros."""
    valid_until: Instant
    revocable_as: tuple[str, ...] = ()
    """Keys under which the revocation list can contain it (`replica.model.accounts`)."""
    through: str = ""
    """Authenticator of an account without a certificate: `gateway:NAME` or `munge`; empty for a certificate's holder.
    """


THROUGH_MUNGE: Final = "munge"
"""`through` of a client with a MUNGE credential."""


def revocable_as(identity: Identity, serial: str, through: str = "") -> tuple[str, ...]:
    """Return the keys under which the revocation list can contain a peer.

    An account authenticated by a gateway or MUNGE is always also a user. `user:NAME` therefore excludes it everywhere,
    and so does a revocation of the gateway or of the gateway's certificate.
    """
    words = [f"serial:{serial}"] if serial else []
    words.append(f"{identity.role}:{identity.name}")
    if through:
        words += [through, f"{Role.USER}:{identity.name}"]
    return tuple(dict.fromkeys(words))


Revocations = Callable[[], Mapping[str, Revocation]]
"""Returns the current revocation list: a different object after each change."""

_NONE_REVOKED: Final[Mapping[str, Revocation]] = {}


def certificate_shown(transport: asyncio.BaseTransport | None, cluster_id: str) -> PeerCertificate:
    """Return the certificate of a TLS connection's peer.

    Raises:
        IdentityError: The peer does not belong to this cluster.
    """
    shown: dict[str, Any] = (transport.get_extra_info("peercert") if transport is not None else None) or {}
    identity = identify(shown, cluster_id=cluster_id)
    serial = str(shown.get("serialNumber", "")).lower().lstrip("0")
    return PeerCertificate(identity, serial, valid_until(shown), revocable_as(identity, serial))


class Peers:
    """Watched connections, each with the peer's certificate."""

    def __init__(self, cluster_id: str, clock: Clock) -> None:
        """Start without connections. Before `follow` no certificate counts as revoked."""
        self._cluster_id: Final = cluster_id
        self._clock: Final = clock
        self._open: dict[asyncio.BaseTransport, PeerCertificate] = {}
        self._revocations: Revocations = lambda: _NONE_REVOKED
        self._seen = _NONE_REVOKED
        """Revocation list used by the last check."""
        self._ticker: asyncio.TimerHandle | None = None
        self.checks: list[Callable[[], None]] = []
        """Further callbacks of each check."""

    @property
    def count(self) -> int:
        """Return the number of registered connections."""
        return len(self._open)

    def follow(self, revocations: Revocations) -> None:
        """Use this revocation list: reject certificates on it, and close connections of new entries at each check."""
        self._revocations = revocations

    def admit(self, transport: asyncio.BaseTransport) -> Identity:
        """Return the identity of a connection's peer, and watch the connection until `forget`.

        Raises:
            IdentityError: The peer does not belong to this cluster, or its certificate is no longer valid.
        """
        shown = certificate_shown(transport, self._cluster_id)
        why = self._why_not(shown, self._revocations())
        if why:
            raise IdentityError(why)
        self._open[transport] = shown
        return shown.identity

    def certificate_of(self, transport: asyncio.BaseTransport) -> PeerCertificate:
        """Return the peer certificate of a watched connection.

        Raises:
            KeyError: The connection is not watched.
        """
        return self._open[transport]

    def speak(self, transport: asyncio.BaseTransport | None, shown: PeerCertificate | None) -> None:
        """Record the account that uses a connection now; None if no particular account uses it.

        Raises:
            IdentityError: The account or its authenticator is revoked.
        """
        if transport is None:
            raise IdentityError("the connection has ended")
        if shown is None:
            self._open.pop(transport, None)
            return
        why = self._why_not(shown, self._revocations())
        if why:
            raise IdentityError(why)
        self._open[transport] = shown

    def forget(self, transport: asyncio.BaseTransport | None) -> None:
        """Stop watching a connection that has ended."""
        if transport is not None:
            self._open.pop(transport, None)

    def start(self) -> None:
        """Check all connections every CHECK_PERIOD_S in the running loop."""
        self._ticker = asyncio.get_running_loop().call_later(CHECK_PERIOD_S, self.start)
        self.check()
        for check in self.checks:
            check()

    def stop(self) -> None:
        """Stop the checks."""
        if self._ticker is not None:
            self._ticker.cancel()

    def check(self) -> None:
        """Close the connections whose certificate is no longer valid."""
        revocations = self._revocations()
        changed, self._seen = revocations is not self._seen, revocations
        for transport, shown in list(self._open.items()):
            why = self._why_not(shown, revocations if changed else _NONE_REVOKED)
            if why:
                LOGGER.warning("a connection of %s is closed: %s", shown.identity, why)
                self._close(transport)

    def close_all(self) -> None:
        """Close all connections; permitted peers reconnect."""
        for transport in list(self._open):
            self._close(transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.forget(transport)
        cast(asyncio.Transport, transport).abort()  # uvloop's transport does not inherit from asyncio.Transport

    def _why_not(self, shown: PeerCertificate, revocations: Mapping[str, Revocation]) -> str:
        if self._clock.now() > shown.valid_until:
            if shown.through:
                return f"the identity assertion of {shown.through} for {shown.identity} has expired; connect again"
            return f"the certificate of {shown.identity} has expired; issue a new one"
        for key in shown.revocable_as if revocations else ():
            found = revocations.get(key)
            if found is not None:
                return f"{key} was revoked by {found.by}{f': {found.reason}' if found.reason else ''}"
        return ""
