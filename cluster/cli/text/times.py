"""Durations and times in the forms of Slurm's commands.

Source of the forms: the public manual page of sbatch (`--time`, `--begin`). Forms that Slurm reads leniently (`1:90`,
`0` for "no limit") are rejected with a remedy.
"""

import datetime
import re
from typing import Final

from forebay.cluster.system import format_instant, parse_instant
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, TIME_LIMIT_S_MAX, Instant, Pattern

DURATION_FORMS: Final = (
    "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS"
)
BEGIN_FORMS: Final = (
    "now, now+2hours, 16:00, noon, midnight, tomorrow, 2026-01-31, 2026-01-31T16:00:00 or the last with Z or +01:00"
)

PAST_FORMS: Final = "a time of today such as 16:00, 2026-01-31, 2026-01-31T16:00:00 or the last with Z or +01:00"

MINUTE_S: Final = 60
HOUR_S: Final = 3_600
DAY_S: Final = 86_400

_DIGITS_MAX: Final = 10
"""Largest number in a duration, digits: a year of seconds has 8."""

_DURATION: Final = Pattern(
    r"(?:(?P<days>[0-9]+)-)?(?P<first>[0-9]+)(?::(?P<second>[0-9]+))?(?::(?P<third>[0-9]+))?", re.ASCII
)
_NOW_PLUS: Final = Pattern(r"now\+(?P<count>[0-9]{1,8})(?P<unit>[a-z]*)", re.ASCII)
_CLOCK: Final = Pattern(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?", re.ASCII)
_DATE: Final = Pattern(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9]{2}:[0-9]{2}(?::[0-9]{2})?)?(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})?", re.ASCII
)

_UNITS_S: Final = {"": 1, "second": 1, "minute": MINUTE_S, "hour": HOUR_S, "day": DAY_S, "week": 7 * DAY_S}
_NAMED_HOURS: Final = {"midnight": 0, "noon": 12}


def parse_duration(text: str, *, as_sbatch: bool = False) -> int:
    """Return a time limit in seconds.

    `as_sbatch` accepts fields out of range, such as 1:90:00; on a command line they are likely errors.

    Raises:
        ValueError: sentence and remedy, if the text is invalid.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        raise ValueError(
            f"{text!r} is not allowed: a job needs a time limit; write at most {format_duration(TIME_LIMIT_S_MAX)}"
        )
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a duration; write {DURATION_FORMS}")
    if any(len(number) > _DIGITS_MAX for number in found.groups() if number is not None):
        raise ValueError(f"{text[:40]!r} is too long; the longest time limit is {format_duration(TIME_LIMIT_S_MAX)}")
    parts: tuple[tuple[str, int, int], ...]
    numbers = [int(number) for number in found.groups()[1:] if number is not None]
    if found["days"] is not None:
        days, hours, minutes, seconds = int(found["days"]), *numbers, *[0] * (3 - len(numbers))
        parts = (("hours", hours, 23), ("minutes", minutes, 59), ("seconds", seconds, 59))
        duration_s = days * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
        parts = (("minutes", minutes, 59), ("seconds", seconds, 59))
        duration_s = hours * HOUR_S + minutes * MINUTE_S + seconds
    else:
        minutes, seconds = numbers[0], numbers[1] if len(numbers) == 2 else 0
        parts = (("seconds", seconds, 59),)
        duration_s = minutes * MINUTE_S + seconds
    if not as_sbatch:
        _check(text, *parts)
    if duration_s == 0:
        raise ValueError(f"the duration {text!r} is zero; write at least one second, 0:01")
    if duration_s > TIME_LIMIT_S_MAX:
        raise ValueError(f"{text!r} is too long; the longest time limit is {format_duration(TIME_LIMIT_S_MAX)}")
    return duration_s


def _check(text: str, *fields: tuple[str, int, int]) -> None:
    for name, value, most in fields:
        if value > most:
            raise ValueError(
                f"{text!r} has {value} {name}; write at most {most}, or use the next larger unit ({DURATION_FORMS})"
            )


def format_duration(duration_s: int) -> str:
    """Return whole seconds as scontrol shows them: `HH:MM:SS` or `D-HH:MM:SS`, the inverse of parse_duration."""
    days, rest = divmod(duration_s, DAY_S)
    clock = f"{rest // HOUR_S:02d}:{rest % HOUR_S // MINUTE_S:02d}:{rest % MINUTE_S:02d}"
    return f"{days}-{clock}" if days else clock


def format_elapsed(duration_s: int) -> str:
    """Return a duration as squeue shows it: `M:SS`, `H:MM:SS` or `D-HH:MM:SS`."""
    if duration_s < HOUR_S:
        return f"{duration_s // MINUTE_S}:{duration_s % MINUTE_S:02d}"
    full = format_duration(duration_s)
    return full.removeprefix("0") if duration_s < DAY_S else full


def parse_begin(text: str, now: Instant, zone: datetime.tzinfo | None = None) -> str | None:
    """Return the time of `--begin` as ISO 8601 in UTC, None for `now`.

    `now` is the wall clock in µs, `zone` the zone of times without one, by default this machine's. A time of day is
    the next one.

    Raises:
        ValueError: sentence and remedy, if the text is invalid.
    """
    if text == "now":
        return None
    try:
        instant = _instant(_parse_time(text, _utc(now), zone))
    except OverflowError:
        raise ValueError(f"{text!r} is too far in the future; write one of {BEGIN_FORMS}") from None
    if instant <= NEVER:
        raise ValueError(f"{text!r} is before 1970; write one of {BEGIN_FORMS}")
    return format_instant(instant)


def parse_past(text: str, now: Instant, zone: datetime.tzinfo | None = None) -> str:
    """Return a past time as ISO 8601 in UTC; a time of day is today's.

    `now` and `zone` are as for `parse_begin`.

    Raises:
        ValueError: sentence and remedy, if the text is invalid or in the future.
    """
    try:
        wall = _utc(now).astimezone(zone).replace(tzinfo=None)
        if found := _CLOCK.fullmatch(text):
            instant = _instant(_aware(datetime.datetime.combine(wall.date(), _time_of_day(text, found)), zone))
        elif found := _DATE.fullmatch(text):
            instant = _instant(_of_date(text, found, zone))
        else:
            instant = parse_instant(text)  # the form of answers, to the microsecond
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{text!r} is not a time; write {PAST_FORMS}") from error
    if instant > now:
        raise ValueError(f"{text!r} is in the future; write {PAST_FORMS}")
    return format_instant(instant) or ""


def _utc(instant: Instant) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(instant // MICROSECONDS_PER_SECOND, tz=datetime.UTC)


def _instant(moment: datetime.datetime) -> Instant:
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return Instant((since.days * DAY_S + since.seconds) * MICROSECONDS_PER_SECOND + since.microseconds)


def _parse_time(text: str, now: datetime.datetime, zone: datetime.tzinfo | None) -> datetime.datetime:
    if found := _NOW_PLUS.fullmatch(text):
        unit_s = _UNITS_S.get(found["unit"].removesuffix("s"))
        if unit_s is None:
            raise ValueError(
                f"{text!r} has an unknown unit {found['unit']!r}; use seconds, minutes, hours, days or weeks"
            )
        return now + datetime.timedelta(seconds=int(found["count"]) * unit_s)
    # Days and times of day are local: compute without a zone, and add it at the end.
    wall = now.astimezone(zone).replace(tzinfo=None)
    if text == "today":
        return now
    if text == "tomorrow":
        return _aware(wall + datetime.timedelta(days=1), zone)
    if text in _NAMED_HOURS:
        return _aware(_next(wall, datetime.time(_NAMED_HOURS[text])), zone)
    if found := _CLOCK.fullmatch(text):
        return _aware(_next(wall, _time_of_day(text, found)), zone)
    if found := _DATE.fullmatch(text):
        return _of_date(text, found, zone)
    raise ValueError(f"{text!r} is not a time; write {BEGIN_FORMS}")


def _time_of_day(text: str, found: re.Match[str]) -> datetime.time:
    hour, minute, second = (int(number or 0) for number in found.groups())
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError(f"{text!r} is not a time of day; write 00:00:00 to 23:59:59")
    return datetime.time(hour, minute, second)


def _of_date(text: str, found: re.Match[str], zone: datetime.tzinfo | None) -> datetime.datetime:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a valid date; write for example 2026-01-31T16:00:00") from None
    return moment if found["zone"] else _aware(moment, zone)


def _next(wall: datetime.datetime, time_of_day: datetime.time) -> datetime.datetime:
    today = datetime.datetime.combine(wall.date(), time_of_day)
    return today if today > wall else today + datetime.timedelta(days=1)


def _aware(wall: datetime.datetime, zone: datetime.tzinfo | None) -> datetime.datetime:
    return wall.astimezone() if zone is None else wall.replace(tzinfo=zone)
