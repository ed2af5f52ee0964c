"""Name-service lookups that decide about permissions: off the event loop, cached, and never guessed.

One thread does the lookups, because a directory server may hang. An answer stays valid for a while, and longer while
the service does not respond. Without an answer, callers get an error: an unknown result is neither yes nor no.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from forebay.cluster.system import Clock

KEPT_S: Final = 60.0
"""Validity of an answer, seconds: an account removed from a group loses access a minute later."""

KEPT_SILENT_S: Final = 600.0
"""Validity of an answer while the service does not respond, seconds."""

KEPT_MAX: Final = 10_000
"""Maximum number of cached answers: more accounts than a cluster has; the oldest is dropped first."""

WAIT_S: Final = 2.0
"""Maximum time a request waits for an answer, seconds."""

WAITING_MAX: Final = 1_000
"""Maximum number of lookups waiting for the thread."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class NotKnownNow(Exception):
    """The name service has not answered a lookup in time; the message gives the key."""


class Lookups(Generic[K, V]):
    """Lookup thread with its waiting callers; concurrent requests for a key share one lookup."""

    def __init__(self, lookup: Callable[[K], V], note: Callable[[K, asyncio.Future[V]], None]) -> None:
        """Initialize. `lookup` may block; callers get any exception of it as an OSError.

        `note` receives each result on the loop.
        """
        self._lookup = lookup
        self._note = note
        self.under_way: dict[K, asyncio.Future[V]] = {}
        self._asked: SimpleQueue[tuple[K, asyncio.Future[V]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, key: K) -> asyncio.Future[V]:
        """Return the future of a lookup, and start it unless it is running."""
        waiting = self.under_way.get(key)
        if waiting is None or waiting.get_loop() is not asyncio.get_running_loop():
            waiting = self.under_way[key] = asyncio.get_running_loop().create_future()
            waiting.add_done_callback(lambda done: self._ended(key, done))
            self._asked.put((key, waiting))
            if self._thread is None:
                # A daemon thread: a hanging name service must not keep this process from ending.
                self._thread = threading.Thread(target=self._work, name="name-service", daemon=True)
                self._thread.start()
        return waiting

    def _work(self) -> None:
        while True:
            key, waiting = self._asked.get()
            error: OSError | None = None
            found: V | None = None
            try:
                found = self._lookup(key)
            except Exception as raised:
                error = raised if isinstance(raised, OSError) else OSError(str(raised))
            with suppress(RuntimeError):  # the loop may be closed
                waiting.get_loop().call_soon_threadsafe(_settle, waiting, found, error)

    def _ended(self, key: K, done: asyncio.Future[V]) -> None:
        self.under_way.pop(key, None)
        if not done.cancelled():
            self._note(key, done)


def _settle(waiting: asyncio.Future[Any], found: object, error: OSError | None) -> None:
    if waiting.done():
        return
    if error is None:
        waiting.set_result(found)
    else:
        waiting.set_exception(error)


class NameService(Generic[K, V]):
    """Cached name service: `lookup` may block, and raises OSError if it has no answer."""

    def __init__(self, lookup: Callable[[K], V], clock: Clock, *, wait_s: float = WAIT_S) -> None:
        self._clock = clock
        self._wait_s = wait_s
        self._known: dict[K, tuple[V, float]] = {}
        self._lookups = Lookups(lookup, self._note)

    def cached(self, key: K) -> V | None:
        """Return a fresh cached answer, or None if a lookup is needed."""
        found = self._known.get(key)
        return found[0] if found is not None and self._clock.monotonic_s() < found[1] + KEPT_S else None

    async def ask(self, key: K) -> V:
        """Return the answer of the name service.

        Raises:
            NotKnownNow: The name service did not answer in time.
        """
        found, now_s = self._known.get(key), self._clock.monotonic_s()
        if found is not None and now_s < found[1] + KEPT_S:
            return found[0]
        if key in self._lookups.under_way or len(self._lookups.under_way) < WAITING_MAX:
            with suppress(TimeoutError, OSError):
                return await asyncio.wait_for(asyncio.shield(self._lookups.begin(key)), self._wait_s)
        if found is not None and now_s < found[1] + KEPT_SILENT_S:
            return found[0]
        raise NotKnownNow(f"the name service of this machine did not answer for {key!r:.120}")

    def _note(self, key: K, done: asyncio.Future[V]) -> None:
        if done.exception() is not None:
            return
        self._known.pop(key, None)
        while len(self._known) >= KEPT_MAX:
            del self._known[next(iter(self._known))]
        self._known[key] = (done.result(), self._clock.monotonic_s())
