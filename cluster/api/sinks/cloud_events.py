"""CloudEvents 1.0 of the ledger's events, in the JSON format.

An event's ID consists of the cluster, its revision and its position in the command, so that it is the same for each
leader and in each repetition. After the loss of a majority, revisions of lost entries are used again; IDs of the new
incarnation therefore name it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from forebay.cluster.api.render import event_view
from forebay.cluster.schemas import EventView, record_of
from forebay.cluster.server import AppliedEntry, settled_at
from forebay.cluster.system import format_instant
from forebay.replica.model import Recovery, has_private_data
from forebay.replica.state import State
from forebay.replica.values import Instant

SPEC_VERSION: Final = "1.0"

TYPE_PREFIX: Final = "forebay."
"""Prefix of the types; the rest is the event's name in the API."""

GAP_TYPE: Final = "forebay.sink_gap"
"""Type of the event that replaces events the ledger no longer holds."""

CONTENT_TYPE: Final = "application/cloudevents-batch+json; charset=utf-8"


class SinkGap(msgspec.Struct, frozen=True):
    """Content of a gap: the events of these revisions cannot be sent; both are included."""

    first_revision: int
    last_revision: int
    reason: str


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event in the JSON format."""

    specversion: str
    id: str
    source: str
    type: str
    subject: str | msgspec.UnsetType = msgspec.UNSET
    time: str
    datacontenttype: str = "application/json"
    data: EventView | SinkGap


def event_of(state: State, applied: AppliedEntry, position: int, sequence: int) -> bytes:
    """Return an event of an applied batch; `position`: the command in the batch, `sequence`: the event in the command.

    It has what the event stream shows to a user without jobs: no scripts, environments, names of files or keys, and
    with private data no details of jobs.
    """
    batch = applied.batch
    assert batch is not None
    entry, revision = batch.entries[position], settled_at(applied, position)
    view = event_view(batch, entry, revision, sequence)
    if view.job_id is not None and has_private_data(state.site):
        view = msgspec.structs.replace(view, detail={})
    event = CloudEvent(
        specversion=SPEC_VERSION,
        id=f"{_origin(state, applied.index)}/{revision}/{sequence}",
        source=source_of(state),
        type=f"{TYPE_PREFIX}{view.event}",
        subject=record_of(entry.events[sequence]) or msgspec.UNSET,
        time=view.at,
        data=view,
    )
    return msgspec.json.encode(event)


def gap_of(state: State, sink: str, first: int, last: int, reason: str, at: Instant) -> bytes:
    """Return the event that says that the events of a range of revisions cannot be sent."""
    event = CloudEvent(
        specversion=SPEC_VERSION,
        id=f"{_origin(state, None)}/{first}-{last}/gap",
        source=source_of(state),
        type=GAP_TYPE,
        subject=f"sink/{sink}",
        time=format_instant(at) or "",
        data=SinkGap(first, last, reason),
    )
    return msgspec.json.encode(event)


def batch_of(events: Iterable[bytes]) -> bytes:
    """Return the body of a request with these events."""
    return b"[" + b",".join(events) + b"]"


def source_of(state: State) -> str:
    """Return the source of a cluster's events."""
    return f"/forebay/{state.cluster_id}"


def _origin(state: State, index: int | None) -> str:
    """Return the first part of an ID: the cluster, with the incarnation that wrote the entry if it is not the first."""
    number = incarnation_of(state.recoveries, index)
    return state.cluster_id if number == 1 else f"{state.cluster_id}.{number}"


def incarnation_of(recoveries: Mapping[int, Recovery], index: int | None) -> int:
    """Return the incarnation that wrote an entry; the present one for None."""
    begun = [one.incarnation for one in recoveries.values() if index is None or index > one.kept_index]
    return max(begun, default=max(1, min(recoveries, default=2) - 1))
