"""Base classes and shared types of all requests and responses."""

from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from forebay.replica.values import NAME_CHARACTERS_MAX

Json = dict[str, Any]

COMMAND_ID_PATTERN = r"^[0-9a-f]{32}$"

# The length is bounded as well, because `$` also matches before a trailing line break.
CommandId = Annotated[
    str,
    msgspec.Meta(
        pattern=COMMAND_ID_PATTERN, min_length=32, max_length=32, description="UUIDv7 as 32 hexadecimal digits"
    ),
]

BODY_BYTES_MAX = 8 * 1024 * 1024
"""Size of one request body, bytes: a full bulk request of ordinary scripts, or the largest script, escaped."""

USER_HEADER = "Forebay-User"
"""Header in which a gateway names the account it acts for."""

NUMBER_MAX = 2**63 - 1
"""Largest number in a request: a signed 64-bit field of the ledger. Each use checks its own range."""

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
"""Non-empty name."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of request bodies: frozen, without unknown fields, encoded without default values."""


class Command(Request, frozen=True, kw_only=True):
    """Request that changes state. Its ID makes it take effect exactly once."""

    command_id: CommandId


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything a replica returns: frozen, with named fields."""


class Answer(View, frozen=True, kw_only=True):
    """Response that was true at one revision."""

    revision: int


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


@cache
def shared_fields(record: Any, kind: Any) -> tuple[str, ...]:
    """Return the field names that the struct `kind` shares with the class `record`."""
    return tuple(name for name in kind.__struct_fields__ if hasattr(record, name))


def made_of(record: object, kind: type[_Struct], /, **differing: Any) -> _Struct:
    """Return a `kind` filled from the fields of `record` with the same names; `differing` supplies the others.

    Raises:
        TypeError: A required field is missing, or `kind` has no such field.
    """
    its_class: Any = type(record)
    names = shared_fields(its_class, kind)
    return kind(**{name: getattr(record, name) for name in names if name not in differing}, **differing)
