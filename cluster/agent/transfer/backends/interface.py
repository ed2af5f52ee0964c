"""What a program that moves data is to us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Job(NamedTuple):
    """What a program is to copy at once."""

    source: int
    """An open directory."""
    scratch: int
    """The open directory that it copies to; files keep their names and the directories that they are in."""
    names: Sequence[bytes]
    """Regular files beneath `source`."""
    whole: bool
    """Whether `names` is everything beneath `source`."""


class Call(NamedTuple):
    """One run of a program."""

    argv: tuple[bytes, ...]
    """Without a shell; the first word is looked up in the standard places."""
    told: bytes = b""
    """What it reads on its standard input."""


class Backend(Protocol):
    """Such a program."""

    @property
    def name(self) -> str:
        """As it is configured, and as receipts name it."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether it copies a whole item at once: a directory with all that is in it, instead of files that are
        named."""
        ...

    def fault(self, name: bytes) -> str | None:
        """Return why it cannot be told of a file, in words that follow `its name `; None if it can."""
        ...

    def call(self, job: Job) -> Call:
        """Return what is to be run; its working directory is `job.source`. TransferFailed if it cannot be."""
        ...
