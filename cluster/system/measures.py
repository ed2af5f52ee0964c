"""Measured durations and sizes as text."""

from __future__ import annotations

from typing import Final

from forebay.replica.values import MICROSECONDS_PER_SECOND

_MINUTE_S: Final = 60
_HOUR_S: Final = 3_600


def format_span(span_us: int) -> str:
    """Format measured microseconds, rounded down: `7 ms`, `1.25 s`, `3 min 05 s`, `2 h 04 min`."""
    if span_us < MICROSECONDS_PER_SECOND:
        return f"{span_us // 1000} ms"
    if span_us < _MINUTE_S * MICROSECONDS_PER_SECOND:
        return f"{span_us // 10_000 / 100:.2f} s"
    whole_s = span_us // MICROSECONDS_PER_SECOND
    if whole_s < _HOUR_S:
        return f"{whole_s // _MINUTE_S} min {whole_s % _MINUTE_S:02d} s"
    return f"{whole_s // _HOUR_S} h {whole_s % _HOUR_S // _MINUTE_S:02d} min"


def readable_size(size_bytes: float) -> str:
    """Format a measured size rounded, for example `12.3 MiB`."""
    value = float(size_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or suffix == "TiB":
            return f"{int(value)} B" if suffix == "B" else f"{value:.1f} {suffix}"
        value /= 1024
    raise AssertionError("unreachable")
