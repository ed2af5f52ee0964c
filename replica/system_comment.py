"""SystemComment: what went wrong in a job's life, a line each with the time, as Slurm keeps it.

Source: transcripts of Slurm 22.05.8 (`11/20/26 22:14:57 burst_buffer/lua: data_in: lustre source missing`). Slurm
writes the controller's local time; replicas of one cluster need not be in one zone, so here it is UTC.
"""

from __future__ import annotations

from replica.values.units import MICROSECONDS_PER_SECOND, Instant

COMMENT_CHARACTERS_MAX = 1024
"""All of a job's SystemComment, characters: Slurm stops there, too. The last lines are kept."""

_DAY_S = 86_400
_DAYS_OF_400_YEARS = 146_097
_MONTHS = (31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 31, 29)
"""Days of the months from March on, so that the day of a leap year is the last one."""


def commented(before: str, text: str, at: Instant) -> str:
    """Return a job's comment with one more line; unchanged where it says the same of the same second already."""
    if not text:
        return before
    line = f"{stamp(at)} {text}"[:COMMENT_CHARACTERS_MAX]
    lines = before.split("\n") if before else []
    if lines and lines[-1] == line:
        return before
    lines.append(line)
    while sum(map(len, lines)) + len(lines) - 1 > COMMENT_CHARACTERS_MAX:
        del lines[0]
    return "\n".join(lines)


def stamp(at: Instant) -> str:
    """Return an instant to the second in UTC, as Slurm stamps comments: `11/20/26 22:14:57`."""
    days, second = divmod(at // MICROSECONDS_PER_SECOND, _DAY_S)
    year, month, day = civil(days)
    clock = f"{second // 3600:02d}:{second % 3600 // 60:02d}:{second % 60:02d}"
    return f"{month:02d}/{day:02d}/{year % 100:02d} {clock}"


def civil(days: int) -> tuple[int, int, int]:
    """Return year, month and day of the Gregorian calendar for days since 1970-01-01."""
    # Counted from 1600-03-01, where a period of 400 years begins, each year with its leap day last.
    periods, rest = divmod(days + 135_080, _DAYS_OF_400_YEARS)
    centuries = min(rest // 36_524, 3)
    rest -= centuries * 36_524
    fours, rest = divmod(rest, 1_461)
    ones = min(rest // 365, 3)
    rest -= ones * 365
    year = 1600 + periods * 400 + centuries * 100 + fours * 4 + ones
    for place, length in enumerate(_MONTHS):
        if rest < length:
            month = place + 3
            return (year, month, rest + 1) if month <= 12 else (year + 1, month - 12, rest + 1)
        rest -= length
    raise AssertionError("a year has no thirteenth month")
