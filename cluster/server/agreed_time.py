"""Time that the leader stamps on batches (law 3), and the treatment of replicas with a deviating wall clock.

Theory of operation
===================

Time in the ledger continues from the last batch by this replica's own monotonic clock, measured since it applied or
made that batch. No single wall clock influences the time. It is kept between two bounds from a majority of the voters'
wall clocks (`cluster.consensus.peer_clocks`), which a minority of wrong clocks cannot move.

- If the time is behind `earliest`, because all replicas were down or a majority's clocks were slow, it jumps to
  `earliest` at once.
- If the time is ahead of `latest`, it advances at SLEW of normal speed until the clocks have caught up. It never goes
  backwards and never stops, so due work is delayed by at most the lead. Only an operator's command, `SetClock`, sets
  it back.
- Without readings from a majority, the time simply continues.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from forebay.cluster.consensus import OFF_S, ChangeRefused, ClockBounds, Engine, NotLeader, Role
from forebay.cluster.system import Clock, format_instant
from forebay.cluster.system.eventloop import failure_logged
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

LOGGER = logging.getLogger(__name__)

SLEW: Final = 0.5
"""Speed of time while it is ahead of a majority's clocks: a lead of an hour ends after two hours."""

CLIENTS_STEP_S: Final = 0.01
"""Time for which a reading of a majority's clocks is reused, seconds. The result is compared with command IDs, which
have whole seconds. Reading the clocks for each command would add a third to its cost.
"""

DRIFT_S: Final = 1.0
"""Deviation between this replica's wall clock and a peer's above which it is logged, seconds: a fifth of the limit, so
that an operator can check the time service in advance.
"""

AHEAD_SAID_US: Final = round(OFF_S * MICROSECONDS_PER_SECOND)
"""Lead of the agreed time over a majority's clocks above which it is logged, microseconds."""


class AgreedTime:
    """Agreed time from the ledger, the monotonic clock and a majority's wall clocks.

    It is a `cluster.system.Clock` whose `now` returns the agreed time.
    """

    def __init__(self, clock: Clock, *, bounds: Callable[[], ClockBounds], at: Instant) -> None:
        """Continue from `at`, the time of the initial state; NEVER for an empty state."""
        self._clock = clock
        self._bounds = bounds
        self._at = at
        self._since_s = clock.monotonic_s()
        self._of_clients = at
        self._of_clients_s = -math.inf
        """Monotonic time at which `_of_clients` was computed."""
        self._waits = False
        """True if it was logged that the founding waits for more clocks."""

    def begin(self) -> bool:
        """Return whether there is a time to continue from. Before the first batch, only a majority's clocks provide it.

        The bounds must be final: if one clock of a bare majority were an hour slow, a cluster founded at `earliest`
        would reject clients with right clocks until the other clocks were read.
        """
        if self._at == NEVER:
            bounds = self._bounds()
            if bounds.earliest is not None and bounds.is_final:
                self.applied(bounds.earliest)
            elif bounds.earliest is not None and not self._waits:
                self._waits = True
                LOGGER.warning(
                    "the wall clocks that could be read differ by more than %.0f s, and those of some replicas could "
                    "not be read: the cluster is not founded until the clocks agree, or until all of them can be read; "
                    "check the time service on every replica",
                    OFF_S,
                )
        return self._at != NEVER

    @property
    def ahead_us(self) -> int:
        """Lead of the agreed time over the latest possible time of a majority's clocks, microseconds; at least 0."""
        bounds = self._bounds()
        return 0 if bounds.latest is None or self._at == NEVER else max(0, self._between(bounds) - bounds.latest)

    def now(self) -> Instant:
        """Return the agreed time, for a batch made now."""
        return self._between(self._bounds())

    def _between(self, bounds: ClockBounds) -> Instant:
        if self._at == NEVER:
            return self._clock.now()
        elapsed_us = max(0.0, self._clock.monotonic_s() - self._since_s) * MICROSECONDS_PER_SECOND
        at = self._at + round(elapsed_us)
        if bounds.latest is not None and at > bounds.latest:
            at = max(self._at + round(SLEW * elapsed_us), bounds.latest)
        if bounds.earliest is not None:
            at = max(at, bounds.earliest)
        return Instant(at)

    @property
    def is_read(self) -> bool:
        """Return whether a majority's wall clocks were read recently. A new leader waits for these readings."""
        return self._bounds().latest is not None

    def of_clients(self) -> Instant:
        """Return the agreed time, or the latest possible time of a majority's clocks if that is earlier.

        Commands of clients with right clocks have about this time. Called for each command; accurate to CLIENTS_STEP_S.
        """
        now_s = self._clock.monotonic_s()
        if not 0 <= now_s - self._of_clients_s < CLIENTS_STEP_S:
            bounds = self._bounds()
            now = self._between(bounds)
            if bounds.latest is None:
                return now
            self._of_clients = min(now, bounds.latest)
            self._of_clients_s = now_s
        return self._of_clients

    def at_most(self) -> Instant:
        """Return the latest possible time of a right clock; without readings of a majority, the agreed time."""
        latest = self._bounds().latest
        return self.of_clients() if latest is None else max(self.of_clients(), latest)

    def monotonic_s(self) -> float:
        """Return seconds of this replica's monotonic clock."""
        return self._clock.monotonic_s()

    def stamp(self, base_at: Instant) -> Instant:
        """Return the time of a batch made now on a state with time `base_at`, and continue from the returned time."""
        self._at = Instant(max(self.now(), base_at))
        self._since_s = self._clock.monotonic_s()
        return self._at

    def applied(self, at: Instant) -> None:
        """Continue from the time of an applied batch of another leader, a snapshot, or an operator's `SetClock`."""
        self._at, self._since_s = at, self._clock.monotonic_s()
        self._of_clients_s = -math.inf


class ClockWatch:
    """Logs deviating wall clocks and a fast agreed time; a leader with a deviating clock transfers leadership."""

    def __init__(self, me: str, engine: Engine, agreed: AgreedTime) -> None:
        self._me = me
        self._engine = engine
        self._agreed = agreed
        self._off: set[str] = set()
        """Replicas whose clock deviated at the last check."""
        self._drifted: set[str] = set()
        """Peers whose clock differed by more than DRIFT_S from this replica's at the last check."""
        self._ahead = False
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Log changes since the last check; called once a second on every replica."""
        off = {peer.name for peer in self._engine.peers() if peer.clock_off}
        if self._engine.clock_off:
            off.add(self._me)
        for name in sorted(off - self._off):
            LOGGER.error(
                "the wall clock of %s differs by more than %.0f s from a majority's: %s; check its time service",
                name,
                OFF_S,
                "this replica transfers its leadership" if name == self._me else "it must not lead",
            )
        for name in sorted(self._off - off):
            LOGGER.info("the wall clock of %s agrees with a majority's again, or cannot be read", name)
        self._off = off
        offsets = {peer.name: peer.clock_offset_s or 0.0 for peer in self._engine.peers()}
        drifted = {name for name, offset_s in offsets.items() if abs(offset_s) > DRIFT_S}
        for name in sorted(drifted - self._drifted - off):
            LOGGER.warning(
                "the wall clock of %s differs by %+.1f s from this replica's; a replica that differs by %.0f s from a "
                "majority must not lead: check the time services of both",
                name,
                offsets[name],
                OFF_S,
            )
        self._drifted = drifted
        ahead_us = self._agreed.ahead_us if self._engine.role == Role.LEADER else 0
        if (ahead_us > AHEAD_SAID_US) != self._ahead:
            self._ahead = not self._ahead
            if self._ahead:
                LOGGER.error(
                    "the cluster's time, %s, is %.0f s ahead of the wall clocks of a majority; it runs at half speed "
                    "until they have caught up, or until an operator sets it back (`forebay cluster set-clock`)",
                    format_instant(self._agreed.now()),
                    ahead_us / MICROSECONDS_PER_SECOND,
                )

    def poll(self) -> None:
        """Transfer leadership if this replica's clock deviates."""
        is_idle = self._task is None or self._task.done()
        if self._engine.clock_off and is_idle and len(self._engine.configuration.voters) > 1:
            self._task = asyncio.get_running_loop().create_task(self._hand_over())
            self._task.add_done_callback(failure_logged(LOGGER, "leadership could not be transferred"))

    def stop(self) -> None:
        """Abandon pending work."""
        if self._task is not None:
            self._task.cancel()

    async def _hand_over(self) -> None:
        with suppress(NotLeader, ChangeRefused):
            leader = await self._engine.transfer()
            LOGGER.warning(
                "leadership was transferred to %s: this replica's wall clock deviates", leader or "another replica"
            )
