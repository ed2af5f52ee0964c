"""Bodies and answers about drills: what was done to the cluster on purpose, and what came of it."""

from typing import Annotated

import msgspec

from cluster.schemas.base import Answer, Command, Name, View
from replica.values import DRILL_FIGURES_MAX, DRILL_S_MAX, MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX

Sentence = Annotated[str, msgspec.Meta(min_length=1, max_length=MESSAGE_CHARACTERS_MAX)]


class StartDrillRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/drills."""

    scenario: Name
    target: Name
    """The replica that it is about."""
    lasts_s: Annotated[int, msgspec.Meta(ge=1, le=DRILL_S_MAX)]
    """After so many seconds it is over, whatever is heard of it."""
    forced: Annotated[tuple[Name, ...], msgspec.Meta(max_length=DRILL_FIGURES_MAX)] = ()
    """The preconditions that do not hold and are overridden."""
    plan: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """Id of the plan that was confirmed."""
    lease_s: Annotated[int, msgspec.Meta(ge=0, le=DRILL_S_MAX)] = 0
    """After so many seconds without a probe of who carries it out it is over; 0: only after `lasts_s`."""


class AbortDrillRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/drills/{drill}/abort, and of POST /v1/drill-locks."""

    reason: Sentence


class EndDrillRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/drills/{drill}/end."""

    verdict: str
    """passed, failed or aborted."""
    sentence: Sentence
    figures: Annotated[dict[str, int], msgspec.Meta(max_length=DRILL_FIGURES_MAX)] = {}
    """What was measured, by names that end with the unit."""


class DrillView(View, frozen=True, kw_only=True):
    """One drill."""

    drill: int
    scenario: str
    target: str
    by: str
    verdict: str
    """under way, passed, failed, aborted; lost: nothing was heard of it in its time."""
    began: str | None
    until: str | None
    """It is over by then unless something is heard of it."""
    ended: str | None = None
    forced: tuple[str, ...] = ()
    abort: str = ""
    """Who wants it to end before its time, and why."""
    sentence: str = ""
    figures: dict[str, int] = {}
    plan: str = ""
    """Id of the plan that was confirmed."""
    second: str = ""
    """The other operator who agreed to it."""


class DrillAnswer(DrillView, frozen=True, kw_only=True):
    """Answer about one drill."""

    revision: int


class DrillLockView(View, frozen=True, kw_only=True):
    """An operator's word that there shall be no drill."""

    by: str
    reason: str
    since: str | None


class DrillsAnswer(Answer, frozen=True, kw_only=True):
    """The last drills, the newest first, and who wants none."""

    drills: tuple[DrillView, ...]
    locks: tuple[DrillLockView, ...]


class DrillProbeAnswer(Answer, frozen=True, kw_only=True):
    """Answer to a probe: its revision is that of the command, however often it is sent."""

    drill: int
