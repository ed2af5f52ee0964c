"""Differences between two states, record by record, with the command that last changed each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

from forebay.cluster.api.history_service.event_pages import thing_in
from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.api.history_service.frames import ChangesQuery
from forebay.cluster.api.render import actor_words, as_json
from forebay.cluster.schemas import ChangeView, DiffAnswer, MomentView
from forebay.cluster.system import format_instant
from forebay.replica.messages import Batch, Entry, Event
from forebay.replica.messages.events import ClusterFounded, SchedulingRulesSet, SiteConfigured, TransferRulesSet
from forebay.replica.state import State
from forebay.replica.values import Instant
from forebay.wal import CLUSTER, decode_batch

ENTRIES_KEPT: Final = 16
"""Entries cached during a query, count; simultaneous changes share one."""

BACK_MAX: Final = 20_000
"""Commands searched, newest first, for the author of a change that concerns no job, count: two seconds."""

_TABLES: Final = {
    "pool": "pools",
    "filesystem": "filesystems",
    "node": "nodes",
    "partition": "partitions",
    "reservation": "reservations",
    "buffer": "persistent",
    "account": "accounts",
    "qos": "qos",
    "license": "licenses",
}
"""Kinds of records, and their maps in a state ..."""

_OPERATORS_TABLES: Final = {"scheduler": "schedulers"}
"""... and those that only operators may list."""

_SETTINGS: Final[Mapping[str, type[Event]]] = {
    "site": SiteConfigured,
    "scheduling_rules": SchedulingRulesSet,
    "transfer_rules": TransferRulesSet,
}
"""Singleton records, and the events that set them."""

_OWN_KEYS: Final = frozenset({"id", "name", "buffer.job"})
"""Fields that repeat the record's key."""

Flat = dict[str, Any]


class RecordChange(NamedTuple):
    """Changed record: its fields before and after, None if it did not exist."""

    kind: str
    name: str
    before: Flat | None
    after: Flat | None


class _ChangedBy(NamedTuple):
    """Last command that changed a record."""

    revision: int
    batch: Batch
    entry: Entry


def changes_between(follower: Follower, asked: ChangesQuery, before: State, after: State) -> DiffAnswer:
    """Return the changed records with their changed fields.

    Raises:
        LookupError: This replica does not hold the history.
    """
    found = list(islice(changed_records(before, after, asked), asked.limit + 1))
    shown = found[: asked.limit]
    by = _ChangeAuthors(follower, int(before.revision), int(after.revision))
    by.look_for({(one.kind, one.name) for one in shown if one.kind != "job"})
    return DiffAnswer(
        revision=int(after.revision),
        since=MomentView(revision=int(before.revision), at=format_instant(before.at)),
        until=MomentView(revision=int(after.revision), at=format_instant(after.at)),
        changes=tuple(_view(one, by.of(one.kind, one.name)) for one in shown),
        more=len(found) > asked.limit,
    )


def changed_records(before: State, after: State, asked: ChangesQuery) -> Iterator[RecordChange]:
    """Yield the changed records: the cluster's first, then jobs by ID."""
    if not asked.job:
        yield from _things(before, after, asked)
    if asked.of:
        return
    if asked.job:
        jobs = [asked.job] if asked.job in before.jobs or asked.job in after.jobs else []
    else:
        jobs = sorted({*before.jobs, *after.jobs})
    for job_id in jobs:
        one, two = before.jobs.get(job_id), after.jobs.get(job_id)
        of = two or one
        assert of is not None
        if asked.only not in ("", of.request.user):
            continue
        if one != two or before.buffers.get(job_id) != after.buffers.get(job_id):
            yield RecordChange("job", str(job_id), _flat_job(before, job_id), _flat_job(after, job_id))


def _things(before: State, after: State, asked: ChangesQuery) -> Iterator[RecordChange]:
    if asked.is_operator and not asked.of:
        if before.feature_level != after.feature_level:
            levels = ({"level": state.feature_level} if state.revision else None for state in (before, after))
            yield RecordChange("feature_level", "", *levels)
        for setting in _SETTINGS:
            if getattr(before, setting) != getattr(after, setting):
                yield RecordChange(setting, "", _flat(getattr(before, setting)), _flat(getattr(after, setting)))
    for kind, table in {**_TABLES, **(_OPERATORS_TABLES if asked.is_operator else {})}.items():
        if asked.of not in ("", kind):
            continue
        were, are = getattr(before, table), getattr(after, table)
        for name in sorted({*were, *are}):
            if asked.name not in ("", name):
                continue
            one, two = _flat_thing(before, kind, were.get(name)), _flat_thing(after, kind, are.get(name))
            if one != two:
                yield RecordChange(kind, name, one, two)


def _flat_job(state: State, job_id: int) -> Flat | None:
    job, buffer = state.jobs.get(job_id), state.buffers.get(job_id)
    if job is None:
        return None
    return {**_flat(job), **({} if buffer is None else _flat(buffer, "buffer."))}


def _flat_thing(state: State, kind: str, record: Any) -> Flat | None:
    if record is None:
        return None
    found = _flat(record)
    if kind == "pool":
        found["held_bytes"] = state.held_bytes.get(record.name, 0)
    return found


def _flat(record: Any, under: str = "") -> Flat:
    """Return a record's fields, those of nested records as `request.user`."""
    return dict(_flatten_fields(as_json(record, private=False), under))


def _flatten_fields(fields: Mapping[str, Any], under: str) -> Iterator[tuple[str, Any]]:
    for field, value in fields.items():
        if isinstance(value, dict):
            yield from _flatten_fields(value, f"{under}{field}.")
        elif field.endswith("_at") and isinstance(value, int):
            yield f"{under}{field}", format_instant(Instant(value))
        elif f"{under}{field}" not in _OWN_KEYS:
            yield f"{under}{field}", value


def _view(one: RecordChange, by: _ChangedBy | None) -> ChangeView:
    before, after = one.before or {}, one.after or {}
    what = "changed" if one.before and one.after else "new" if one.after else "gone"
    fields = {
        field: (before.get(field), after.get(field))
        for field in sorted({*before, *after})
        if before.get(field) != after.get(field) and (one.before or after.get(field))
    }
    return ChangeView(
        kind=one.kind,
        name=one.name,
        change=what,
        fields={} if what == "gone" else fields,
        revision=None if by is None else by.revision,
        at=None if by is None else format_instant(by.batch.at),
        actor=None if by is None else actor_words(by.entry.actor, by.entry.command),
        command=None if by is None else by.entry.command,
    )


class _ChangeAuthors:
    """Authors of the last changes between two revisions."""

    def __init__(self, follower: Follower, after: int, until: int) -> None:
        self._follower = follower
        self._after, self._until = after, until
        self._known: dict[tuple[str, str], _ChangedBy] = {}
        self._read = lru_cache(ENTRIES_KEPT)(self._read_entry)

    def look_for(self, wanted: set[tuple[str, str]]) -> None:
        """Search events without a job, newest first, until all authors are found."""
        missing = set(wanted)
        rows = [row for row in self._follower.rows(CLUSTER, self._after) if row.revision <= self._until]
        for row in reversed(rows[-BACK_MAX:]):
            if not missing:
                return
            by = self._find_batch(row.revision)
            for subject in [one for one in missing if any(_is_about(event, one) for event in by.entry.events)]:
                self._known[subject] = by
                missing.discard(subject)

    def of(self, kind: str, name: str) -> _ChangedBy | None:
        """Return the author of a record's last change; None if unknown, for example if jobs took a pool's space."""
        if kind != "job":
            return self._known.get((kind, name))
        rows = [row for row in self._follower.rows(int(name), self._after) if row.revision <= self._until]
        return self._find_batch(rows[-1].revision) if rows else None

    def _find_batch(self, revision: int) -> _ChangedBy:
        base, batch = self._read(self._follower.ledger.index_of_revision(revision))
        return _ChangedBy(revision, batch, batch.entries[revision - base - 1])

    def _read_entry(self, index: int) -> tuple[int, Batch]:
        found = self._follower.ledger.read_some(index, entries_max=1, bytes_max=1)
        if not found or found[0].index != index:
            raise LookupError(f"entry {index} is not held by this replica")
        return found[0].base, decode_batch(found[0].data)


def _is_about(event: Event, subject: tuple[str, str]) -> bool:
    kind, name = subject
    if isinstance(event, ClusterFounded):
        return True
    if kind in _SETTINGS:
        return type(event) is _SETTINGS[kind]
    if kind == "feature_level":
        return "level" in event.__struct_fields__
    return thing_in(event, kind) == name
