"""What every request and every answer has in common."""

from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from replica.values import NAME_CHARACTERS_MAX

Json = dict[str, Any]

COMMAND_ID_PATTERN = r"^[0-9a-f]{32}$"

# The length is said too: a dollar sign also matches before a line break at the end.
CommandId = Annotated[
    str,
    msgspec.Meta(
        pattern=COMMAND_ID_PATTERN, min_length=32, max_length=32, description="UUIDv7 as 32 hexadecimal digits"
    ),
]

BODY_BYTES_MAX = 8 * 1024 * 1024
"""One request's body, bytes: a full bulk request of ordinary scripts, or one script of the largest size, escaped."""

USER_HEADER = "Forebay-User"
"""The header in which a gateway names the account that it speaks for."""

NUMBER_MAX = 2**63 - 1
"""A number in a request: what a signed 64-bit field of the ledger holds. What it may be is asked where it is used."""

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
"""A name that has to be given."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What every body has in common: it is frozen, refuses unknown fields, and says no more than what was asked for."""


class Command(Request, frozen=True, kw_only=True):
    """A request that changes something; its id makes it happen once. All of the body where the path says the rest."""

    command_id: CommandId


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer has in common: it is frozen and made of named fields."""


class Answer(View, frozen=True, kw_only=True):
    """Answer that was true at one moment of the cluster's history."""

    revision: int


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


@cache
def shared_fields(record: Any, kind: Any) -> tuple[str, ...]:
    """Return the fields of the struct `kind` that the class `record` has under the same names."""
    return tuple(name for name in kind.__struct_fields__ if hasattr(record, name))


def made_of(record: object, kind: type[_Struct], /, **differing: Any) -> _Struct:
    """Return a `kind` with the fields that `record` has under the same names; `differing` are those that it has not.

    TypeError for a required field that comes from neither, or one that `kind` does not have.
    """
    its_class: Any = type(record)
    names = shared_fields(its_class, kind)
    return kind(**{name: getattr(record, name) for name in names if name not in differing}, **differing)
