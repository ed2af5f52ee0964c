"""Values of a replica that its state does not contain, for reads in the history service's process."""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.cluster.api.ledger import status_of
from forebay.cluster.api.members import members_of
from forebay.cluster.api.metrics import MetricFamily
from forebay.cluster.api.service import ApiCall
from forebay.cluster.api.statuses import LiveValues
from forebay.cluster.api.watch.attention import find_sinks
from forebay.cluster.schemas import MemberView, NeedView, StatusView
from forebay.replica.state import State

_OF_STATUS = ("room_bytes", "journal_fill", "sync_s", "certificate_until", "authority_until")


async def live_values(call: ApiCall[Any]) -> bytes:
    """Return the encoded values that the call's operation needs."""
    service, wanted = call.service, call.operation.live or ()
    controller = service.controller
    agents = status = None
    members: tuple[MemberView, ...] = ()
    metrics: tuple[MetricFamily, ...] = ()
    sinks: tuple[NeedView, ...] = ()
    if controller.leads:
        await call.work.take(parts=len(controller.state.nodes) if "contacts" in wanted else 0)
        agents = controller.liveness.reports(contacts="contacts" in wanted, progress="progress" in wanted)
    if "replicas" in wanted:
        status, members = await replicas_of(call, controller.state)
        sinks = sink_needs(call)
    if "metrics" in wanted:
        metrics = tuple(service.metrics.families())
    values = LiveValues(controller.name, agents, status, members, metrics, service.metrics.pid, sinks)
    return msgspec.msgpack.encode(values)


def sink_needs(call: ApiCall[Any]) -> tuple[NeedView, ...]:
    """Return the event sinks that need attention."""
    service = call.service
    if service.live is not None:
        return service.live.sinks
    return tuple(find_sinks(service.sinks, service.controller.agreed.now()))


async def replicas_of(call: ApiCall[Any], state: State) -> tuple[StatusView, tuple[MemberView, ...]]:
    """Return the replica's status, and all replicas with their last known statuses."""
    live = call.service.live
    if live is not None:
        assert live.status is not None, call.operation.name
        return live.status, live.members
    status, rows = status_of(call), members_of(call, state)
    others = [row.name for row in rows if row.reachable and row.name != status.replica]
    said = {**await call.service.statuses.of(others), status.replica: status}
    completed = []
    for row in rows:
        word = said.get(row.name)
        if word is not None:
            # `lag_entries` shows another replica's progress, because its status can be a minute old.
            row = msgspec.structs.replace(row, **{name: getattr(word, name) for name in _OF_STATUS})
        completed.append(row)
    return status, tuple(completed)
