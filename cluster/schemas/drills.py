"""Schemas of failover drills."""

from typing import Annotated

import msgspec

from forebay.cluster.schemas.base import Answer, Command, Name, View
from forebay.replica.values import DRILL_FIGURES_MAX, DRILL_S_MAX, MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX

Sentence = Annotated[str, msgspec.Meta(min_length=1, max_length=MESSAGE_CHARACTERS_MAX)]


class StartDrillRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/drills."""

    scenario: Name
    target: Name
    """Replica under test."""
    lasts_s: Annotated[int, msgspec.Meta(ge=1, le=DRILL_S_MAX)]
    """Time after which the drill ends in any case, seconds."""
    forced: Annotated[tuple[Name, ...], msgspec.Meta(max_length=DRILL_FIGURES_MAX)] = ()
    """Failed preconditions that the operator overrides."""
    plan: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """ID of the confirmed plan."""
    lease_s: Annotated[int, msgspec.Meta(ge=0, le=DRILL_S_MAX)] = 0
    """Time without a probe from the coordinator after which the drill ends, seconds; 0: only `lasts_s` applies."""


class AbortDrillRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/drills/{drill}/abort, and of POST /v1/drill-locks."""

    reason: Sentence


class EndDrillRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/drills/{drill}/end."""

    verdict: str
    """passed, failed or aborted."""
    sentence: Sentence
    figures: Annotated[dict[str, int], msgspec.Meta(max_length=DRILL_FIGURES_MAX)] = {}
    """Measurements by name; each name ends in its unit."""


class DrillView(View, frozen=True, kw_only=True):
    """Drill."""

    drill: int
    scenario: str
    target: str
    by: str
    verdict: str
    """under way, passed, failed, aborted, or lost: nothing was received from the drill in time."""
    began: str | None
    until: str | None
    """Time the drill ends unless another probe arrives."""
    ended: str | None = None
    forced: tuple[str, ...] = ()
    abort: str = ""
    """Actor and reason of a requested abort."""
    sentence: str = ""
    figures: dict[str, int] = {}
    plan: str = ""
    """ID of the confirmed plan."""
    second: str = ""
    """Second operator, who confirmed the drill."""


class DrillAnswer(DrillView, frozen=True, kw_only=True):
    """Response with one drill."""

    revision: int


class DrillLockView(View, frozen=True, kw_only=True):
    """An operator's lock against drills."""

    by: str
    reason: str
    since: str | None


class DrillsAnswer(Answer, frozen=True, kw_only=True):
    """The last drills, newest first, and the locks against drills."""

    drills: tuple[DrillView, ...]
    locks: tuple[DrillLockView, ...]


class DrillProbeAnswer(Answer, frozen=True, kw_only=True):
    """Response to a probe; its revision is that of the command, even if resent."""

    drill: int
