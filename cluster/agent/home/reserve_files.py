"""Files that are made while there is room, to be used when there is none: a full disk still takes results and locks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from cluster.agent.files.durable import is_no_room, reserve
from cluster.agent.limits import ROOM_BYTES, ROOM_RETRY_S, ROOM_RETRY_S_MAX, ROOM_WARNING_S, SPARES
from cluster.system.clock import Clock


class Spares:
    """Spare files in one directory; nothing is ever read of them."""

    def __init__(self, directory: int) -> None:
        """Take stock of the open directory, and make what is missing as far as there is room."""
        self._directory = directory
        self._free: list[str] = []
        for name in sorted(os.listdir(directory)):
            if os.stat(name, dir_fd=directory, follow_symlinks=False).st_size == ROOM_BYTES:
                self._free.append(name)
            else:
                os.unlink(name, dir_fd=directory)
        self.fill()

    def __len__(self) -> int:
        return len(self._free)

    def fill(self) -> None:
        """Make what is missing, as far as there is room."""
        try:
            while len(self._free) < SPARES:
                name = self._unused()
                reserve(self._directory, name)
                self._free.append(name)
        except OSError as error:
            if not is_no_room(error):
                raise

    def lend(self, directory: int, name: str) -> bool:
        """Make one spare the file `name` of an open directory on the same disk; False if none is left."""
        if not self._free:
            return False
        os.rename(self._free[-1], name, src_dir_fd=self._directory, dst_dir_fd=directory)
        self._free.pop()
        return True

    def drop(self, directory: int, name: str) -> None:
        """Remove the file `name` of an open directory: a spare that was lent comes back as one."""
        with contextlib.suppress(FileNotFoundError):
            if (
                len(self._free) < SPARES
                and os.stat(name, dir_fd=directory, follow_symlinks=False).st_size == ROOM_BYTES
            ):
                free = self._unused()
                os.rename(name, free, src_dir_fd=directory, dst_dir_fd=self._directory)
                self._free.append(free)
                return
            os.unlink(name, dir_fd=directory)

    def _unused(self) -> str:
        taken = set(self._free)
        return next(name for name in map(str, range(SPARES + 1)) if name not in taken)


# ---- waiting until a full disk has room again, and saying so once a minute: the agent goes on meanwhile


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class GivenUp(Exception):
    """What waited for room is not wanted any more."""


class Room:
    """The room on the disk of one agent, as those see it who need some."""

    def __init__(self, shown: str, clock: Clock) -> None:
        """Begin with no complaint; `shown` names the disk."""
        self._shown = shown
        self._clock = clock
        self._warned_s: float | None = None

    async def keep_trying(self, what: str, act: Callable[[], _T], given_up: asyncio.Event) -> _T:
        """Return what `act` returns as soon as there is room for it; `what` is what waits, in words.

        GivenUp once `given_up` is set; OSError that has nothing to do with room.
        """
        wait_s = ROOM_RETRY_S
        while not given_up.is_set():
            try:
                result = act()
            except OSError as error:
                if not is_no_room(error):
                    raise
                self.warn(what, error)
            else:
                self.found()
                return result
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(given_up.wait(), wait_s)
            wait_s = min(ROOM_RETRY_S_MAX, 2 * wait_s)
        raise GivenUp

    def warn(self, what: str, error: OSError) -> None:
        """Say that `what` has to wait, unless something of the kind was said within the last minute."""
        now_s = self._clock.monotonic_s()
        if self._warned_s is None or now_s - self._warned_s >= ROOM_WARNING_S:
            self._warned_s = now_s
            logger.warning(
                "%s: %s: %s waits until there is room; make some, nothing is lost", self._shown, error.strerror, what
            )

    def found(self) -> None:
        """There was room for something."""
        if self._warned_s is not None:
            self._warned_s = None
            logger.info("%s: there is room again", self._shown)
