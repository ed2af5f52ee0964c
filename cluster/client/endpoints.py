"""Which replica is asked next: the one that led last, then the others, the ones that failed last at the end."""

from collections.abc import Iterable
from typing import Final

from cluster.system import Address

ENDPOINTS_MAX: Final = 32
"""Addresses kept, count: the configured ones and those learned from redirects; a cluster has at most five replicas."""


class Endpoints:
    """The replicas' API addresses, most promising first."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._order = list(dict.fromkeys(addresses))
        if not self._order:
            raise ValueError("a client needs the api address of at least one replica")
        if len(self._order) > ENDPOINTS_MAX:
            raise ValueError(f"a client has {len(self._order)} addresses; at most {ENDPOINTS_MAX} are possible")

    @property
    def order(self) -> tuple[Address, ...]:
        """The addresses in the order in which they should be asked."""
        return tuple(self._order)

    def next_after(self, tried: frozenset[Address] | set[Address]) -> Address | None:
        """Return the most promising address that has not been tried, or None."""
        return next((address for address in self._order if address not in tried), None)

    def led(self, address: Address) -> None:
        """Remember that this one answered what only a leader can: it is asked first."""
        if address in self._order:
            self._order.remove(address)
        elif len(self._order) >= ENDPOINTS_MAX:
            return
        self._order.insert(0, address)

    def failed(self, address: Address) -> None:
        """Remember that this one did not answer: it is asked last."""
        if address in self._order:
            self._order.remove(address)
            self._order.append(address)
