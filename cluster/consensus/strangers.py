"""Why a connection between replicas did not come about, said as a sentence, and not more often than a person reads.

A peer with a wrong certificate tries again every second for as long as nobody helps it. So the first line says which
check failed, who it was as far as that is known, and what would be right; the next one comes after a while, with how
often it has happened since.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Final

from cluster.consensus.frames import FrameRefused
from cluster.consensus.seldom import Seldom
from cluster.security import NotIdentified

_log = logging.getLogger(__name__)

_OWN_AUTHORITY: Final = "replicas need certificates of the cluster's own authority (`forebay certificate issue`)"

_SENTENCES: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": f"it shows no certificate; {_OWN_AUTHORITY}",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3; only replicas of Forebay may use the peer address",
    "HTTP_REQUEST": "it speaks HTTP without TLS; people and tools use the API address",
    "WRONG_VERSION_NUMBER": "it does not speak TLS; only replicas of Forebay may use the peer address",
    "TLSV1_ALERT_UNKNOWN_CA": f"it does not trust this replica's certificate; {_OWN_AUTHORITY}, all of the same",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": f"it wants a certificate of this replica; {_OWN_AUTHORITY}",
}
"""What OpenSSL calls the failure of a handshake, and what it means here."""


def why(error: BaseException) -> str:
    """Return which check failed and what would be right; never empty."""
    match error:
        case NotIdentified() | FrameRefused():
            return str(error)
        case ssl.SSLCertVerificationError():
            message = getattr(error, "verify_message", None) or _reason(error)
            return f"its certificate does not pass ({message}); {_OWN_AUTHORITY}"
        case ssl.SSLError():
            reason = _reason(error)
            return _SENTENCES.get(reason) or f"the TLS handshake failed ({reason}); {_OWN_AUTHORITY}"
        case TimeoutError():
            return "it did not finish the TLS handshake in time; it is overloaded, or no replica"
        case ConnectionRefusedError():
            return "nobody listens there: it is down, or its address in the configuration is another"
        case ConnectionError():
            return (
                "it closed the connection at once: it does not accept this replica's certificate or name, or it went "
                "away; its own log says which"
            )
        case OSError() if error.strerror:
            return error.strerror
    return str(error) or type(error).__name__


def _reason(error: ssl.SSLError) -> str:
    """What OpenSSL says; one that Python makes itself has no reason."""
    return getattr(error, "reason", None) or str(error) or type(error).__name__


def check_of(error: BaseException) -> str:
    """Return a short name of the check that failed, of which there are few; who holds a certificate is part of it."""
    if isinstance(error, ssl.SSLError):
        return _reason(error)
    return str(error) if isinstance(error, NotIdentified) else type(error).__name__


class Strangers:
    """Logs who was turned away, one line for each peer and check in PERIOD_S."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._seldom = Seldom(now_s)
        self.count = 0
        """How often anybody was turned away, or turned us away, since the start."""

    def note(self, peer: str, sentence: str, error: BaseException, *, level: int = logging.WARNING) -> None:
        """Log `sentence` and why, unless the same was said of that peer shortly before."""
        self.count += 1
        more = self._seldom.due(peer, check_of(error))
        if more is not None:
            _log.log(level, "%s: %s%s", sentence, why(error), more)
