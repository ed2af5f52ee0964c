"""The numbers of users and groups, looked up where they are printed.

The State knows users by name, as certificates do; Slurm prints `alice(1001)`. The numbers belong to the machines, not
to what replicas agree on, so the replica that answers asks its own name service: in a thread, since that may be a
directory server that does not answer; with an answer kept for a while; and for no longer than a person waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue

from cluster.system import Clock, uid_of

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
        self._lookup = lookup
        self._wait_s = wait_s
        self._known: dict[str, tuple[int | None, float]] = {}
        self._under_way: dict[str, asyncio.Future[int | None]] = {}
        self._asked: SimpleQueue[tuple[str, asyncio.Future[int | None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def uids(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the uid of each name, None where it is unknown or the name service took too long."""
        now_s = self._clock.monotonic_s()
        wanted = list(dict.fromkeys(names))
        unknown = [name for name in wanted if not self._is_fresh(name, now_s)]
        asked = [self._ask(name) for name in unknown[:ASKED_MAX]]
        if asked:
            await asyncio.wait(asked, timeout=self._wait_s)
        return {name: self._known.get(name, (None, 0.0))[0] for name in wanted}

    def _is_fresh(self, name: str, now_s: float) -> bool:
        return name in self._known and now_s < self._known[name][1] + KEPT_S

    def _ask(self, name: str) -> asyncio.Future[int | None]:
        waiting = self._under_way.get(name)
        if waiting is None or waiting.get_loop() is not asyncio.get_running_loop():
            waiting = self._under_way[name] = asyncio.get_running_loop().create_future()
            waiting.add_done_callback(lambda done: self._note(name, done))
            self._asked.put((name, waiting))
            if self._thread is None:
                # A daemon: a name service that hangs must not keep this process from ending.
                self._thread = threading.Thread(target=self._work, name="identities", daemon=True)
                self._thread.start()
        return waiting

    def _work(self) -> None:
        while True:
            name, waiting = self._asked.get()
            found: int | None = None
            error: Exception | None = None
            try:
                found = self._lookup(name)
            except Exception as raised:
                error = raised
            # The loop may be closed when the replica stopped meanwhile.
            with suppress(RuntimeError):
                waiting.get_loop().call_soon_threadsafe(_answer, waiting, found, error)

    def _note(self, name: str, done: asyncio.Future[int | None]) -> None:
        self._under_way.pop(name, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            LOGGER.info("the uid of %s could not be looked up: %s", name, error)
        if len(self._known) >= KEPT_MAX:
            self._known.clear()
        self._known[name] = None if error is not None else done.result(), self._clock.monotonic_s()


def _answer(waiting: asyncio.Future[int | None], found: int | None, error: Exception | None) -> None:
    if waiting.done():
        return
    if error is None:
        waiting.set_result(found)
    else:
        waiting.set_exception(error)
