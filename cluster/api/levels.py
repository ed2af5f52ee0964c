"""The feature level of the cluster: who knows what, and raising it by one."""

from __future__ import annotations

from cluster.api.service import Call, Reply
from cluster.levels import UNHEARD, MemberLevel
from cluster.schemas.ledger import FeatureLevelAnswer, MemberLevelView
from replica.messages import features
from replica.messages.commands import RaiseFeatureLevel
from replica.state.state import State


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
