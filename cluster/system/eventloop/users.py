"""The numbers of users and groups, looked up where they are printed.

The State knows users by name, as certificates do; Slurm prints `alice(1001)`. The numbers belong to the machines, not
to what replicas agree on, so the replica that answers asks its own name service: in a thread, since that may be a
directory server that does not answer; with an answer kept for a while; and for no longer than a person waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from cluster.system import Clock, uid_of
from cluster.system.eventloop.name_service import Lookups

LOGGER = logging.getLogger(__name__)

KEPT_S = 300.0
"""How long an answer of the name service is believed, seconds: as nscd does by default for names that are unknown."""

KEPT_MAX = 10_000
"""Answers kept, count: more users than a cluster has; beyond it all are asked again."""

WAIT_S = 1.0
"""How long one answer of the API waits for the name service, seconds; what is not known by then is left out."""

ASKED_MAX = 1_000
"""Names asked about for one answer, count."""

Lookup = Callable[[str], int | None]


class Identities:
    """The name service of this machine as the API uses it."""

    def __init__(self, clock: Clock, *, lookup: Lookup = uid_of, wait_s: float = WAIT_S) -> None:
        """`lookup` is what may take long."""
        self._clock = clock
        self._wait_s = wait_s
        self._known: dict[str, tuple[int | None, float]] = {}
        self._lookups = Lookups(lookup, self._note)

    async def uids(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the uid of each name, None where it is unknown or the name service took too long."""
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
