"""Bodies and answers about external jobs: buffers whose jobs belong to another scheduler."""

from typing import Annotated

import msgspec

from cluster.schemas.base import Answer, Command, Name, Number, View
from replica.values import MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX, PATH_BYTES_MAX, SIZE_BYTES_MAX

Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 2)]
"""A user's or a group's number, as Linux has them."""


class RegisterSchedulerRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/scheduler/register."""

    cluster: Name
    """What all hosts of this scheduler say and no other scheduler does, such as a random text beside its state."""
    address: Name
    """The host that asks: whoever is refused later is told it."""


class ExternalJobCommand(Command, frozen=True, kw_only=True):
    """What every command about an external job says."""

    cluster: Name
    """As at its registration."""
    epoch: Number = 0
    """The epoch that is meant, as an answer gave it: what comes late then changes nothing. 0: the last one."""


class SetUpExternalJobRequest(ExternalJobCommand, frozen=True, kw_only=True):
    """Body of POST /v1/external-jobs/{job}/setup. With an `epoch`: that one, be it the last or the next."""

    user: Name
    uid: Id
    gid: Id
    groups: Annotated[tuple[Id, ...], msgspec.Meta(max_length=65_536)] = ()
    script: str
    """The job's script, with its directives and symbols as its scheduler has replaced them."""
    pool: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    size: Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)] = 0
    """What its scheduler has taken off its own books, in units of the pool: instead of what the directives say."""
    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """The job's name, for people and `%x`."""
    workdir: Annotated[str, msgspec.Meta(max_length=PATH_BYTES_MAX)] = ""


class TearDownExternalJobRequest(ExternalJobCommand, frozen=True, kw_only=True):
    """Body of POST /v1/external-jobs/{job}/teardown. `hurry`: results that are not exported are lost."""

    hurry: bool = False
    reason: Annotated[str, msgspec.Meta(max_length=MESSAGE_CHARACTERS_MAX)] = ""
    """Why, where its scheduler knows nothing of it any more: then what has not run is removed and does not linger."""


class MissExternalJobRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/external-jobs/{job}/miss."""

    cluster: Name
    state: Name
    """How its scheduler calls where the external job stands."""


class ExternalJobView(View, frozen=True, kw_only=True):
    """One external job: its last epoch."""

    scheduler: str
    job: str
    epoch: int
    """0: there is none."""
    phase: str
    """none, waiting, set-up, staging-in, stage-in-failed, staged-in, running, post-run, staging-out, stage-out-failed,
    lingering, parked, teardown, teardown-failed, over."""
    job_id: int | None = None
    """The number of its record among Forebay's own jobs."""
    user: str = ""
    uid: int = 0
    """The user's number, as its scheduler knows it."""
    pool: str = ""
    size: int = 0
    """What it holds or waits for, in units of the pool."""
    message: str = ""
    """Why its setup, or its last operation, failed."""
    path: str | None = None
    """Its directory in the place of its pool; null while there is none."""
    persistent: dict[str, str] = {}
    """The persistent buffers that it works with, by name: the directory of each."""
    mover: str | None = None
    """The agent that stages for it."""
    submit_time: str | None = None
    kept_until: str | None = None
    """While it lingers: until when, if nobody needs the space before."""
    staged_in_files: int = 0
    staged_in_bytes: int = 0
    staged_out_files: int = 0
    staged_out_bytes: int = 0


class ExternalJobAnswer(ExternalJobView, frozen=True, kw_only=True):
    """Answer about one external job. `warnings`: what the directives say that has no effect here, after a setup."""

    revision: int
    warnings: tuple[str, ...] = ()


class ExternalJobsAnswer(Answer, frozen=True, kw_only=True):
    """The external jobs of the scheduler that asks, each with its last epoch."""

    external_jobs: tuple[ExternalJobView, ...]
    truncated: bool = False


class MakePersistentRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/persistent/{name}/make."""

    cluster: Name
    user: Name
    uid: Id
    gid: Id
    pool: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """Empty: the default pool."""
    size: Annotated[int, msgspec.Meta(ge=1, le=SIZE_BYTES_MAX)]
    """Units of the pool."""


class RemovePersistentRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/persistent/{name}/remove."""

    cluster: Name
    user: Name
    uid: Id
    gid: Id
    hurry: bool = False


class PersistentView(View, frozen=True, kw_only=True):
    """One persistent buffer that all nodes see, or what a scheduler has asked for it."""

    name: str
    state: str
    """none, allocating, allocated, deleting."""
    user: str = ""
    pool: str = ""
    size: int = 0
    """What it holds, in units of the pool."""
    path: str | None = None
    """Its directory; null while there is none."""
    number: int = 0
    """Of the job that made it, or is removing it."""
    create_time: str | None = None


class PersistentAnswer(PersistentView, frozen=True, kw_only=True):
    """Answer about one persistent buffer. `under_way`: make, remove, or empty, of the user that the command named."""

    revision: int
    under_way: str = ""
    failed: bool = False
    """Whether what is under way goes on only if somebody sees to it: remove it, and ask again."""
    message: str = ""
    """Why it has not ended."""


class PersistentsAnswer(Answer, frozen=True, kw_only=True):
    """Persistent buffers that all nodes see, by name."""

    buffers: tuple[PersistentView, ...]


class ExternalJobPoolView(View, frozen=True, kw_only=True):
    """One pool that external jobs may be in. Numbers are units of the pool."""

    name: str
    unit: str
    quantity: int
    """What is in service, in whole grains."""
    granularity: int
    free: int
    """What one more setup would get now: what lingers counts as free, what reservations keep for others does not, and
    nothing is while an external job waits for its space there, or a job that has been passed as often as may be."""
    default: bool = False


class SchedulerSiteAnswer(Answer, frozen=True, kw_only=True):
    """What another scheduler needs to know of this site: its pools, and what requests may say."""

    pools: tuple[ExternalJobPoolView, ...]
    directive: str
    provider: str
    allow_users: tuple[str, ...]
    deny_users: tuple[str, ...]
    setup_wait_s: int
    linger_s: int


class SchedulerView(View, frozen=True, kw_only=True):
    """One scheduler that has external jobs here."""

    scheduler: str
    cluster: str
    address: str
    """From where it came last."""
    since: str | None


class SchedulersAnswer(Answer, frozen=True, kw_only=True):
    """Other schedulers, by name."""

    schedulers: tuple[SchedulerView, ...]
