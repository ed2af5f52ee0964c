"""Open connections of one replica by the certificates that they showed: each ends with its certificate.

TLS looks at a certificate once, in the handshake. A connection outlives that for as long as somebody keeps it open, so
every listener and every link has its connections watched here: they are closed when the certificate expires, when it is
revoked, and when the authorities of this replica change.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

from cluster.security.identity import Identity, IdentityError, Role, identify
from cluster.security.tls import valid_until
from cluster.system import Clock
from replica.model import Revocation
from replica.values import Instant

LOGGER = logging.getLogger(__name__)

CHECK_PERIOD_S: Final = 0.25
"""Seconds between two checks of all connections: what is revoked is out within a second of the entry that says so.
Five thousand connections take about a millisecond."""


class PeerCertificate(msgspec.Struct, frozen=True):
    """What the other end of a connection showed."""

    identity: Identity
    serial: str
    """Hexadecimal digits, lower case, without leading zeros."""
    valid_until: Instant
    revocable_as: tuple[str, ...] = ()
    """Under which words it may be in the list of what is revoked (`replica.model.accounts`)."""
    through: str = ""
    """Who vouches for an account that has shown no certificate itself: `gateway:NAME`, or `munge`; empty: nobody."""


THROUGH_MUNGE: Final = "munge"
"""`through` of whoever came with a MUNGE credential."""


def revocable_as(identity: Identity, serial: str, through: str = "") -> tuple[str, ...]:
    """Return under which words somebody may be in the list of what is revoked.

    An account that others vouch for is one of the site's users whatever else it is: `user:NAME` keeps it out on every
    way, as does what is said of its gateway, or of the gateway's certificate.
    """
    words = [f"serial:{serial}"] if serial else []
    words.append(f"{identity.role}:{identity.name}")
    if through:
        words += [through, f"{Role.USER}:{identity.name}"]
    return tuple(dict.fromkeys(words))


Revocations = Callable[[], Mapping[str, Revocation]]
"""Gives the list in force; another object whenever it has changed."""

_NONE_REVOKED: Final[Mapping[str, Revocation]] = {}


def certificate_shown(transport: asyncio.BaseTransport | None, cluster_id: str) -> PeerCertificate:
    """Return what the other end of a TLS connection showed; IdentityError for nobody of this cluster."""
    shown: dict[str, Any] = (transport.get_extra_info("peercert") if transport is not None else None) or {}
    identity = identify(shown, cluster_id=cluster_id)
    serial = str(shown.get("serialNumber", "")).lower().lstrip("0")
    return PeerCertificate(identity, serial, valid_until(shown), revocable_as(identity, serial))


class Peers:
    """Connections that are open, each with what its other end showed."""

    def __init__(self, cluster_id: str, clock: Clock) -> None:
        """Begin with none; nothing is revoked until `follow` says what is."""
        self._cluster_id: Final = cluster_id
        self._clock: Final = clock
        self._open: dict[asyncio.BaseTransport, PeerCertificate] = {}
        self._revocations: Revocations = lambda: _NONE_REVOKED
        self._seen = _NONE_REVOKED
        """The list by which all connections were checked last."""
        self._ticker: asyncio.TimerHandle | None = None
        self.checks: list[Callable[[], None]] = []
        """What else is done with each check."""

    @property
    def count(self) -> int:
        """How many connections are watched."""
        return len(self._open)

    def follow(self, revocations: Revocations) -> None:
        """Refuse what is in the list from now on, and with each check close the connections of what came into it."""
        self._revocations = revocations

    def admit(self, transport: asyncio.BaseTransport) -> Identity:
        """Return who is at the other end, and watch the connection until `forget`.

        IdentityError for nobody of this cluster, and where the certificate is not good any more.
        """
        shown = certificate_shown(transport, self._cluster_id)
        why = self._why_not(shown, self._revocations())
        if why:
            raise IdentityError(why)
        self._open[transport] = shown
        return shown.identity

    def certificate_of(self, transport: asyncio.BaseTransport) -> PeerCertificate:
        """Return what the other end of a connection that is watched showed; KeyError for others."""
        return self._open[transport]

    def speak(self, transport: asyncio.BaseTransport | None, shown: PeerCertificate | None) -> None:
        """Watch a connection as that of an account it is used for from now on; None: as nobody's in particular.

        IdentityError where that account, or who vouches for it, may not come.
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
        """Watch a connection no more: it has ended."""
        if transport is not None:
            self._open.pop(transport, None)

    def start(self) -> None:
        """Check all connections every CHECK_PERIOD_S, in the running loop."""
        self._ticker = asyncio.get_running_loop().call_later(CHECK_PERIOD_S, self.start)
        self.check()
        for check in self.checks:
            check()

    def stop(self) -> None:
        """Check no more."""
        if self._ticker is not None:
            self._ticker.cancel()

    def check(self) -> None:
        """Close the connections whose certificate is not good any more."""
        revocations = self._revocations()
        changed, self._seen = revocations is not self._seen, revocations
        for transport, shown in list(self._open.items()):
            why = self._why_not(shown, revocations if changed else _NONE_REVOKED)
            if why:
                LOGGER.warning("a connection of %s is closed: %s", shown.identity, why)
                self._close(transport)

    def close_all(self) -> None:
        """Close all connections: who may still come comes again."""
        for transport in list(self._open):
            self._close(transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.forget(transport)
        cast(asyncio.Transport, transport).abort()  # uvloop's is none by inheritance

    def _why_not(self, shown: PeerCertificate, revocations: Mapping[str, Revocation]) -> str:
        if self._clock.now() > shown.valid_until:
            if shown.through:
                return f"{shown.through} has vouched for {shown.identity} for long enough; come again"
            return f"the certificate of {shown.identity} has expired; issue a new one"
        for key in shown.revocable_as if revocations else ():
            found = revocations.get(key)
            if found is not None:
                return f"{key} was revoked by {found.by}{f': {found.reason}' if found.reason else ''}"
        return ""
