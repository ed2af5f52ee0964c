"""Sizes, quantities and instants, in exact integers.

Sources: the burst buffer guide (suffixes), SEMANTICS.md (accepted and rejected forms).
"""

from __future__ import annotations

from typing import NewType

import msgspec

from forebay.replica.values.patterns import Pattern

Instant = NewType("Instant", int)
"""Microseconds since 1970-01-01T00:00:00Z."""

Revision = NewType("Revision", int)
"""Number of settled commands; identifies a moment in history."""

NEVER = Instant(0)
"""Stands for "has not happened"."""

MICROSECONDS_PER_SECOND = 1_000_000

SIZE_BYTES_MAX = 2**63 - 1
"""Largest size, in bytes: what a signed 64-bit field of any peer (MessagePack, JSON readers, Slurm) can hold."""

_BINARY_POWER = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
SIZE_MULTIPLIERS: dict[str, int] = {"": 1}
for _letter, _power in _BINARY_POWER.items():
    SIZE_MULTIPLIERS[_letter] = 1024**_power
    SIZE_MULTIPLIERS[_letter + "IB"] = 1024**_power
    SIZE_MULTIPLIERS[_letter + "B"] = 1000**_power

SIZE_DIGITS_MAX = 40
"""Digits of a size, count: more than any valid size has, and cheap to multiply."""

_WRITTEN_CHARACTERS = 48
"""Characters of a size that a message repeats."""

_SIZE = Pattern(r"([0-9]+)(?:\.([0-9]+))?([A-Za-z]*)")

SUFFIXES = "K KiB M MiB G GiB T TiB P PiB (powers of 1024), KB MB GB TB PB (powers of 1000)"


class SizeError(ValueError):
    """An invalid size; `offset` is the position of the fault, counted in characters from 0."""

    def __init__(self, sentence: str, offset: int, remedy: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.offset = offset
        self.remedy = remedy


class Quantity(msgspec.Struct, frozen=True):
    """A capacity as written. `unit` is bytes, nodes (`2N`), or `bare`: no suffix, hence units of the pool."""

    value: int
    unit: str


NODE_SUFFIXES = ("N", "NODE", "NODES")
"""Suffixes of a size that counts nodes, in any case."""


def parse_size(text: str) -> int:
    """Return the bytes in `text`, rounded up to a whole byte.

    Decimals are exact (`1.5TB` is 1,500,000,000,000).

    Raises:
        SizeError: the number is empty, signed, zero or above SIZE_BYTES_MAX, or the suffix is unknown.
    """
    quantity = parse_quantity(text)
    if quantity.unit == "nodes":
        found = _SIZE.match(text)
        assert found is not None
        raise SizeError(
            f"the size {text!r} has an unknown suffix {found.group(3)!r} (a size in nodes needs a pool of nodes)",
            found.start(3),
            f"use one of {SUFFIXES}",
        )
    return quantity.value


def parse_quantity(text: str, bare: int = 1) -> Quantity:
    """Return the quantity in `text`: in bytes rounded up, in nodes, or without a unit, then multiplied by `bare`.

    Raises:
        SizeError: as in `parse_size`, and for a fraction of a node.
    """
    if not text:
        raise SizeError("the size is empty", 0, "write a number, for example 10GiB")
    written = text if len(text) <= _WRITTEN_CHARACTERS else text[:_WRITTEN_CHARACTERS] + "…"
    if text[0] in "+-":
        raise SizeError(
            f"the size {written!r} has a sign", 0, "write a positive number without a sign, for example 10GiB"
        )
    found = _SIZE.match(text)
    if found is None:
        raise SizeError(f"the size {written!r} does not start with a number", 0, "write a number, for example 10GiB")
    if found.end() != len(text):
        raise SizeError(
            f"the size {written!r} has an unexpected character {text[found.end()]!r}",
            found.end(),
            "write a number and a suffix, for example 10GiB",
        )
    whole, decimals, suffix = found.group(1), found.group(2) or "", found.group(3).upper()
    unit = "nodes" if suffix in NODE_SUFFIXES else "bytes" if suffix else "bare"
    multiplier = {"nodes": 1, "bare": bare}.get(unit) or SIZE_MULTIPLIERS.get(suffix)
    if multiplier is None:
        raise SizeError(
            f"the size {written!r} has an unknown suffix {found.group(3)[:_WRITTEN_CHARACTERS]!r}",
            found.start(3),
            f"use one of {SUFFIXES}",
        )
    if unit == "nodes" and decimals:
        raise SizeError(
            f"the size {written!r} is a fraction of a node",
            len(whole),
            "write a whole number of nodes, for example 2N",
        )
    if len(whole) + len(decimals) > SIZE_DIGITS_MAX:
        raise SizeError(
            f"the size {written!r} has more than {SIZE_DIGITS_MAX} digits",
            0,
            f"the largest size is {SIZE_BYTES_MAX} bytes",
        )
    # Integer division rounds up exactly, without a Fraction, which would dominate the cost.
    value = -(-int(whole + decimals) * multiplier // 10 ** len(decimals))
    if value == 0:
        raise SizeError(f"the size {written!r} is zero", 0, "request at least one byte")
    if value > SIZE_BYTES_MAX:
        raise SizeError(f"the size {written!r} overflows", 0, f"the largest size is {SIZE_BYTES_MAX} bytes")
    return Quantity(value, unit)


def format_size(size_bytes: int) -> str:
    """Format a size with the largest suffix that loses nothing: 1073741824 is `1GiB`, 1025 is `1025`."""
    if size_bytes == 0:
        return "0"
    for letter in reversed(_BINARY_POWER):
        if size_bytes % 1024 ** _BINARY_POWER[letter] == 0:
            return f"{size_bytes // 1024 ** _BINARY_POWER[letter]}{letter}iB"
    for letter in reversed(_BINARY_POWER):
        if size_bytes % 1000 ** _BINARY_POWER[letter] == 0:
            return f"{size_bytes // 1000 ** _BINARY_POWER[letter]}{letter}B"
    return str(size_bytes)


def format_slurm_size(size: int) -> str:
    """Format a size as `scontrol show burst` does.

    The suffix is the largest that divides it, PiB before PB before TiB and so on: 1000000 is `1MB`, 1024000000 is
    `1024MB`, and 0 and 1023 have none. (`format_size` prefers powers of 1024.) Source: the guide's sample output and
    the transcripts.
    """
    if size == 0:
        return "0"
    for letter in reversed(_BINARY_POWER):
        power = _BINARY_POWER[letter]
        for divisor, suffix in ((1024**power, f"{letter}iB"), (1000**power, f"{letter}B")):
            if size % divisor == 0:
                return f"{size // divisor}{suffix}"
    return str(size)


def round_up(size: int, granularity: int) -> int:
    """Return `size` rounded up to a multiple of `granularity`."""
    return -(-size // granularity) * granularity


def seconds(duration_s: int) -> int:
    """Return a duration of whole seconds in the unit of Instant, microseconds."""
    return duration_s * MICROSECONDS_PER_SECOND


_JOB_NUMBERS_SINCE = 1_672_531_200
"""1 January 2023, seconds since 1970."""

_JOBS_PER_SECOND = 1_000


def first_job_id_at(at: Instant) -> int:
    """Return the lowest job ID of an incarnation of the cluster that begins at this time.

    IDs of a lost part of the history, and of unknown incarnations, are lower as long as fewer than 1,000 jobs are
    submitted a second on average. No ID is assigned twice, and data of lost jobs on agents never mixes with that of
    later jobs.
    """
    return (at - seconds(_JOB_NUMBERS_SINCE)) * _JOBS_PER_SECOND // MICROSECONDS_PER_SECOND
