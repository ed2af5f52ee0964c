"""What may change of a job while it waits, and how its conditions are to be read: from feature level 4 on.

JobSpec and JobOptions are as an earlier level wrote them and do not grow (law 12): what is new of a job is in JobTerms,
and a job about which there is nothing of it has no record (State.terms).
"""

from __future__ import annotations

import msgspec

from replica.jobs import Dependency, DependencyKind
from replica.values.units import Instant


class JobTerms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """More of what a job asked for."""

    any_of: bool = False
    """Whether one of its dependencies is enough (`?`); otherwise all must hold."""


NO_TERMS = JobTerms()
"""What a job without a record asked for."""


class JobChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What of a waiting job is to be as it is here; None: it stays as it is. Durations are whole seconds."""

    name: str | None = None
    time_limit_s: int | None = None
    priority: int | None = None
    begin_at: Instant | None = None
    deadline: Instant | None = None
    """NEVER: none any more."""
    dependencies: tuple[Dependency, ...] | None = None
    singleton: bool | None = None
    any_of: bool | None = None
    nice: int | None = None
    account: str | None = None
    qos: str | None = None
    licenses: tuple[tuple[str, int], ...] | None = None
    reservation: str | None = None
    partition: str | None = None
    """Empty, as for the four before it: none any more."""
    comment: str | None = None
    requeue: bool | None = None
    mail_types: tuple[str, ...] | None = None
    mail_user: str | None = None


NO_CHANGE = JobChange()

OF_SPEC = ("name", "time_limit_s", "priority", "begin_at", "deadline", "dependencies")
"""Fields of a change that are fields of JobSpec."""

OF_OPTIONS = (
    "singleton",
    "nice",
    "account",
    "qos",
    "licenses",
    "reservation",
    "partition",
    "comment",
    "requeue",
    "mail_types",
    "mail_user",
)
"""Fields of a change that are fields of JobOptions."""


def changed_fields(change: JobChange, fields: tuple[str, ...]) -> dict[str, object]:
    """Return those of `fields` that the change is about, with their values."""
    found = ((field, getattr(change, field)) for field in fields)
    return {field: value for field, value in found if value is not None}


class AfterTask(msgspec.Struct, frozen=True, array_like=True):
    """A dependency on one task of an array, as it is asked for: `afterok:1_3`."""

    kind: DependencyKind
    array: int
    task: int
