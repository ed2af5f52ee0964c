"""Numeric IDs of users and groups, looked up for display.

The State identifies users by name, as certificates do; Slurm prints `alice(1001)`. The numbers belong to the machines,
not to the replicated state, so the answering replica asks its own name service. The lookup runs in a thread, because a
directory server may hang. Answers are cached, and a request waits only for a short time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from forebay.cluster.system import Clock, uid_of
from forebay.cluster.system.eventloop.name_service import Lookups

LOGGER = logging.getLogger(__name__)

KEPT_S = 300.0
"""Validity of a name-service answer, seconds: nscd's default for unknown names."""

KEPT_MAX = 10_000
"""Maximum number of cached answers: more users than a cluster has. A full cache is cleared."""

WAIT_S = 1.0
"""Time limit of the name service for an API answer, seconds; after it unknown numbers are omitted."""

ASKED_MAX = 1_000
"""Maximum number of names looked up for one answer."""

Lookup = Callable[[str], int | None]


class Identities:
    """Name service of this machine for the API."""

    def __init__(self, clock: Clock, *, lookup: Lookup = uid_of, wait_s: float = WAIT_S) -> None:
        """Begin with an empty cache; `lookup` may block."""
        self._clock = clock
        self._wait_s = wait_s
        self._known: dict[str, tuple[int | None, float]] = {}
        self._lookups = Lookups(lookup, self._note)

    async def uids(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the UID of each name; None if it is unknown or the name service took too long."""
        now_s = self._clock.monotonic_s()
        wanted = list(dict.fromkeys(names))
        unknown = [name for name in wanted if not self._is_fresh(name, now_s)]
        asked = [self._lookups.begin(name) for name in unknown[:ASKED_MAX]]
        if asked:
            await asyncio.wait(asked, timeout=self._wait_s)
        return {name: self._known.get(name, (None, 0.0))[0] for name in wanted}

    def _is_fresh(self, name: str, now_s: float) -> bool:
        return name in self._known and now_s < self._known[name][1] + KEPT_S

    def _note(self, name: str, done: asyncio.Future[int | None]) -> None:
        error = done.exception()
        if error is not None:
            LOGGER.info("the uid of %s could not be looked up: %s", name, error)
        if len(self._known) >= KEPT_MAX:
            self._known.clear()
        self._known[name] = None if error is not None else done.result(), self._clock.monotonic_s()
