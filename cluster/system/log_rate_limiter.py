"""Log rate limiter for messages that peers can cause at will: one of each kind per period, with a count of others."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

PERIOD_S: Final = 60.0
"""Minimum time between two messages of one kind, seconds."""

KEYS_MAX: Final = 256
"""Maximum number of kinds remembered. The least recently used kind is dropped first."""


class _Logged(NamedTuple):
    at_s: float
    since: int


class LogRateLimiter:
    """Times of the last message of each kind; a kind is a peer and an event."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._logged: OrderedDict[tuple[str, str], _Logged] = OrderedDict()

    def due(self, peer: str, what: str) -> str | None:
        """Return a suffix for a message about `what` of `peer`, maybe empty; None if it must not be logged."""
        now_s, key = self._now_s(), (peer, what)
        logged = self._logged.pop(key, None)
        if logged is not None and now_s - logged.at_s < PERIOD_S:
            self._logged[key] = logged._replace(since=logged.since + 1)
            return None
        self._logged[key] = _Logged(now_s, 0)
        if len(self._logged) > KEYS_MAX:
            self._logged.popitem(last=False)
        if logged is None or not logged.since:
            return ""
        return f" ({logged.since} times more in the last {now_s - logged.at_s:.0f} s)"

    def log(
        self, logger: logging.Logger, level: int, sentence: str, kind: str, fault: BaseException | None = None
    ) -> None:
        """Log a message, with the traceback of a fault, unless one of its kind was logged recently.

        The kind does not include the peer, because a client can use any number of addresses.
        """
        more = self.due("", kind)
        if more is not None:
            logger.log(level, "%s%s", sentence, more, exc_info=fault)
