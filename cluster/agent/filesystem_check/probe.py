"""Probes and their results."""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

UNSUPPORTED: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EINVAL, errno.ENOLCK, errno.EPROTONOSUPPORT}
)
"""Errors that mean that the filesystem lacks a function. EINVAL is that of O_DIRECT and of fallocate(2)."""


class ProbeStatus(StrEnum):
    """Result of a probe: the function works, does not exist, or exists and does not work."""

    OK = "ok"
    MISSING = "missing"
    FAILED = "failed"


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one probe."""

    name: str
    status: ProbeStatus
    needed: bool
    """True if movers need the function."""
    found: str = ""
    """Observation; empty if the status is ok."""
    consequence: str = ""
    """Consequence for staging and jobs; empty if the status is ok."""
    took_ms: int = 0


class ProbeMissing(Exception):
    """The filesystem lacks the function; the message says what was observed."""


class ProbeFailed(Exception):
    """The function does not work; the message says what was observed."""


class FilesystemProbe(NamedTuple):
    """Function to try in an open, empty directory of its own. It returns if everything works.

    Raises ProbeMissing, ProbeFailed, or OSError.
    """

    name: str
    run: Callable[[int], None]
    needed: bool
    consequence: str
    limit_s: float
    """Seconds after which the probe is considered hung."""
