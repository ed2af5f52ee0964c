"""Tables [[helper]] and [drill] of forebay.toml: helpers on each machine, and permissions for drills.

The tables [[helper]] are the same on every machine. The table [drill] belongs to one machine and is not replicated.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from forebay.cluster.config.toml import InvalidValue, Name, Text, Written
from forebay.cluster.system import Address
from forebay.replica.model import SCENARIOS
from forebay.replica.values import is_mail_address

HELPERS_MAX: Final = 64
"""Maximum number of helpers in the file: one for each machine that takes part in drills."""

TARGETS_MAX: Final = 64
"""Maximum number of replicas and agents of one machine."""

START_WORDS_MAX: Final = 32
"""Maximum number of words of the command that restarts a process."""

HOURS_MAX: Final = 16
"""Maximum number of weekly periods without drills."""

REMINDED_MAX: Final = 8
"""Maximum number of recipients of reminders."""

DAYS_MAX: Final = 3_660
"""Maximum interval between two drills of a kind, days."""

Allowed = Literal["process", "network", "disk"]
"""Kinds of faults: signals, network (an nft table), and disk (a file that fills a filesystem, or a limit on writes)."""

DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

_HOURS: Final = re.compile(r"([A-Z][a-z]{2})(?:-([A-Z][a-z]{2}))? (\d\d):(\d\d)-(\d\d):(\d\d)", re.ASCII)
_HOURS_RULE: Final = 'write days and hours of this machine\'s own time, for example "Mon-Fri 08:00-18:00"'
_MINUTES_OF_A_DAY: Final = 24 * 60


class Hours(msgspec.Struct, frozen=True):
    """Weekly period, in days and minutes from midnight; `until` is excluded."""

    days: frozenset[int]
    """0 is Monday."""
    since: int
    until: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parse `Mon-Fri 08:00-18:00` or `Sun 00:00-24:00`.

        Raises:
            ValueError: The text has another form.
        """
        found = _HOURS.fullmatch(text)
        if found is None:
            raise ValueError(text)
        first, last = DAYS.index(found[1]), DAYS.index(found[2] or found[1])
        days = frozenset((first + step) % len(DAYS) for step in range((last - first) % len(DAYS) + 1))
        hours = cls(days, int(found[3]) * 60 + int(found[4]), int(found[5]) * 60 + int(found[6]))
        if not 0 <= hours.since < hours.until <= _MINUTES_OF_A_DAY or max(int(found[4]), int(found[6])) >= 60:
            raise ValueError(text)
        return hours

    def hold(self, day: int, minute: int) -> bool:
        """Return whether a minute of a weekday is in the period."""
        return day in self.days and self.since <= minute < self.until


class HelperConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Helper of one machine: its address, and the machine's replicas and agents."""

    name: Annotated[Written[Name], Meta(examples=["h1"])]
    address: Annotated[Written[Address], Meta(examples=["127.0.0.1:7431"])]
    targets: Annotated[tuple[Text, ...], Meta(max_length=TARGETS_MAX)]


class DrillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Permissions of drills on this machine: none, unless `allow` grants some."""

    allow: tuple[Allowed, ...] = ()
    directory: Path = Path("drill")
    """Directory in which each helper records how to undo a fault before causing it."""
    start: Annotated[tuple[Text, ...], Meta(max_length=START_WORDS_MAX)] = ()
    """Command that restarts a process killed by a drill, for machines without a service manager.

    `{name}` is its name.
    """
    never: Annotated[tuple[Text, ...], Meta(max_length=HOURS_MAX)] = ()
    """Periods in which no drill may begin, such as `Mon-Fri 08:00-18:00`, in local time."""
    require_second: bool = False
    """True if a second operator must approve each drill."""
    every_days: dict[str, Annotated[int, Meta(ge=1, le=DAYS_MAX)]] = {}
    """Days after which each kind of drill is due again, such as `{switchover = 30}`; the leader sends reminders."""
    remind: Annotated[tuple[Text, ...], Meta(max_length=REMINDED_MAX)] = ()
    """Recipients of reminders, as for `[mail]`."""
    automatic: Annotated[tuple[Text, ...], Meta(max_length=len(SCENARIOS))] = ()
    """Kinds that `--automatic` may run from a timer, once the last three of that kind have passed."""
    prometheus: Text = ""
    """Prometheus server that a coordinator on this machine queries once a second during a drill."""
    stop_when: Text = ""
    """PromQL query, as in an alerting rule; any result aborts the drill."""

    def __post_init__(self) -> None:
        """Check programs, addresses, scenarios and periods.

        Raises:
            InvalidValue: One of them is invalid.
        """
        if self.start and not self.start[0].startswith("/"):
            raise InvalidValue(f"found {self.start[0]!r:.60}", "write the absolute path of a program", "start", 0)
        if self.prometheus and not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", self.prometheus):
            remedy = 'write its address without a name, such as "http://10.0.0.9:9090"'
            raise InvalidValue(f"found {self.prometheus!r:.60}", remedy, "prometheus")
        if bool(self.prometheus) is not bool(self.stop_when):
            missing = "stop_when" if self.prometheus else "prometheus"
            raise InvalidValue(f"{missing} is missing", "write both or neither", "stop_when")
        if bool(self.every_days) is not bool(self.remind):
            missing, place = ("remind", "every_days") if self.every_days else ("every_days", "remind")
            raise InvalidValue(f"{missing} is missing", "write both or neither", place)
        for name in self.every_days:
            _check_scenario(name, "every_days", name)
        for number, name in enumerate(self.automatic):
            _check_scenario(name, "automatic", number)
        for number, name in enumerate(self.remind):
            if not is_mail_address(name):
                raise InvalidValue(f"found {name!r:.60}", "write a mail address, or a user's name", "remind", number)
        for number, text in enumerate(self.never):
            try:
                Hours.parse(text)
            except ValueError as error:
                raise InvalidValue(f"found {text!r:.60}", _HOURS_RULE, "never", number) from error

    def forbids(self, day: int, minute: int) -> str:
        """Return the forbidden period that contains this minute (from midnight) of a weekday (0 is Monday), or ""."""
        return next((text for text in self.never if Hours.parse(text).hold(day, minute)), "")


def _check_scenario(name: str, *place: str | int) -> None:
    if name not in SCENARIOS:
        raise InvalidValue(f"found {name!r:.60}", f"use one of: {', '.join(SCENARIOS)}", *place)


NO_DRILLS: Final = DrillConfig()
