"""Events between two revisions that match a filter, one page per query.

Events of one job, or of no job, are read through the index. All others are searched entry by entry. A search stops
after a fifth of a second and the client continues from there, so no query delays the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from msgspec.structs import replace

from forebay.cluster.api.history_service.follower import STEP_BYTES, STEP_ENTRIES, Follower
from forebay.cluster.api.history_service.frames import REJECTED, CommandEvents, EventFilter
from forebay.cluster.api.render import actor_words
from forebay.cluster.schemas import RECORD_FIELDS, is_about, kind_name
from forebay.replica.messages import (
    EVENTS,
    Batch,
    Entry,
    Event,
    JobSubmitted,
    concerns_cluster,
    job_of,
    jobs_of,
)
from forebay.replica.messages.events import ExternalJobSetUp
from forebay.replica.model import Job
from forebay.replica.values import NEVER, Instant
from forebay.wal import (
    CLUSTER,
    EntryKind,
    LedgerEntry,
    batch_of_encoded,
    decode_batch,
    encode_entry,
    instant_of,
    kind_of,
    one_of_batch,
)

STRETCH_S: Final = 0.2
"""Time limit of one search, seconds; the page then reports its last revision."""

OWNERS_MAX: Final = 65_536
"""Jobs whose owner is cached, count."""

_OF_CLUSTER: Final = frozenset(kind_name(kind) for kind in EVENTS if concerns_cluster(kind)) | {REJECTED}


class JobOwner(NamedTuple):
    """Owner of a job at submission; both empty if unknown."""

    user: str = ""
    account: str = ""


class EventPage(NamedTuple):
    """Matches, and the last searched revision with its time."""

    happened: tuple[CommandEvents, ...]
    read: int
    at: Instant


def thing_in(event: Event, of: str) -> str | None:
    """Return the name of the record of kind `of` that an event is about, or None.

    An event is about its first field; other fields, such as a persistent buffer's pool, do not count.
    """
    if not is_about(type(event), of):
        return None
    found = getattr(event, RECORD_FIELDS.get(of, of))
    return found if isinstance(found, str) else str(found.name)


class EventPages:
    """Searches the ledger for events."""

    def __init__(self, follower: Follower, monotonic_s: Callable[[], float]) -> None:
        self._follower = follower
        self._monotonic_s = monotonic_s
        self._owners: dict[int, JobOwner] = {}

    def read_page(self, sought: EventFilter, after: int, until: int, limit: int) -> EventPage:
        """Return the matches after one revision up to another, at most `limit` commands.

        Raises:
            LookupError: The ledger has a gap there.
        """
        ends_s = self._monotonic_s() + STRETCH_S
        found: list[CommandEvents] = []
        read, at = after, NEVER
        try:
            for revision, batch, place in self._candidates(sought, after, until):
                if happened := self._matching(sought, revision, batch, batch.entries[place]):
                    found.append(happened)
                read, at = revision, batch.at
                if len(found) >= limit or self._monotonic_s() > ends_s:
                    return EventPage(tuple(found), read, at)
        except LookupError:
            if read == after:
                raise
            return EventPage(tuple(found), read, at)  # events before the gap are returned first
        return EventPage(tuple(found), max(until, after), at)

    def _candidates(self, sought: EventFilter, after: int, until: int) -> Iterator[tuple[int, Batch, int]]:
        """Yield candidate commands: revision, batch, and position in the batch."""
        if after >= until:
            return
        index = self._follower.ledger.index_of_revision(after + 1)
        if sought.job or sought.of or (sought.kinds and _OF_CLUSTER.issuperset(sought.kinds)):
            self._check_noted(index, self._follower.ledger.index_of_revision(until))
            for row in self._follower.rows(sought.job or CLUSTER, after):
                if row.revision > until:
                    return
                entry = self._entry(self._follower.ledger.index_of_revision(row.revision))
                yield row.revision, decode_batch(one_of_batch(entry.data, row.revision - entry.base - 1)), 0
            return
        while True:
            entries = self._follower.ledger.read_some(index, entries_max=STEP_ENTRIES, bytes_max=STEP_BYTES)
            if not entries and index > self._follower.ledger.applied_index:
                return
            if not entries or entries[0].index != index:
                raise LookupError(f"entry {index} is not held by this replica")
            for entry in entries:
                if entry.index != index:
                    break
                index += 1
                if kind_of(entry.data) is not EntryKind.BATCH or entry.revision == entry.base:
                    continue
                batch = decode_batch(entry.data)
                for place in range(max(0, after - entry.base), len(batch.entries)):
                    revision = entry.base + place + 1
                    yield revision, batch, place
                    if revision == until:
                        return

    def _check_noted(self, first: int, last: int) -> None:
        """Raise LookupError if some of these entries are not indexed, because their events would be missing."""
        for hole in self._follower.holes:
            if hole.first_index <= last and hole.last_index >= first:
                raise LookupError(f"the entries {hole.first_index} to {hole.last_index} are not held by this replica")

    def _matching(self, sought: EventFilter, revision: int, batch: Batch, entry: Entry) -> CommandEvents | None:
        """Return the matching part of a command, or None."""
        if sought.actor and sought.actor not in (entry.actor.name, actor_words(entry.actor, entry.command)):
            return None
        asked = entry.actor.name
        if entry.rejection is not None:
            if (
                (sought.kinds and REJECTED not in sought.kinds)
                or sought.job
                or sought.of
                or sought.account
                or (sought.user and asked != sought.user)
                or (sought.own and asked != sought.own)
            ):
                return None
            return CommandEvents(revision, _alone(batch, entry), ())
        events: list[Event] = []
        users: list[str] = []
        places: list[int] = []
        for place, event in enumerate(entry.events):
            jobs = jobs_of(event)
            if (
                kind_name(type(event)) not in sought.kinds
                if sought.kinds
                else not (jobs or concerns_cluster(type(event)))
            ):
                continue  # routine events are shown only on request
            if sought.job and sought.job not in jobs:
                continue
            if sought.of and ((thing := thing_in(event, sought.of)) is None or sought.name not in ("", thing)):
                continue
            owner = self._owner(event) if jobs else JobOwner()
            if sought.user and sought.user not in (owner.user, asked):
                continue
            if (sought.account and owner.account != sought.account) or (jobs and sought.only not in ("", owner.user)):
                continue
            events.append(event)
            users.append(owner.user)
            places.append(place)
        if not events:
            return None
        return CommandEvents(revision, _alone(batch, replace(entry, events=tuple(events))), tuple(users), tuple(places))

    def _owner(self, event: Event) -> JobOwner:
        """Return the owner of the job an event is about."""
        job = job_of(event)
        assert job is not None, event
        found = self._owners.get(job)
        if found is None:
            found = self._read_owner(event, job)
            if len(self._owners) >= OWNERS_MAX:
                self._owners.clear()
            self._owners[job] = found
        return found

    def _read_owner(self, event: Event, job: int) -> JobOwner:
        if isinstance(event, JobSubmitted | ExternalJobSetUp):
            return _owner_of(event)
        known = self._follower.points[-1].state.jobs.get(job)
        if known is not None:
            return _owner_of(known)
        try:
            for row in self._follower.rows(job)[:1]:
                entry = self._entry(self._follower.ledger.index_of_revision(row.revision))
                for first in decode_batch(one_of_batch(entry.data, row.revision - entry.base - 1)).entries[0].events:
                    if isinstance(first, JobSubmitted | ExternalJobSetUp) and job in jobs_of(first):
                        return _owner_of(first)
        except LookupError:
            pass  # unknown owner: the first record of the job is no longer held
        return JobOwner()

    def _entry(self, index: int) -> LedgerEntry:
        found = self._follower.ledger.read_some(index, entries_max=1, bytes_max=1)
        if not found or found[0].index != index:
            raise LookupError(f"entry {index} is not held by this replica")
        return found[0]

    def at(self, revision: int) -> Instant:
        """Return the time of a revision; NEVER if it is not held."""
        try:
            found = instant_of(self._entry(self._follower.ledger.index_of_revision(revision)).data)
        except LookupError:
            found = None
        return NEVER if found is None else found


def _owner_of(found: Job | JobSubmitted | ExternalJobSetUp) -> JobOwner:
    return JobOwner(found.request.user, found.request.effective_options.account)


def _alone(batch: Batch, entry: Entry) -> bytes:
    return batch_of_encoded(batch.base, batch.at, (encode_entry(entry),))
