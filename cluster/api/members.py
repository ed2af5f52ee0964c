"""Who agrees: add, remove and replace replicas, one at a time, and hand the leadership over."""

from __future__ import annotations

from cluster.api.ledger import members
from cluster.api.service import Call, Reply
from cluster.api.web import Problem, bad, no_leader, outcome_unknown
from cluster.consensus import ChangeRefused, Wanted
from cluster.schemas import FeatureLevelAnswer, MemberLevelView, TransferAnswer
from cluster.security import NAME_RULE, is_name
from cluster.server import UNHEARD, MemberLevel, NotLeading, OutcomeUnknown
from cluster.system import Address, AddressError
from replica.messages import RaiseFeatureLevel, features
from replica.state import State
from wal import Action

NOT_FOUND = "unknown_member"


async def add(call: Call) -> Reply:
    """Add a replica: it learns, and votes once it has caught up."""
    body = call.body
    if not is_name(body.name):
        raise bad(f"{body.name!r} cannot name a replica", NAME_RULE, "name")
    addresses = {}
    for place, text in (("peer", body.peer), ("api", body.api)):
        try:
            addresses[place] = str(Address.parse(text))
        except AddressError as error:
            raise bad(error.sentence, error.remedy, place) from error
    return await _change(call, Action.ADD, body.name, **addresses)


async def remove(call: Call) -> Reply:
    """Remove a replica for good; if it leads, the leadership goes to another one first."""
    name = call.params["name"]
    await call.service.lead()
    controller = call.service.controller
    known = controller.engine.configuration
    if name == controller.name and len(known.voters) > 1 and known.change.id.hex() != call.body.command_id:
        # The new leader gets the same command: the client follows the redirection.
        await _transfer(call, None)
        raise call.service.elsewhere(controller.engine.leader)
    return await _change(call, Action.REMOVE, name)


async def replace(call: Call) -> Reply:
    """Let a replica that lost its data come back under a new id: it counts for nothing until it has caught up."""
    return await _change(call, Action.REPLACE, call.params["name"])


async def transfer(call: Call) -> Reply:
    """Hand the leadership over to the replica named, or to the one that is furthest."""
    await call.service.lead()
    leader = await _transfer(call, call.body.name)
    controller = call.service.controller
    revision = controller.state.revision
    return Reply(revision, TransferAnswer(revision=revision, leader=leader, term=controller.engine.term))


async def _transfer(call: Call, target: str | None) -> str | None:
    try:
        return await call.service.controller.membership.transfer(target)
    except NotLeading as error:
        raise call.service.elsewhere(error.leader) from error
    except ChangeRefused as error:
        raise _refused(error) from error


async def _change(call: Call, action: Action, name: str, *, peer: str = "", api: str = "") -> Reply:
    await call.service.lead()
    command_id = call.service.check_age(call.identity, call.body.command_id)
    wanted = Wanted(action=action, name=name, peer=peer, api=api, actor=str(call.identity), id=command_id)
    try:
        await call.service.controller.membership.change(wanted)
    except NotLeading as error:
        raise call.service.elsewhere(error.leader) from error
    except OutcomeUnknown as error:
        raise outcome_unknown() from error
    except ChangeRefused as error:
        raise _refused(error) from error
    try:
        return await members(call)
    except Problem as error:
        # It was carried out; only who is in it now could not be told.
        raise no_leader("the change was made, but this replica does not lead any more") from error


def _refused(error: ChangeRefused) -> Problem:
    return Problem(404 if error.code == NOT_FOUND else 409, error.code, error.sentence, error.remedy, "name")


# ---- the feature level of the cluster: who knows what, and raising it by one


async def show(call: Call) -> Reply:
    """Show the feature level of the cluster, and the highest that each replica knows."""
    state = await call.state()
    return _reply(state, await call.service.controller.levels.gather())


async def raise_level(call: Call) -> Reply:
    """Raise the feature level by one; refused unless every replica says that it knows the next one."""
    await call.service.lead()
    members = await call.service.controller.levels.gather()
    known = tuple((member.id, member.known) for member in members)
    settled = await call.service.settle(call, RaiseFeatureLevel(call.body.level, known))
    return _reply(settled.state, members)


def _reply(state: State, members: tuple[MemberLevel, ...]) -> Reply:
    following = state.feature_level + 1
    level = next((level for level in features.LEVELS if level.number == following), None)
    if following > features.FEATURE_LEVEL_KNOWN:
        level = None
    view = FeatureLevelAnswer(
        revision=state.revision,
        feature_level=state.feature_level,
        release=features.release_of(state.feature_level),
        next_level=None if level is None else level.number,
        next_release="" if level is None else level.release,
        next_brings="" if level is None else level.brings,
        may_be_raised=level is not None and all(member.known >= level.number for member in members),
        members=tuple(
            MemberLevelView(
                name=member.name,
                id=member.id,
                votes=member.votes,
                known=None if member.known == UNHEARD else member.known,
                version=member.version,
            )
            for member in members
        ),
    )
    return Reply(state.revision, view)
