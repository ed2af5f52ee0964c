"""Distribution of a node's transfer rate among users, and among the transfers of each.

The leader sets limits per transfer, per user and for the node (`Order.shares`). The agent redistributes them several
times a second, so that unused shares go to others. Distribution is max-min fair: first among users, then among each
user's transfers. A transfer that its rate does not limit gets twice what it moves, so it can grow. Once it waits for
its rate, it counts as wanting all it can get.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from forebay.cluster.agent.transfer import UNLIMITED, SharedCounters, TransferControl
from forebay.replica.model import RateShares

GOVERN_S: Final = 0.1
"""Seconds between two distributions: the longest a growing transfer waits."""

GROWTH: Final = 2.0
"""Allowance for an unlimited transfer, as a multiple of its last rate: enough to double with each distribution."""

DEMAND_BYTES_S_MIN: Final = 64 * 1024
"""Minimum demand of a transfer, bytes per second: it may be opening a file."""


class RateClaim(NamedTuple):
    """Limits and demand of one transfer, bytes per second; infinite means unlimited."""

    user: str
    transfer: float
    """Limit of this transfer."""
    of_user: float
    """Limit of all transfers of its user on this node."""
    of_node: float
    """Limit of all transfers on this node."""
    wanted: float = math.inf


def fill(amount: float, wanted: Sequence[float]) -> list[float]:
    """Distribute `amount` max-min fairly, giving no participant more than it wants."""
    shares = [0.0] * len(wanted)
    rest, order = amount, sorted(range(len(wanted)), key=lambda place: wanted[place])
    for done, place in enumerate(order):
        shares[place] = min(wanted[place], rest / (len(order) - done))
        rest -= shares[place] if math.isfinite(rest) else 0.0
    return shares


def share_out(claims: Mapping[int, RateClaim]) -> dict[int, int]:
    """Return the rate of each transfer, bytes per second: UNLIMITED, 0 for a pause, otherwise at least 1."""
    users: dict[str, list[int]] = {}
    for key, claim in claims.items():
        users.setdefault(claim.user, []).append(key)
    of_node = min((claim.of_node for claim in claims.values()), default=math.inf)
    names = sorted(users)
    limits = {name: min(claims[key].of_user for key in users[name]) for name in names}
    wants = [min(limits[name], sum(_most(claims[key]) for key in users[name])) for name in names]
    rates: dict[int, int] = {}
    for name, amount in zip(names, fill(of_node, wants), strict=True):
        keys = users[name]
        bound = math.isfinite(min(of_node, limits[name]))
        for key, share in zip(keys, fill(amount, [_most(claims[key]) for key in keys]), strict=True):
            claim = claims[key]
            if min(of_node, limits[name], claim.transfer) <= 0:
                rates[key] = 0
            else:
                rate = share if bound else claim.transfer
                rates[key] = UNLIMITED if math.isinf(rate) else max(1, int(rate))
    return rates


def _most(claim: RateClaim) -> float:
    return min(claim.transfer, claim.wanted)


class _Ward:
    """Transfer with a rate limit."""

    def __init__(self, user: str, own_bytes_s: int, control: TransferControl, counters: SharedCounters) -> None:
        self.user = user
        self.own_bytes_s = own_bytes_s
        self.shares = RateShares()
        self.control = control
        self.counters = counters
        self.bytes = 0
        self.waits = 0
        self.at_s: float | None = None
        self.wanted = math.inf

    def claim(self) -> RateClaim:
        own = math.inf if self.own_bytes_s == 0 else float(self.own_bytes_s)
        shares = self.shares
        return RateClaim(
            self.user,
            min(own, _limit(shares.transfer_bytes_s)),
            _limit(shares.user_bytes_s),
            _limit(shares.node_bytes_s),
            self.wanted,
        )

    def poll(self, now_s: float) -> None:
        """Update the demand from the progress since the last poll."""
        moved, waits = self.counters.read().bytes_done, self.counters.waits
        if self.at_s is not None:
            passed_s = now_s - self.at_s
            if passed_s < GOVERN_S / 2:
                return
            if waits != self.waits:
                self.wanted = math.inf
            else:
                self.wanted = max(DEMAND_BYTES_S_MIN, GROWTH * (moved - self.bytes) / passed_s)
        self.bytes, self.waits, self.at_s = moved, waits, now_s


class RateGovernor:
    """Rates of all transfers of an agent."""

    def __init__(self) -> None:
        """Begin without transfers."""
        self._wards: dict[int, _Ward] = {}

    def begin(
        self,
        job: int,
        user: str,
        own_bytes_s: int,
        shares: RateShares | None,
        control: TransferControl,
        counters: SharedCounters,
    ) -> None:
        """Limit the transfer of a job from now on; its first rate is set on return. `own_bytes_s` is this machine's
        limit for each transfer; 0 for none.
        """
        ward = _Ward(user, own_bytes_s, control, counters)
        ward.shares = shares or RateShares()
        self._wards[job] = ward
        self._share_out()

    def change(self, job: int, shares: RateShares | None) -> None:
        """Apply changed shares of a transfer at once; ignore one that has ended."""
        ward = self._wards.get(job)
        if ward is not None and ward.shares != (shares or RateShares()):
            ward.shares = shares or RateShares()
            self._share_out()

    def end(self, job: int) -> None:
        """Remove an ended transfer and redistribute its rate."""
        if self._wards.pop(job, None) is not None:
            self._share_out()

    @property
    def governs(self) -> bool:
        """True if any transfer shares a limit, so that `poll` is needed every GOVERN_S."""
        return any(
            ward.shares.user_bytes_s is not None or ward.shares.node_bytes_s is not None
            for ward in self._wards.values()
        )

    def poll(self, now_s: float) -> None:
        """Redistribute according to recent progress; `now_s` is monotonic, seconds."""
        for ward in self._wards.values():
            ward.poll(now_s)
        self._share_out()

    def _share_out(self) -> None:
        for job, rate in share_out({job: ward.claim() for job, ward in self._wards.items()}).items():
            self._wards[job].control.rate_bytes_s = rate


def _limit(rate_bytes_s: int | None) -> float:
    return math.inf if rate_bytes_s is None else float(rate_bytes_s)
