"""Contents of a scheduling index in a form that can be compared: of each small index all that it holds."""

from __future__ import annotations

from forebay.replica.model import ArrayUse
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.node_index import NodeList
from forebay.replica.values import SortedKeys

SMALL_INDEXES = (
    "queues",
    "arrays",
    "nodes",
    "timers",
    "holders",
    "slots",
    "preemptible",
    "reservations",
    "external_jobs",
    "lingering",
    "pass_limit_reached",
    "dependencies",
    "singletons",
)

_LEFT_OUT = {
    "has_watched": "what took long a moment ago",
    "names": "shares objects, and says nothing of a State",
    "_first_of": "whom to check when a job comes further: some for nothing, depending on what came before",
    "_queues": "another small index",
    "_rows": "not its own",
    "_entry": "code",
    "_partitions": "the State's",
    "_lists_of": "the lists of each partition, by node",
}


def contents(index: SchedulingIndex) -> dict[str, object]:
    """Return what the index holds, after it has caught up: of each small index its attributes, and the rows."""
    index.catch_up()
    return {"rows": dict(index._rows)} | {name: held(getattr(index, name)) for name in SMALL_INDEXES}


def held(small: object) -> dict[str, object]:
    return {name: _plain(value) for name, value in vars(small).items() if name not in _LEFT_OUT}


def _plain(value: object) -> object:
    if isinstance(value, SortedKeys):
        return list(value)
    if isinstance(value, ArrayUse):
        return value.active, value.ahead
    if isinstance(value, NodeList):
        return held(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return set(value) if isinstance(value, set) else value
