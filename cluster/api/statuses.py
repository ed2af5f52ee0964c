"""What each replica says of itself: asked some seconds apart while somebody looks, and not at all while nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from cluster.config import Config, ConfigError
from cluster.schemas import StatusView
from cluster.security import TlsError, TlsFiles, expiries
from cluster.server import Controller
from cluster.system import format_instant
from replica.values import NEVER, Instant

LOGGER = logging.getLogger(__name__)

FRESH_S = 5.0
"""How old a word may be before a replica is asked again, seconds."""

KEPT_S = 60.0
"""How long a word is shown of a replica that does not answer any more, seconds."""

FIRST_WAIT_S = 0.3
"""How long an answer waits for replicas that have said nothing yet, seconds: they are in it the next time."""


class _ReceivedStatus(NamedTuple):
    heard_s: float
    status: StatusView


class Statuses:
    """The last words of the other replicas."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._words: dict[str, _ReceivedStatus] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def of(self, names: Iterable[str]) -> dict[str, StatusView]:
        """Return what these replicas said last; who was not asked lately is asked, and waited for if he is new."""
        now_s, names = self._controller.clock.monotonic_s(), tuple(names)
        for name in names:
            word = self._words.get(name)
            if name not in self._asking and (word is None or now_s - word.heard_s >= FRESH_S):
                task = self._asking[name] = asyncio.get_running_loop().create_task(self._ask(name))
                task.add_done_callback(functools.partial(self._forget_query, name))
        new = [self._asking[name] for name in names if name in self._asking and name not in self._words]
        if new:
            await asyncio.wait(new, timeout=FIRST_WAIT_S)
        self._words = {name: one for name, one in self._words.items() if now_s - one.heard_s < KEPT_S}
        return {name: self._words[name].status for name in names if name in self._words}

    def stop(self) -> None:
        """Ask nobody any more."""
        for task in tuple(self._asking.values()):
            task.cancel()

    def _forget_query(self, name: str, _: asyncio.Task[None]) -> None:
        self._asking.pop(name, None)

    async def _ask(self, name: str) -> None:
        try:
            status = await self._controller.levels.ask(name)
        except Exception as error:
            # Whatever it is: a replica that does not answer is shown without what only it knows.
            LOGGER.debug("%s did not say how it is: %s", name, error)
            return
        if status.replica == name:
            self._words[name] = _ReceivedStatus(self._controller.clock.monotonic_s(), status)


def machine_status(controller: Controller) -> dict[str, Any]:
    """Return what of a status is about the machine: room, and until when the certificates are valid."""
    config, room, sync_s = controller.config, controller.measure_room(), controller.engine.sync_s
    certificate, authority = NEVER, NEVER
    with contextlib.suppress(ConfigError, TlsError):  # somebody is putting new ones there
        certificate, authority = _expiries(*_files(config, controller.name))
    return {
        "room_bytes": None if room is None else room.free_bytes,
        "journal_fill": round(controller.journal_fill, 6),
        "sync_s": None if sync_s is None else round(sync_s, 6),
        "certificate_until": format_instant(certificate),
        "authority_until": format_instant(authority),
    }


def _files(config: Config, name: str) -> tuple[TlsFiles, tuple[int, ...]]:
    """Return the files of a replica's certificate, and what changes when they do."""
    files, changed = config.tls_files(name), []
    for path in (files.certificate, files.authority):
        try:
            changed.append(path.stat().st_mtime_ns)
        except OSError:
            changed.append(0)
    return files, tuple(changed)


@functools.lru_cache(maxsize=4)
def _expiries(files: TlsFiles, changed: tuple[int, ...]) -> tuple[Instant, Instant]:
    """Return what `expiries` does: files are read once, and again when they have changed."""
    return expiries(files)
