"""Sizes and instants: exact, without floating point.

Sources: the burst buffer guide (suffixes), SEMANTICS.md (what Forebay accepts and refuses).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NewType

Instant = NewType("Instant", int)
"""Microseconds since 1970-01-01T00:00:00Z."""

Revision = NewType("Revision", int)
"""How many commands have been settled; the address of a moment in history."""

NEVER = Instant(0)
"""The instant that stands for "has not happened"."""

MICROSECONDS_PER_SECOND = 1_000_000

SIZE_BYTES_MAX = 2**63 - 1
"""Largest size, in bytes: what a signed 64-bit field of any peer (MessagePack, JSON readers, Slurm) can hold."""

_BINARY_POWER = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_MULTIPLIERS: dict[str, int] = {"": 1}
for _letter, _power in _BINARY_POWER.items():
    _MULTIPLIERS[_letter] = 1024**_power
    _MULTIPLIERS[_letter + "IB"] = 1024**_power
    _MULTIPLIERS[_letter + "B"] = 1000**_power

_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?([A-Za-z]*)")

SUFFIXES = "K KiB M MiB G GiB T TiB P PiB (powers of 1024), KB MB GB TB PB (powers of 1000)"


class SizeError(ValueError):
    """A size that cannot be read; `offset` is where in the text, counted in characters from 0."""

    def __init__(self, sentence: str, offset: int, remedy: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.offset = offset
        self.remedy = remedy


def parse_size(text: str) -> int:
    """Return the bytes that `text` says, rounded up to a whole byte.

    Decimals are exact (`1.5TB` is 1,500,000,000,000). Raises SizeError for an empty number, a sign, an unknown
    suffix, zero, or more than SIZE_BYTES_MAX.
    """
    if not text:
        raise SizeError("the size is empty", 0, "write a number, for example 10GiB")
    if text[0] in "+-":
        raise SizeError(f"the size {text!r} has a sign", 0, "write a positive number without a sign, for example 10GiB")
    found = _SIZE.match(text)
    if found is None:
        raise SizeError(f"the size {text!r} does not start with a number", 0, "write a number, for example 10GiB")
    if found.end() != len(text):
        raise SizeError(
            f"the size {text!r} has an unexpected character {text[found.end()]!r}",
            found.end(),
            "write a number and a suffix, for example 10GiB",
        )
    whole, decimals, suffix = found.group(1), found.group(2) or "", found.group(3)
    multiplier = _MULTIPLIERS.get(suffix.upper())
    if multiplier is None:
        hint = (
            " (a size in nodes needs a pool of nodes, which this release does not have)"
            if suffix.upper() in ("N", "NODE", "NODES")
            else ""
        )
        raise SizeError(
            f"the size {text!r} has an unknown suffix {suffix!r}{hint}", found.start(3), f"use one of {SUFFIXES}"
        )
    if len(whole) + len(decimals) > 40:
        raise SizeError(
            f"the size {text[:48]!r} has more than 40 digits", 0, f"the largest size is {SIZE_BYTES_MAX} bytes"
        )
    exact = Fraction(int(whole + decimals), 10 ** len(decimals)) * multiplier
    size_bytes = -(-exact.numerator // exact.denominator)
    if size_bytes == 0:
        raise SizeError(f"the size {text!r} is zero", 0, "ask for at least one byte")
    if size_bytes > SIZE_BYTES_MAX:
        raise SizeError(f"the size {text!r} overflows", 0, f"the largest size is {SIZE_BYTES_MAX} bytes")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Return the size with the largest suffix that loses nothing: 1073741824 is `1GiB`, 1000000 is `1MB`, 1025 is
    `1025`.
    """
    if size_bytes == 0:
        return "0"
    for letter in reversed(_BINARY_POWER):
        if size_bytes % 1024 ** _BINARY_POWER[letter] == 0:
            return f"{size_bytes // 1024 ** _BINARY_POWER[letter]}{letter}iB"
    for letter in reversed(_BINARY_POWER):
        if size_bytes % 1000 ** _BINARY_POWER[letter] == 0:
            return f"{size_bytes // 1000 ** _BINARY_POWER[letter]}{letter}B"
    return str(size_bytes)


def round_up(size: int, granularity: int) -> int:
    """Return `size` rounded up to a multiple of `granularity`."""
    return -(-size // granularity) * granularity


def seconds(duration_s: int) -> int:
    """Return a duration of whole seconds in the unit of Instant, microseconds."""
    return duration_s * MICROSECONDS_PER_SECOND
