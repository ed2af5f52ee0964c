"""Handler of `/v1/sinks`."""

from __future__ import annotations

from forebay.cluster.api.service import ApiCall, Reply, handles
from forebay.cluster.api.sinks import SinkDelivery
from forebay.cluster.config import SinkConfig
from forebay.cluster.schemas import SinksAnswer, SinkView
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import format_instant
from forebay.replica.state import State
from forebay.replica.values import Instant


@handles(ops.LIST_SINKS)
async def list_sinks(call: ApiCall[None]) -> Reply[SinksAnswer]:
    state, service = await call.state(), call.service
    sinks, now = service.sinks, service.controller.agreed.now()
    rows = tuple(_view(state, one, sinks.deliveries.get(one.name), now) for one in sinks.configured)
    return Reply(state.revision, SinksAnswer(revision=state.revision, replica=service.controller.name, sinks=rows))


def _view(state: State, sink: SinkConfig, delivery: SinkDelivery | None, now: Instant) -> SinkView:
    mark = state.sink_marks.get(sink.name)
    if delivery is None:
        return SinkView(name=sink.name, url=sink.url, kinds=sink.kinds, state="starting", mark=mark)
    return SinkView(
        name=sink.name,
        url=sink.url,
        kinds=sink.kinds,
        state=delivery.state.value,
        mark=mark,
        delivered=delivery.position.revision,
        lag_revisions=max(0, state.revision - delivery.position.revision),
        lag_s=delivery.lag_s(now),
        events=delivery.events,
        deliveries=delivery.deliveries,
        failures=delivery.failures,
        failing_since=format_instant(delivery.failing_since),
        error=delivery.error,
        error_at=format_instant(delivery.error_at),
    )
