"""What a peer can make happen as often as it likes is said in the log once in a while, with how often it happened."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

PERIOD_S: Final = 60.0
"""Seconds between two lines about the same."""

KEYS_MAX: Final = 256
"""Of how many things it is remembered when they were said, count: for a further one, that of which nothing was heard
for longest is forgotten."""


class _Said(NamedTuple):
    at_s: float
    since: int


class Seldom:
    """Says whether it is time for a line about something."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._said: OrderedDict[tuple[str, str], _Said] = OrderedDict()

    def due(self, peer: str, what: str) -> str | None:
        """Return what to add to a line about `what` of `peer`, perhaps nothing; None if it was said shortly before."""
        now_s, key = self._now_s(), (peer, what)
        said = self._said.pop(key, None)
        if said is not None and now_s - said.at_s < PERIOD_S:
            self._said[key] = said._replace(since=said.since + 1)
            return None
        self._said[key] = _Said(now_s, 0)
        if len(self._said) > KEYS_MAX:
            self._said.popitem(last=False)
        return f" ({said.since} times more in the last {now_s - said.at_s:.0f} s)" if said and said.since else ""
