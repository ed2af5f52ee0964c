"""Handlers of certificate revocation and of program sessions."""

from __future__ import annotations

from forebay.cluster.api.service import ApiCall, Reply, handles
from forebay.cluster.api.web import Problem, actor_of, bad_request
from forebay.cluster.schemas import Command, made_of
from forebay.cluster.schemas import certificates as v
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas import sessions as w
from forebay.cluster.security import CERTIFICATE_LIFETIME_DAYS
from forebay.cluster.system import format_instant, parse_instant
from forebay.replica.messages import ActorRole
from forebay.replica.messages import commands as c
from forebay.replica.state import State
from forebay.replica.values import (
    MICROSECONDS_PER_SECOND,
    NEVER,
    SESSION_IDLE_S_MAX,
    SESSION_NUMBER_MAX,
    SESSION_WINDOW_MAX,
    Instant,
)

_LIFETIME: int = CERTIFICATE_LIFETIME_DAYS * 86_400 * MICROSECONDS_PER_SECOND


def _revocations(state: State) -> v.RevocationsAnswer:
    rows = tuple(
        made_of(record, v.RevocationView, at=format_instant(record.at), until=format_instant(record.until))
        for _, record in sorted(state.revocations.items())
    )
    return v.RevocationsAnswer(revision=state.revision, revocations=rows)


@handles(ops.LIST_REVOCATIONS)
async def list_revocations(call: ApiCall[None]) -> Reply[v.RevocationsAnswer]:
    state = await call.state()
    return Reply(state.revision, _revocations(state))


@handles(ops.REVOKE_CERTIFICATE)
async def revoke_certificate(call: ApiCall[v.RevocationRequest]) -> Reply[v.RevocationsAnswer]:
    certificate, body, service = call.params["certificate"], call.body, call.service
    kind, _, name = certificate.partition(":")
    if kind == "replica" and service.controller.engine.configuration.member(name) is not None:
        # Its peers would reject it; with a majority revoked, the revocation could not be cancelled.
        raise Problem(
            409,
            "wrong_state",
            f"replica {name} is a member, so the other replicas would reject its connections",
            "remove it with `forebay cluster remove`, or reissue its certificate and revoke the former serial number",
            "certificate",
        )
    until = NEVER if kind != "serial" else Instant(service.clock.now() + _LIFETIME)
    if body.valid_until is not None:
        try:
            until = parse_instant(body.valid_until)
        except ValueError as error:
            raise bad_request(str(error), "write it as 2030-01-31T12:00:00Z", "valid_until") from error
    state = (await service.settle(call, c.RevokeCertificate(certificate, body.reason, until))).state
    return Reply(state.revision, _revocations(state))


@handles(ops.UNREVOKE_CERTIFICATE)
async def unrevoke_certificate(call: ApiCall[Command]) -> Reply[v.RevocationsAnswer]:
    state = (await call.service.settle(call, c.UnrevokeCertificate(call.params["certificate"]))).state
    return Reply(state.revision, _revocations(state))


def _sessions(state: State, asker: c.Actor) -> w.SessionsAnswer:
    rows = tuple(
        made_of(
            session,
            w.SessionView,
            session=number,
            actor=str(session.actor),
            opened_at=format_instant(session.opened_at),
            used_at=format_instant(session.used_at),
        )
        for number, session in sorted(state.sessions.items())
        if asker.role is ActorRole.OPERATOR or session.actor == asker
    )
    return w.SessionsAnswer(revision=state.revision, sessions=rows)


@handles(ops.LIST_SESSIONS)
async def list_sessions(call: ApiCall[None]) -> Reply[w.SessionsAnswer]:
    state = await call.state()
    return Reply(state.revision, _sessions(state, actor_of(call.identity)))


@handles(ops.OPEN_SESSION)
async def open_session(call: ApiCall[Command]) -> Reply[w.OpenedSession]:
    settled = await call.service.settle(call, c.OpenSession())
    opened = w.OpenedSession(
        revision=settled.revision, session=settled.revision, window=SESSION_WINDOW_MAX, idle_s=SESSION_IDLE_S_MAX
    )
    return Reply(settled.revision, opened)


@handles(ops.CLOSE_SESSION)
async def close_session(call: ApiCall[Command]) -> Reply[w.SessionsAnswer]:
    text = call.params["session"]
    if not text.isascii() or not text.isdigit() or len(text) > 15 or int(text) > SESSION_NUMBER_MAX:
        raise bad_request(
            f"{text!r:.40} is not a session number",
            "use a session number from `forebay support session list`",
            "session",
        )
    state = (await call.service.settle(call, c.CloseSession(int(text)))).state
    return Reply(state.revision, _sessions(state, actor_of(call.identity)))
