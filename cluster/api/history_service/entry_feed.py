"""Feed of applied entries from a replica to its history service, which folds them for reads of the present state."""

from __future__ import annotations

import asyncio
from typing import Final

from forebay.cluster.api.history_service.frames import EntriesApplied
from forebay.cluster.ipc import SupervisedProcess
from forebay.cluster.server import Controller, Transition

JOBS_HERE_MAX = 1_000
"""Jobs up to which the replica answers all reads itself, and feeds nothing, count: a listing then takes milliseconds.
The history service is niced, so on a busy machine its reply takes longer.
"""

UNSENT_BYTES_MAX: Final = 256 * 1024
UNSENT_S_MAX: Final = 0.25
"""Limits of applied entries that are not sent yet: bytes, and seconds."""


class EntryFeed:
    """Sends each entry once it is applied, together with others."""

    def __init__(self, controller: Controller, process: SupervisedProcess) -> None:
        """Follow the controller's entries; nothing is sent before `begin`."""
        self._controller = controller
        self._process = process
        self._first_index = 0
        """Entry up to which the process must read the ledger itself."""
        self._sent_index: int | None = None
        """Last entry sent; None while nothing is sent."""
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        controller.follow(self)

    def completes(self, index: int) -> bool:
        """Return whether a process with the state after entry `index` can answer reads of the present state."""
        return self._is_needed and self._sent_index is not None and index >= self._first_index

    def begin(self) -> None:
        """Begin to send, if that is needed and the process reads fast enough."""
        link = self._process.link
        if self._sent_index is None and self._is_needed and link is not None and link.room.is_set():
            self._controller.journal.flush_hints()  # earlier entries are read from the ledger
            self._sent_index = self._first_index = self._controller.applied_index

    def stop(self) -> None:
        """Send nothing until the next `begin`."""
        self._sent_index = None
        self.flush()

    def flush(self) -> None:
        """Send the entries that were applied since the last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sent_index is not None and self._unsent and self._process.link is not None:
            self._process.link.send(EntriesApplied(self._sent_index + 1, tuple(self._unsent)))
            self._sent_index += len(self._unsent)
        self._unsent, self._unsent_bytes = [], 0

    def applied(self, transition: Transition) -> None:
        """Send an entry that was just applied, now or with later ones."""
        link = self._process.link
        if link is None or self._sent_index is None:
            return
        is_next = transition.entry.index == self._sent_index + len(self._unsent) + 1  # not so after a snapshot
        if not is_next or not link.room.is_set():
            self.stop()
            return
        self._unsent.append(transition.data)
        self._unsent_bytes += len(transition.data)
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(UNSENT_S_MAX, self.flush)

    @property
    def _is_needed(self) -> bool:
        return len(self._controller.state.jobs) > JOBS_HERE_MAX
