"""Waiting in the event loop for processes that may or may not be children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal


class Handle:
    """A process held by a descriptor: it can be waited for and signalled, and never comes to mean another one."""

    def __init__(self, pid: int) -> None:
        """Hold the process; ProcessLookupError if there is none."""
        self._descriptor = os.pidfd_open(pid)
        self._over = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._descriptor, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        if not self._over.done():
            self._over.set_result(None)

    @property
    def over(self) -> bool:
        """Whether the process is known to have ended."""
        return self._over.done()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; False if it lives on after `timeout_s` seconds."""
        done, _ = await asyncio.wait({self._over}, timeout=timeout_s)
        return bool(done)

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Let go of it."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
