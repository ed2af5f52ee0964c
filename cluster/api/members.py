"""Handlers of membership changes, leadership transfers, the feature level, and drills."""

from __future__ import annotations

from typing import Any

from forebay.cluster.api.service import ApiCall, CommandBody, Reply, handles
from forebay.cluster.api.web import Problem, bad_request, no_leader, outcome_unknown, permission_denied
from forebay.cluster.consensus import ChangeRefused, MemberChange
from forebay.cluster.schemas import (
    Command,
    FeatureLevelAnswer,
    MemberLevelView,
    MembersAnswer,
    MemberView,
    TransferAnswer,
    made_of,
)
from forebay.cluster.schemas import drills as d
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas import requests as r
from forebay.cluster.security import NAME_RULE, Role, is_name
from forebay.cluster.server import UNHEARD, MemberLevel, NotLeading, OutcomeUnknown
from forebay.cluster.server import members as member_rows
from forebay.cluster.system import Address, AddressError, format_instant
from forebay.replica.messages import RaiseFeatureLevel, features
from forebay.replica.messages import commands as c
from forebay.replica.model import Drill, DrillVerdict
from forebay.replica.state import State
from forebay.replica.values import Instant
from forebay.wal import ChangeKind

NOT_FOUND = "unknown_member"

DRILL_DIGITS_MAX = 9
"""Digits of a drill's ID, count: one an hour for a hundred thousand years."""


@handles(ops.LIST_MEMBERS)
async def list_members(call: ApiCall[None]) -> Reply[MembersAnswer]:
    return await _members(call)


async def _members(call: ApiCall[Any]) -> Reply[MembersAnswer]:
    controller = call.service.controller
    state = await call.state()
    engine = controller.engine
    answer = MembersAnswer(
        revision=state.revision,
        replica=controller.name,
        leader=engine.leader,
        term=engine.term,
        version=engine.configuration.version,
        incarnation=str(controller.incarnation),
        members=members_of(call, state),
    )
    return Reply(state.revision, answer)


def members_of(call: ApiCall[Any], state: State) -> tuple[MemberView, ...]:
    """Return the replicas as seen by this one."""
    controller = call.service.controller
    rows = member_rows(
        controller.name,
        controller.engine,
        controller.membership,
        applied_index=controller.applied_index,
        revision=state.revision,
    )
    return tuple(rows)


@handles(ops.ADD_MEMBER)
async def add_member(call: ApiCall[r.AddMemberRequest]) -> Reply[MembersAnswer]:
    body = call.body
    if not is_name(body.name):
        raise bad_request(f"{body.name!r} cannot name a replica", NAME_RULE, "name")
    return await _change(call, ChangeKind.ADD, body.name, **_addresses(peer=body.peer, api=body.api))


@handles(ops.UPDATE_MEMBER)
async def update_member(call: ApiCall[r.UpdateMemberRequest]) -> Reply[MembersAnswer]:
    addresses = _addresses(peer=call.body.peer, api=call.body.api)
    if not addresses:
        raise bad_request("no address is given", "give peer, api or both")
    return await _change(call, ChangeKind.UPDATE, call.params["name"], **addresses)


def _addresses(**given: str | None) -> dict[str, str]:
    """Return the given addresses in normal form.

    Raises:
        Problem: 400, if an address is invalid or none is given.
    """
    addresses = {}
    for place, text in given.items():
        if text is None:
            continue
        try:
            addresses[place] = str(Address.parse(text))
        except AddressError as error:
            raise bad_request(error.sentence, error.remedy, place) from error
    return addresses


@handles(ops.REMOVE_MEMBER)
async def remove_member(call: ApiCall[Command]) -> Reply[MembersAnswer]:
    name = call.params["name"]
    await call.service.lead()
    controller = call.service.controller
    known = controller.engine.configuration
    if name == controller.name and len(known.voters) > 1 and known.change.id.hex() != call.body.command_id:
        # The client follows the redirect and sends the same command to the new leader.
        await _transfer(call, None)
        raise call.service.elsewhere(controller.engine.leader)
    return await _change(call, ChangeKind.REMOVE, name)


@handles(ops.REPLACE_MEMBER)
async def replace_member(call: ApiCall[Command]) -> Reply[MembersAnswer]:
    return await _change(call, ChangeKind.REPLACE, call.params["name"])


@handles(ops.TRANSFER_LEADERSHIP)
async def transfer_leadership(call: ApiCall[r.TransferRequest]) -> Reply[TransferAnswer]:
    await call.service.lead()
    if call.identity.role is Role.DRILL:
        _check_switchover(await call.state(), call.identity.name, call.body.name)
    leader = await _transfer(call, call.body.name)
    controller = call.service.controller
    revision = controller.state.revision
    return Reply(revision, TransferAnswer(revision=revision, leader=leader, term=controller.engine.term))


def _check_switchover(state: State, who: str, target: str | None) -> None:
    """Check that a transfer is part of a drill run by this coordinator.

    Raises:
        Problem: 403, if it is not.
    """
    last = state.drills.get(max(state.drills, default=0))
    if (
        last is None
        or not last.is_under_way(state.at)
        or (last.scenario, last.by, last.target) != ("switchover", who, target)
    ):
        remedy = "begin such a drill first: forebay drill run switchover"
        raise permission_denied(f"drill {who} may transfer the leadership only in its own switchover drill", remedy)


async def _transfer(call: ApiCall[Any], target: str | None) -> str | None:
    await call.service.publisher.conclude()
    try:
        return await call.service.controller.membership.transfer(target)
    except NotLeading as error:
        raise call.service.elsewhere(error.leader) from error
    except ChangeRefused as error:
        raise _change_problem(error) from error


async def _change(
    call: ApiCall[CommandBody], action: ChangeKind, name: str, *, peer: str = "", api: str = ""
) -> Reply[MembersAnswer]:
    await call.service.lead()
    command_id = call.service.check_age(call.identity, call.body.command_id)
    wanted = MemberChange(action=action, name=name, peer=peer, api=api, actor=str(call.identity), id=command_id)
    try:
        await call.service.controller.membership.change(wanted)
    except NotLeading as error:
        raise call.service.elsewhere(error.leader) from error
    except OutcomeUnknown as error:
        raise outcome_unknown() from error
    except ChangeRefused as error:
        raise _change_problem(error) from error
    try:
        return await _members(call)
    except Problem as error:
        # The change was made; only the resulting membership could not be read.
        raise no_leader("the change was made, but this replica no longer leads") from error


def _change_problem(error: ChangeRefused) -> Problem:
    return Problem(404 if error.code == NOT_FOUND else 409, error.code, error.sentence, error.remedy, "name")


# ---- feature level: each replica's support, and raising the cluster's by one


@handles(ops.SHOW_FEATURE_LEVEL)
async def show_feature_level(call: ApiCall[None]) -> Reply[FeatureLevelAnswer]:
    state = await call.state()
    return _reply(state, await call.service.controller.levels.gather())


@handles(ops.RAISE_FEATURE_LEVEL)
async def raise_feature_level(call: ApiCall[r.FeatureLevelRequest]) -> Reply[FeatureLevelAnswer]:
    await call.service.lead()
    members = await call.service.controller.levels.gather()
    known = tuple((member.id, member.known) for member in members)
    settled = await call.service.settle(call, RaiseFeatureLevel(call.body.level, known))
    return _reply(settled.state, members)


def _reply(state: State, members: tuple[MemberLevel, ...]) -> Reply[FeatureLevelAnswer]:
    following = range(state.feature_level + 1, features.FEATURE_LEVEL_KNOWN + 1)[:1]
    level = next((level for level in features.LEVELS if level.number in following), None)
    view = FeatureLevelAnswer(
        revision=state.revision,
        feature_level=state.feature_level,
        release=features.release_of(state.feature_level),
        next_level=None if level is None else level.number,
        next_release="" if level is None else level.release,
        next_brings="" if level is None else level.brings,
        may_be_raised=level is not None and all(member.known >= level.number for member in members),
        members=tuple(
            made_of(member, MemberLevelView, known=None if member.known == UNHEARD else member.known)
            for member in members
        ),
    )
    return Reply(state.revision, view)


# ---- drills


@handles(ops.LIST_DRILLS)
async def list_drills(call: ApiCall[None]) -> Reply[d.DrillsAnswer]:
    return _drills(call, await call.state())


@handles(ops.SHOW_DRILL)
async def show_drill(call: ApiCall[None]) -> Reply[d.DrillAnswer]:
    return _drill(call, await call.state(), _number(call))


@handles(ops.START_DRILL)
async def start_drill(call: ApiCall[d.StartDrillRequest]) -> Reply[d.DrillAnswer]:
    body = call.body
    command = c.StartDrill(body.scenario, body.target, body.lasts_s, body.forced, body.plan, body.lease_s)
    state = (await call.service.settle(call, command)).state
    return _drill(call, state, max(state.drills))


@handles(ops.CONFIRM_DRILL)
async def confirm_drill(call: ApiCall[Command]) -> Reply[d.DrillAnswer]:
    number = _number(call)
    return _drill(call, (await call.service.settle(call, c.ConfirmDrill(number))).state, number)


@handles(ops.ABORT_DRILL)
async def abort_drill(call: ApiCall[d.AbortDrillRequest]) -> Reply[d.DrillAnswer]:
    number = _number(call)
    return _drill(call, (await call.service.settle(call, c.AbortDrill(number, call.body.reason))).state, number)


@handles(ops.END_DRILL)
async def end_drill(call: ApiCall[d.EndDrillRequest]) -> Reply[d.DrillAnswer]:
    body, number = call.body, _number(call)
    verdict = next((one for one in DrillVerdict if one.word == body.verdict), None)
    if verdict is None:
        raise bad_request(f"{body.verdict[:32]!r} is no verdict", "use passed, failed or aborted", "verdict")
    command = c.EndDrill(number, verdict, body.sentence, tuple(sorted(body.figures.items())))
    return _drill(call, (await call.service.settle(call, command)).state, number)


@handles(ops.PROBE_DRILL)
async def probe_drill(call: ApiCall[Command]) -> Reply[d.DrillProbeAnswer]:
    number = _number(call)
    settled = await call.service.settle(call, c.ProbeDrill(number))
    return Reply(settled.revision, d.DrillProbeAnswer(revision=settled.revision, drill=number))


@handles(ops.LOCK_DRILLS)
async def lock_drills(call: ApiCall[d.AbortDrillRequest]) -> Reply[d.DrillsAnswer]:
    return _drills(call, (await call.service.settle(call, c.LockDrills(call.body.reason))).state)


@handles(ops.UNLOCK_DRILLS)
async def unlock_drills(call: ApiCall[Command]) -> Reply[d.DrillsAnswer]:
    return _drills(call, (await call.service.settle(call, c.UnlockDrills(call.params["name"]))).state)


def _number(call: ApiCall[Any]) -> int:
    text = call.params["drill"]
    if text.isascii() and text.isdigit() and len(text) <= DRILL_DIGITS_MAX:
        return int(text)
    raise bad_request(f"{text[:32]!r} is not the number of a drill", "forebay drill list shows them", "drill")


def _drill(call: ApiCall[Any], state: State, number: int) -> Reply[d.DrillAnswer]:
    known = state.drills.get(number)
    if known is None:
        raise Problem(404, "unknown_drill", f"drill {number} does not exist", "forebay drill list shows them", "drill")
    return Reply(state.revision, d.DrillAnswer(revision=state.revision, **_drill_fields(known, _at(call, state))))


def _drills(call: ApiCall[Any], state: State) -> Reply[d.DrillsAnswer]:
    at = _at(call, state)
    rows = tuple(
        d.DrillView(**_drill_fields(state.drills[number], at)) for number in sorted(state.drills, reverse=True)
    )
    locks = tuple(
        d.DrillLockView(by=name, reason=lock.reason, since=format_instant(lock.at))
        for name, lock in sorted(state.drill_locks.items())
    )
    return Reply(state.revision, d.DrillsAnswer(revision=state.revision, drills=rows, locks=locks))


def _at(call: ApiCall[Any], state: State) -> Instant:
    """Return the current time. (A drill can time out without new events.)"""
    return max(state.at, call.service.controller.agreed.now())


def _drill_fields(drill: Drill, at: Instant) -> dict[str, Any]:
    """Return the fields of DrillView."""
    # A lost drill is recorded only when the next one starts.
    is_lost = drill.verdict is DrillVerdict.UNDER_WAY and not drill.is_under_way(at)
    return {
        "drill": drill.id,
        "scenario": drill.scenario,
        "target": drill.target,
        "by": drill.by,
        "verdict": DrillVerdict.LOST.word if is_lost else drill.verdict.word,
        "began": format_instant(drill.at),
        "until": format_instant(drill.deadline),
        "ended": format_instant(drill.ended_at),
        "forced": drill.forced,
        "abort": drill.abort,
        "sentence": drill.sentence,
        "figures": dict(drill.figures),
        "plan": drill.plan,
        "second": drill.second,
    }
