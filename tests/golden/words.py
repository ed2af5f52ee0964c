"""Every word that a release can write into entries and snapshots: records with their fields, tags, and wire numbers."""

from typing import Any

import msgspec.inspect as inspect

from forebay.replica.messages.entries import Batch
from forebay.replica.state.state import TABLES
from forebay.snapshots.image import PoolCapacity, SnapshotHeader
from forebay.wal.configuration import Configuration

ROOTS: tuple[type, ...] = (Batch, Configuration, SnapshotHeader, PoolCapacity, *(table.record for table in TABLES))


def vocabulary() -> dict[str, Any]:
    """Return each record as its tag and its fields in order, and each enumeration as its numbers, by name."""
    found: dict[str, Any] = {}
    for root in ROOTS:
        _word(inspect.type_info(root), found)
    return found


def _word(info: inspect.Type, found: dict[str, Any]) -> str:
    match info:
        case inspect.StructType():
            name = info.cls.__name__
            if name not in found:
                found[name] = {}
                fields = [[field.name, _word(field.type, found)] for field in info.fields]
                found[name] = {"tag": info.tag, "fields": fields}
            return name
        case inspect.EnumType():
            found[info.cls.__name__] = {member.name: member.value for member in info.cls}
            return info.cls.__name__
        case inspect.VarTupleType():
            return f"tuple[{_word(info.item_type, found)}, ...]"
        case inspect.TupleType():
            return f"tuple[{', '.join(_word(item, found) for item in info.item_types)}]"
        case inspect.UnionType():
            words = [_word(item, found) for item in info.types]
            # The events are the one union of records that grows.
            return "Event" if "ClusterFounded" in words else " | ".join(sorted(words))
    return type(info).__name__.removesuffix("Type").lower()
