"""Samples of every record in a batch, derived from the types: fixed for golden files, random for properties."""

import enum
import functools
from typing import Any, get_args

import msgspec
import msgspec.inspect as inspect
from hypothesis import strategies as st

from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.messages.events import Event

EVENTS: tuple[type[msgspec.Struct], ...] = get_args(Event)


def tag_of(event: type[msgspec.Struct]) -> int:
    tag = event.__struct_config__.tag
    assert isinstance(tag, int)
    return tag


@functools.cache
def sample(kind: type[msgspec.Struct]) -> Any:
    """Return a fixed value of a record: all fields differ if their types allow, and optional fields are present.

    Cached: records cannot change, and msgspec needs a tenth of a second to inspect the largest one.
    """
    return _fixed(inspect.type_info(kind), [0])


@functools.cache
def sample_batch(event: type[msgspec.Struct]) -> Batch:
    """Return a batch with an accepted command that has this event, and a rejected command."""
    accepted: Entry = msgspec.structs.replace(sample(Entry), events=(sample(event),), rejection=None)
    refused: Entry = msgspec.structs.replace(sample(Entry), events=())
    return Batch(base=7, at=1_790_000_000_000_000, entries=(accepted, refused))  # type: ignore[arg-type]


def _fixed(info: inspect.Type, count: list[int]) -> Any:
    count[0] += 1
    match info:
        case inspect.StructType():
            return info.cls(*(_fixed(field.type, count) for field in info.fields))
        case inspect.BoolType():
            return count[0] % 2 == 0
        case inspect.IntType():
            return count[0] * 101
        case inspect.StrType():
            return f"text {count[0]} \N{GREEK SMALL LETTER ALPHA}"
        case inspect.BytesType():
            return bytes(range(count[0] % 200, count[0] % 200 + 16))
        case inspect.EnumType():
            members = list(info.cls)
            return members[count[0] % len(members)]
        case inspect.NoneType():
            return None
        case inspect.VarTupleType():
            return tuple(_fixed(info.item_type, count) for _ in range(2))
        case inspect.TupleType():
            return tuple(_fixed(item, count) for item in info.item_types)
        case inspect.UnionType():
            return _fixed(info.types[0] if not isinstance(info.types[0], inspect.NoneType) else info.types[1], count)
    raise AssertionError(f"no sample for {info}: teach this function the new type")


def any_of(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type."""
    match info:
        case inspect.StructType():
            return st.builds(info.cls, *(any_of(field.type) for field in info.fields))
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-200, 70_000))
        case inspect.StrType():
            return st.text(max_size=40)
        case inspect.BytesType():
            return st.binary(max_size=40)
        case inspect.EnumType():
            members: list[enum.Enum] = list(info.cls)
            return st.sampled_from(members)
        case inspect.NoneType():
            return st.none()
        case inspect.VarTupleType():
            return st.lists(any_of(info.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*(any_of(item) for item in info.item_types))
        case inspect.UnionType():
            return st.one_of(*(any_of(item) for item in info.types))
    raise AssertionError(f"no strategy for {info}: teach this function the new type")


BATCHES: st.SearchStrategy[Batch] = any_of(inspect.type_info(Batch))
