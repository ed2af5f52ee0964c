"""Values of replicas that no state contains. Statuses of other replicas are polled only while clients ask for them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from forebay.cluster.api.metrics import MetricFamily
from forebay.cluster.config import Config, ConfigError
from forebay.cluster.schemas import MemberView, NeedView, StatusView
from forebay.cluster.security import TlsError, TlsFiles, expiries
from forebay.cluster.server import AgentReports, Controller
from forebay.cluster.system import format_instant
from forebay.replica.values import NEVER, Instant

LOGGER = logging.getLogger(__name__)

FRESH_S = 5.0
"""Age after which a status is refreshed, seconds."""

KEPT_S = 60.0
"""Time an unreachable replica's last status is shown, seconds."""

FIRST_WAIT_S = 0.3
"""Time a response waits for first statuses, seconds; later ones appear in the next response."""


class _ReceivedStatus(NamedTuple):
    heard_s: float
    status: StatusView


class Statuses:
    """Last statuses of the other replicas."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._words: dict[str, _ReceivedStatus] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def of(self, names: Iterable[str]) -> dict[str, StatusView]:
        """Return the last statuses of these replicas; refresh old ones, and wait for missing ones."""
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
        """Stop polling."""
        for task in tuple(self._asking.values()):
            task.cancel()

    def _forget_query(self, name: str, _: asyncio.Task[None]) -> None:
        self._asking.pop(name, None)

    async def _ask(self, name: str) -> None:
        try:
            status = await self._controller.levels.ask(name)
        except Exception as error:
            # Any failure: the replica is shown without its own status.
            LOGGER.debug("%s did not report its status: %s", name, error)
            return
        if status.replica == name:
            self._words[name] = _ReceivedStatus(self._controller.clock.monotonic_s(), status)


class LiveValues(msgspec.Struct, frozen=True, array_like=True):
    """Those values that an operation needs (`ApiOperation.live`)."""

    replica: str = ""
    """Name of the replica."""
    agents: AgentReports | None = None
    """None on a replica that does not lead."""
    status: StatusView | None = None
    members: tuple[MemberView, ...] = ()
    metrics: tuple[MetricFamily, ...] = ()
    pid: int = 0
    """The replica's process."""
    sinks: tuple[NeedView, ...] = ()
    """Event sinks that need attention."""


def machine_status(controller: Controller) -> dict[str, Any]:
    """Return the machine's part of a status: free space, and the expiry of certificates."""
    config, room, sync_s = controller.config, controller.measure_room(), controller.engine.sync_s
    certificate, authority = NEVER, NEVER
    with contextlib.suppress(ConfigError, TlsError):  # the files are being replaced
        certificate, authority = _expiries(*_files(config, controller.name))
    return {
        "room_bytes": None if room is None else room.free_bytes,
        "journal_fill": round(controller.journal_fill, 6),
        "sync_s": None if sync_s is None else round(sync_s, 6),
        "certificate_until": format_instant(certificate),
        "authority_until": format_instant(authority),
    }


def _files(config: Config, name: str) -> tuple[TlsFiles, tuple[int, ...]]:
    """Return the files of a replica's certificate, and their modification times."""
    files, changed = config.tls_files(name), []
    for path in (files.certificate, files.authority):
        try:
            changed.append(path.stat().st_mtime_ns)
        except OSError:
            changed.append(0)
    return files, tuple(changed)


@functools.lru_cache(maxsize=4)
def _expiries(files: TlsFiles, changed: tuple[int, ...]) -> tuple[Instant, Instant]:
    """Return the cached result of `expiries` until the files change."""
    return expiries(files)
