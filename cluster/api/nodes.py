"""Handlers of nodes and agents: registration, orders, operation reports. A poll also proves that an agent is alive."""

from __future__ import annotations

from typing import Any

from forebay.cluster.api import request_decoding
from forebay.cluster.api.render import NODE_WORDS, lost_job_view, node_view, node_word
from forebay.cluster.api.service import ApiCall, CommandBody, Reply, encode_view, handles
from forebay.cluster.api.web import Problem, bad_request, no_leader, permit_node, rejection_problem
from forebay.cluster.schemas import (
    AdmittedAnswer,
    Command,
    NodeLostAnswer,
    NodesAnswer,
    NodeView,
    PollAnswer,
    RegisterAnswer,
    ReportResult,
    ReportsAnswer,
)
from forebay.cluster.schemas import agents as agent_schemas
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas import requests as r
from forebay.cluster.server import (
    POLLS_MAX,
    SPREAD_S_MAX,
    SPREAD_S_PER_POLL,
    AgentContacts,
    AgentReport,
    Answer,
    NotLeading,
    Unavailable,
)
from forebay.cluster.system.eventloop import iterate_paced
from forebay.replica.decide import loss_rejection
from forebay.replica.messages import commands as c
from forebay.replica.model import ObservedFilesystem
from forebay.replica.state import State
from forebay.replica.values import NODES_MAX
from forebay.replica.views import orders_for

PARTS_PER_NODE = 12
"""Slice parts for rendering one node: about twenty microseconds."""

PARTS_PER_LOST_JOB = 4
"""Slice parts for rendering one job of a lost node."""

_SEND_AGAIN = frozenset({429, 500, 503})
"""Statuses of a report that was not decided; the whole request gets this status, and the agent resends it."""


@handles(ops.LIST_NODES)
async def list_nodes(call: ApiCall[None]) -> Reply[NodesAnswer]:
    limit = call.integer("limit", NODES_MAX, least=1, most=NODES_MAX)
    wanted = frozenset(word.upper() for word in call.query.get("state", "").split(",") if word)
    unknown = sorted(wanted - NODE_WORDS)
    if unknown:
        raise bad_request(
            f"the node state {unknown[0]!r:.40} is unknown", f"use {', '.join(sorted(NODE_WORDS))}", "query state"
        )
    after = call.query.get("after", "")
    state, work, liveness = await call.state(), call.work, _liveness(call)
    rows: list[NodeView] = []
    matching = skipped = 0
    for name in await work.sort(state.nodes):
        if wanted and node_word(state, name) not in wanted:
            await work.take(0, parts=1)
            continue
        matching += 1
        if name <= after or len(rows) == limit:
            skipped += name <= after
            await work.take(0, parts=1)
            continue
        # Its CPUs in use are summed over its jobs.
        await work.take(0, parts=PARTS_PER_NODE + 2 * len(state.on_node.get(name, ())))
        rows.append(encode_view(node_view(state, name, liveness)))
    answer = NodesAnswer(
        revision=state.revision,
        nodes=tuple(rows),
        truncated=matching > skipped + len(rows),
        matching=matching,
        skipped=skipped,
    )
    return Reply(state.revision, answer)


@handles(ops.ADMIT_NODE)
async def admit_node(call: ApiCall[Command]) -> Reply[AdmittedAnswer]:
    node = call.params["name"]
    revision = (await call.service.settle(call, c.AdmitNode(node))).state.revision
    return Reply(revision, AdmittedAnswer(revision=revision, node=node))


@handles(ops.DRAIN_NODE)
async def drain_node(call: ApiCall[r.DrainRequest]) -> Reply[NodeView]:
    return await _change(call, c.DrainNode(call.params["name"], call.body.reason))


@handles(ops.RESUME_NODE)
async def resume_node(call: ApiCall[Command]) -> Reply[NodeView]:
    return await _change(call, c.ResumeNode(call.params["name"]))


@handles(ops.LOSE_NODE)
async def lose_node(call: ApiCall[r.LostRequest]) -> Reply[NodeLostAnswer]:
    name, dry_run = call.params["name"], call.body.dry_run
    state = await call.state()
    rejection = loss_rejection(state, name)
    if rejection is not None:
        raise rejection_problem(rejection)
    jobs = []
    async for job_id in iterate_paced(sorted(state.on_node.get(name, ())), call.work, parts=PARTS_PER_LOST_JOB):
        if state.jobs[job_id].node == name:
            jobs.append(encode_view(lost_job_view(state, job_id)))
    persistent = tuple(sorted(one.name for one in state.persistent.values() if one.node == name))
    revision = state.revision
    if not dry_run:
        revision = (await call.service.settle(call, c.LoseNode(name, call.body.reason))).state.revision
    answer = NodeLostAnswer(revision=revision, node=name, dry_run=dry_run, jobs=tuple(jobs), persistent=persistent)
    return Reply(revision, answer)


async def _change(call: ApiCall[CommandBody], command: c.DrainNode | c.ResumeNode) -> Reply[NodeView]:
    state = (await call.service.settle(call, command)).state
    view = node_view(state, command.node, _liveness(call))
    return Reply(state.revision, view)


def _liveness(call: ApiCall[Any]) -> AgentContacts | None:
    controller = call.service.controller
    return controller.liveness if controller.leads else None


@handles(ops.REGISTER_NODE)
async def register_node(call: ApiCall[agent_schemas.RegisterRequest]) -> Reply[RegisterAnswer]:
    node = call.params["node"]
    permit_node(call.identity, node)
    body = call.body
    command = c.RegisterNode(
        node,
        body.cpus,
        body.instance,
        body.storage_id,
        body.buffers,
        body.process_control,
        body.capacity_control,
        tuple(ObservedFilesystem(name, body.filesystems[name]) for name in sorted(body.filesystems)),
    )
    service = call.service
    await service.lead()
    settled = await service.finish(
        service.begin(call.identity, service.fenced_id(call.identity, body.command_id), command)
    )
    service.controller.node_watch.heard(node)
    return Reply(settled.state.revision, RegisterAnswer(revision=settled.state.revision))


@handles(ops.POLL_ORDERS)
async def poll_orders(call: ApiCall[agent_schemas.PollRequest]) -> Reply[PollAnswer]:
    node = call.params["node"]
    permit_node(call.identity, node)
    body = call.body
    service, controller = call.service, call.service.controller
    orders = controller.orders
    wait_s = min(body.wait_s, controller.liveness.poll_wait_s_max(orders.waiting))
    said = AgentReport(node, body.instance, body.progress)
    known = controller.state.nodes.get(node)
    is_known = known is not None and known.instance == body.instance
    # The decision to wait needs no proof of leadership, only the response does.
    if is_known and wait_s > 0 and not orders.changed_since(node, body.seen_revision) and not service.stopping.is_set():
        if orders.waiting >= POLLS_MAX:
            raise Problem(
                429, "too_many_polls", "too many agents wait already", "poll again later", headers={"Retry-After": "1"}
            )
        if _is_connected(call):
            controller.polls.note(said)
        await orders.wait(node, wait_s)
    # Orders must come from the current leader's state: those of a deposed leader could restart something given up. Any
    # replica may respond, but only from a state proven to be no older than the poll.
    try:
        await controller.polls.prove(node, said if _is_connected(call) else None)
    except (NotLeading, Unavailable) as error:
        raise no_leader("this replica could not prove in time that it knows the newest orders") from error
    state = _check_poll(call, node, body)
    answer = PollAnswer(
        revision=state.revision,
        orders=orders_for(state, node),
        wait_s=controller.liveness.poll_wait_s_max(orders.waiting),
        spread_s=min(SPREAD_S_MAX, SPREAD_S_PER_POLL * orders.waiting),
    )
    return Reply(state.revision, answer)


def _is_connected(call: ApiCall[agent_schemas.PollRequest]) -> bool:
    """Return True if the agent is still connected; otherwise the poll is no sign of life."""
    return not call.asked.gone.is_set()


def _check_poll(call: ApiCall[agent_schemas.PollRequest], node: str, body: agent_schemas.PollRequest) -> State:
    state = call.service.controller.state
    known = state.nodes.get(node)
    if known is None:
        raise Problem(
            404, "unknown_node", f"node {node!r} has not registered", f"register at /v1/agents/{node}/register"
        )
    if known.instance != body.instance:
        begun = state.recoveries[max(state.recoveries)] if state.recoveries else None
        if begun is not None and known.registered_at <= begun.at:
            # The registration is from earlier history, which may lack the agent's last start.
            raise Problem(
                404,
                "unknown_node",
                f"node {node!r} has not registered since incarnation {begun.incarnation} of the cluster began",
                f"register at /v1/agents/{node}/register",
            )
        raise Problem(
            409,
            "stale_instance",
            f"another agent of {node!r} has registered since: instance {known.instance!r}",
            "only one agent may serve a node; stop one of them",
            "instance",
        )
    return state


@handles(ops.REPORT_OPERATIONS)
async def report_operations(call: ApiCall[agent_schemas.ReportsRequest]) -> Reply[ReportsAnswer]:
    node = call.params["node"]
    permit_node(call.identity, node)
    service = call.service
    await service.lead()
    service.controller.node_watch.heard(node)
    answers: list[Answer] = []
    for report in call.body.reports:
        answers.append(
            service.begin(
                call.identity,
                service.fenced_id(call.identity, report.command_id),
                request_decoding.report_operation(node, report),
            )
        )
    results = []
    deadline = service.deadline()
    for report, answer in zip(call.body.reports, answers, strict=True):
        try:
            await service.finish(answer, deadline)
        except Problem as problem:
            if problem.status in _SEND_AGAIN:
                raise
            results.append(
                ReportResult(
                    command_id=report.command_id,
                    outcome="rejected",
                    code=problem.view.code,
                    sentence=problem.view.sentence,
                )
            )
        else:
            results.append(ReportResult(command_id=report.command_id, outcome="accepted"))
    state = service.controller.state
    return Reply(state.revision, ReportsAnswer(revision=state.revision, results=tuple(results)))
