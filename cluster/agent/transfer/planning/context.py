"""What a transfer is given by whoever runs it: names, counters, a pace and a place for its records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cluster.agent.transfer.records.options import Item
from cluster.agent.transfer.records.progress import Counters
from cluster.agent.transfer.records.workspace import Workspace
from cluster.system import Clock


class Pacer(Protocol):
    """What holds a transfer down to a rate, and ends it (cluster.agent.transfer.copying.rate_limit.Pace)."""

    def take(self, size_bytes: int, /) -> None:
        """Return when so many bytes more may be moved."""
        ...

    def check(self) -> None:
        """Raise what ends the transfer, if it is to end."""
        ...

    def step_bytes(self, most: int, /) -> int:
        """Return how much to move at once, `most` at most."""
        ...

    def end(self, error: type[BaseException], /) -> None:
        """Have `check` raise this from now on, in this process: for the handler of a signal."""
        ...


class Unpaced:
    """No limit, and no end from outside but by `end`."""

    _ended: type[BaseException] | None = None

    def take(self, size_bytes: int, /) -> None:
        """Return at once."""
        self.check()

    def check(self) -> None:
        """Raise what it was ended with."""
        if self._ended is not None:
            raise self._ended

    def step_bytes(self, most: int, /) -> int:
        """Return all of it."""
        return most

    def end(self, error: type[BaseException], /) -> None:
        """Have `check` raise this from now on."""
        self._ended = error


def nothing(*_: object) -> None:
    """Do nothing: what a context has where nobody wants to be told."""


def _beside(item: Item) -> int:
    return item.staging


class Context(NamedTuple):
    """Context of a transfer, given by whoever runs it."""

    tag: str
    """What temporary names begin with, such as `.forebay-7-0123abcd`."""
    workspace: Workspace
    clock: Clock
    progress: Callable[[Counters], None] = nothing
    """Told in the main process how far it is."""
    at: Callable[[bytes], None] = nothing
    """Told which file is being moved."""
    pace: Pacer = Unpaced()
    claim: Callable[[Item], int] = _beside
    """Asked once for each item's staging directory (Item.staging), before the first temporary file: not before it is
    known that the sources are there, since it makes directories at the destination."""
    planned: Callable[[Sequence[tuple[int, int]]], None] = nothing
    """Told the files and bytes of each item before anything is copied; what it raises ends the transfer."""
