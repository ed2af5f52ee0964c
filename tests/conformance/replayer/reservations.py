"""Reservations: what `scontrol show reservation` and `forebay policy reservation list` print, compared. Pure."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import msgspec

from tests.conformance.replayer.differences import POWERS
from tests.conformance.replayer.words import NoSuchCommand, Parsed

NOUN: Final = re.compile(r"res(ervation(s|name)?)?", re.IGNORECASE)
"""What scontrol calls reservations."""

_FIELD: Final = re.compile(r"\b(ReservationName|Users|Accounts|State|BurstBuffer)=(\S+)")
_SPACE: Final = re.compile(r"(?:(?:\w+:)?([\w.-]+):)?(\d+)([A-Za-z]*)")
"""[[plugin:]pool:]size"""
_NONE: Final = "(null)"


class Reserved(msgspec.Struct, frozen=True, order=True):
    """One reservation, as far as both show it."""

    name: str
    state: str
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    space: tuple[tuple[str, int], ...]
    """Pools and bytes (units of a pool that counts)."""

    @property
    def text(self) -> str:
        """As a report shows it."""
        space = ",".join(f"{pool}:{size}" for pool, size in self.space)
        return f"{self.name} {self.state} {','.join(self.users) or '-'} {','.join(self.accounts) or '-'} {space}"


def reserved_in(lines: Sequence[str]) -> tuple[Reserved, ...]:
    """Return the reservations of a listing in either form, by name; none where there are none."""
    found: list[dict[str, str]] = []
    for line in lines:
        for key, value in _FIELD.findall(line):
            if key == "ReservationName":
                found.append({})
            if found:
                found[-1][key] = value
    return tuple(sorted(_reserved(fields) for fields in found))


def _reserved(fields: dict[str, str]) -> Reserved:
    return Reserved(
        name=fields["ReservationName"],
        state=fields.get("State", ""),
        users=_names(fields.get("Users", _NONE)),
        accounts=_names(fields.get("Accounts", _NONE)),
        space=tuple(sorted(_space(one) for one in _names(fields.get("BurstBuffer", _NONE)))),
    )


def _names(text: str) -> tuple[str, ...]:
    return () if text == _NONE else tuple(sorted(text.split(",")))


def _space(text: str) -> tuple[str, int]:
    found = _SPACE.fullmatch(text)
    if found is None or found[3].upper() not in POWERS:
        return text, 0
    return found[1] or "", int(Fraction(found[2]) * POWERS[found[3].upper()])


def named(parsed: Parsed) -> str:
    """Return the reservation that `scontrol show` or `delete` names, empty for all; NoSuchCommand for other words."""
    noun, equals, name = (parsed.words[1] if len(parsed.words) > 1 else "").partition("=")
    rest = parsed.words[2:]
    if NOUN.fullmatch(noun) is None or len(rest) > 1 or (equals and rest):
        raise NoSuchCommand("scontrol names no reservation that is read here")
    return name or (rest[0] if rest else "")
