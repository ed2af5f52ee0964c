"""Processor time of identities at a worker that all share: each may use a share of it, and a reserve at first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Final

import msgspec

ACCOUNTS_MAX: Final = 1024
"""Identities beyond which those that owe nothing are forgotten, count."""

COST_WEIGHT: Final = 0.25
"""Weight of the last use in the expected cost of the next one."""


class ShareExceeded(Exception):
    """An identity has used its share, and cannot be admitted soon; `after_s`: seconds until it can."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"the share of the processor is used up for {after_s:.1f} s")
        self.after_s = after_s


class _Account(msgspec.Struct):
    """Use by one identity."""

    paid_s: float
    """Time at which its share has paid for what it used."""
    cost_s: float = 0.0
    """Expected cost of its next use, seconds of processor time."""
    waiting: int = 0


class ProcessorShares:
    """Delays identities that have used more than their share.

    Each is admitted once its share has paid for its earlier uses (the generic cell rate algorithm). Uses under way
    count with their expected cost.
    """

    def __init__(
        self,
        monotonic_s: Callable[[], float],
        *,
        share: float,
        reserve_s: float,
        wait_s_max: float,
        waiting_max: int,
    ) -> None:
        """`share`: processors of one identity; `reserve_s`: processor time it may use at once after a pause.

        `wait_s_max`: longest wait, seconds; `waiting_max`: waiting uses of one identity, count.
        """
        self._monotonic_s: Final = monotonic_s
        self._share: Final = share
        self._reserve_s: Final = reserve_s / share
        self._wait_s_max: Final = wait_s_max
        self._waiting_max: Final = waiting_max
        self._accounts: dict[Hashable, _Account] = {}

    @asynccontextmanager
    async def use(self, who: Hashable) -> AsyncIterator[None]:
        """Wait until the identity may use the worker.

        Raises:
            ShareExceeded: The wait would be too long, or too many of its uses wait.
        """
        account = self._account(who)
        wait_s = account.paid_s - self._monotonic_s()
        if wait_s > self._wait_s_max or (wait_s > 0 and account.waiting >= self._waiting_max):
            raise ShareExceeded(wait_s)
        expected_s = account.cost_s / self._share
        account.paid_s += expected_s
        try:
            if wait_s > 0:
                account.waiting += 1
                try:
                    await asyncio.sleep(wait_s)
                finally:
                    account.waiting -= 1
            yield
        finally:
            account.paid_s -= expected_s

    def charge(self, who: Hashable, used_s: float) -> None:
        """Charge an identity for processor time, seconds."""
        account = self._account(who)
        account.paid_s += used_s / self._share
        account.cost_s += (used_s - account.cost_s) * COST_WEIGHT

    def _account(self, who: Hashable) -> _Account:
        least_s = self._monotonic_s() - self._reserve_s
        account = self._accounts.get(who)
        if account is None:
            if len(self._accounts) >= ACCOUNTS_MAX:
                self._accounts = {one: kept for one, kept in self._accounts.items() if kept.paid_s > least_s}
            account = self._accounts[who] = _Account(least_s)
        account.paid_s = max(account.paid_s, least_s)
        return account
