"""Names of events, and of the groups in which an event sink's filter selects them."""

from collections.abc import Iterable, Mapping
from typing import Final

from forebay.cluster.schemas.operations import HISTORY_OF
from forebay.replica.messages import EVENTS, Event, SinkAdvanced, SinkRemoved, concerns_cluster, is_routine, job_of

RECORD_FIELDS: Final = {"buffer": "name"}
"""Field of an event that names its record, if it is not named after the record's kind."""

NEVER_DELIVERED: Final = frozenset({SinkAdvanced, SinkRemoved})
"""Events about event sinks themselves: delivering them would cause further ones."""


def kind_name(kind: type[Event]) -> str:
    """Return the name of a kind of event, for example `job_submitted`."""
    name = kind.__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def is_about(kind: type[Event], of: str) -> bool:
    """Return whether events of this class are about a record of kind `of`: their first field names it.

    Other fields, such as a persistent buffer's pool, do not count.
    """
    return concerns_cluster(kind) and kind.__struct_fields__[0] == RECORD_FIELDS.get(of, of)


def _groups() -> dict[str, frozenset[type[Event]]]:
    groups = {of: frozenset(kind for kind in EVENTS if is_about(kind, of)) for of in HISTORY_OF}
    groups["job"] = frozenset(kind for kind in EVENTS if "job" in kind.__struct_fields__)
    groups["drill"] = frozenset(kind for kind in EVENTS if concerns_cluster(kind) and kind.__name__.startswith("Drill"))
    grouped = frozenset().union(*groups.values())
    groups["cluster"] = frozenset(kind for kind in EVENTS if kind not in grouped and not is_routine(kind))
    return groups


EVENT_GROUPS: Final[Mapping[str, frozenset[type[Event]]]] = _groups()
"""Groups of events by name: `job`, `drill`, each kind of record in the history, and `cluster` for all others.

Routine events are in no group.
"""

EVENT_KINDS: Final[Mapping[str, type[Event]]] = {
    kind_name(kind): kind for kind in EVENTS if kind not in NEVER_DELIVERED
}
"""Events that a sink may name, by name."""

USUAL_KINDS: Final[frozenset[type[Event]]] = frozenset().union(*EVENT_GROUPS.values())
"""Events that a sink without a filter receives."""


def record_of(event: Event) -> str:
    """Return the kind and name of the record that an event is about: `job/12`, `pool/fast`, `drill/3`; or ""."""
    of = _RECORDS.get(type(event))
    if of is None:
        job = job_of(event)
        return "" if job is None else f"job/{job}"
    found = getattr(event, RECORD_FIELDS.get(of, of))
    return f"{of}/{found if isinstance(found, str | int) else found.name}"


_RECORDS: Final = {kind: of for of in HISTORY_OF for kind in EVENT_GROUPS[of]} | {
    kind: "drill" for kind in EVENTS if "drill" in kind.__struct_fields__
}


def selected_kinds(names: Iterable[str]) -> frozenset[type[Event]]:
    """Return the classes of events that these names of groups and events select; without names, the usual ones.

    Raises:
        LookupError: A name is unknown; the error has it.
    """
    found: set[type[Event]] = set()
    names = tuple(names)
    for name in names:
        if name in EVENT_GROUPS:
            found |= EVENT_GROUPS[name]
        elif name in EVENT_KINDS:
            found.add(EVENT_KINDS[name])
        else:
            raise LookupError(name)
    return frozenset(found) if names else USUAL_KINDS
