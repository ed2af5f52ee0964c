"""Sharing out what a node may move in a second: between its users, and between the transfers of each.

The leader says what this node may do now (`Order.shares`: a limit per transfer, per user here, and for the node); the
agent shares it out again several times a second, so that what one does not need another one has. Nobody who wants more
gets less than an equal part: users first, then the transfers of each (max-min fairness). A transfer that is not held
back by its rate gets twice what it moves, so that it can grow; the first wait for its rate makes it one that wants all
it can have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from cluster.agent.transfer import UNLIMITED, Control, SharedCounters
from replica.model import RateShares

GOVERN_S: Final = 0.1
"""Seconds between two sharings-out: what a transfer that needs more may have to wait for it."""

GROWTH: Final = 2.0
"""What a transfer that is not held back may have of what it moved last: enough to double with every sharing-out."""

DEMAND_BYTES_S_MIN: Final = 64 * 1024
"""What a transfer is always taken to want, bytes per second: it may only be opening a file."""


class Claim(NamedTuple):
    """What one transfer may have and would like, bytes per second; infinite is without limit."""

    user: str
    transfer: float
    """Its own limit."""
    of_user: float
    """What all of its user's on this node may have together."""
    of_node: float
    """What all on this node may have together."""
    wanted: float = math.inf


def fill(amount: float, wanted: Sequence[float]) -> list[float]:
    """Share `amount` out so that nobody gets more than he wants, and nobody who gets less than that gets less than
    another one.
    """
    shares = [0.0] * len(wanted)
    rest, order = amount, sorted(range(len(wanted)), key=lambda place: wanted[place])
    for done, place in enumerate(order):
        shares[place] = min(wanted[place], rest / (len(order) - done))
        rest -= shares[place] if math.isfinite(rest) else 0.0
    return shares


def share_out(claims: Mapping[int, Claim]) -> dict[int, int]:
    """Return the rate of each transfer, bytes per second: UNLIMITED, 0 for a pause, else at least 1."""
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


def _most(claim: Claim) -> float:
    return min(claim.transfer, claim.wanted)


class _Ward:
    """Transfer that is held to a rate."""

    def __init__(self, user: str, own_bytes_s: int, control: Control, counters: SharedCounters) -> None:
        self.user = user
        self.own_bytes_s = own_bytes_s
        self.shares = RateShares()
        self.control = control
        self.counters = counters
        self.bytes = 0
        self.waits = 0
        self.at_s: float | None = None
        self.wanted = math.inf

    def claim(self) -> Claim:
        own = math.inf if self.own_bytes_s == 0 else float(self.own_bytes_s)
        shares = self.shares
        return Claim(
            self.user,
            min(own, _limit(shares.transfer_bytes_s)),
            _limit(shares.user_bytes_s),
            _limit(shares.node_bytes_s),
            self.wanted,
        )

    def poll(self, now_s: float) -> None:
        """Find out what it would like, from what it did since the last look."""
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
    """The rates of all transfers of an agent."""

    def __init__(self) -> None:
        """Begin with no transfer."""
        self._wards: dict[int, _Ward] = {}

    def begin(
        self,
        job: int,
        user: str,
        own_bytes_s: int,
        shares: RateShares | None,
        control: Control,
        counters: SharedCounters,
    ) -> None:
        """Hold the transfer of a job to its share from now on. `own_bytes_s` is this machine's limit on each; 0: none.

        Its first rate is there on return.
        """
        ward = _Ward(user, own_bytes_s, control, counters)
        ward.shares = shares or RateShares()
        self._wards[job] = ward
        self._share_out()

    def change(self, job: int, shares: RateShares | None) -> None:
        """What a transfer may do has changed, maybe; takes effect at once. Nothing happens for one that is over."""
        ward = self._wards.get(job)
        if ward is not None and ward.shares != (shares or RateShares()):
            ward.shares = shares or RateShares()
            self._share_out()

    def end(self, job: int) -> None:
        """The transfer is over: what it had is shared out among the others."""
        if self._wards.pop(job, None) is not None:
            self._share_out()

    @property
    def governs(self) -> bool:
        """Whether anybody shares anything with another one, so that `poll` is worth calling every GOVERN_S."""
        return any(
            ward.shares.user_bytes_s is not None or ward.shares.node_bytes_s is not None
            for ward in self._wards.values()
        )

    def poll(self, now_s: float) -> None:
        """Share out again by what each did; `now_s` is monotonic, seconds."""
        for ward in self._wards.values():
            ward.poll(now_s)
        self._share_out()

    def _share_out(self) -> None:
        for job, rate in share_out({job: ward.claim() for job, ward in self._wards.items()}).items():
            self._wards[job].control.rate_bytes_s = rate


def _limit(rate_bytes_s: int | None) -> float:
    return math.inf if rate_bytes_s is None else float(rate_bytes_s)
