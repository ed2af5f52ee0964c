"""Schemas of external jobs: jobs of another scheduler with buffers here."""

from typing import Annotated

import msgspec

from forebay.cluster.schemas.base import Answer, Command, Name, Number, View
from forebay.replica.values import MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX, PATH_BYTES_MAX, SIZE_BYTES_MAX

Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 2)]
"""UID or GID, in the range of Linux."""


class RegisterSchedulerRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/scheduler/register."""

    cluster: Name
    """Text unique to this scheduler and shared by its hosts, for example random text beside its state."""
    address: Name
    """Host that registers; later rejections name it."""


class ExternalJobCommand(Command, frozen=True, kw_only=True):
    """Base of all commands about external jobs."""

    cluster: Name
    """Value of `cluster` at the registration."""
    epoch: Number = 0
    """Epoch the command refers to, as returned in a response; late commands then have no effect. 0: the last epoch."""


class SetUpExternalJobRequest(ExternalJobCommand, frozen=True, kw_only=True):
    """Body of POST /v1/external-jobs/{job}/setup. `epoch`, if given, is the last epoch or the next one."""

    user: Name
    uid: Id
    gid: Id
    groups: Annotated[tuple[Id, ...], msgspec.Meta(max_length=65_536)] = ()
    script: str
    """Job script with directives, after the scheduler replaced its symbols."""
    pool: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    size: Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)] = 0
    """Space the scheduler has accounted for, in units of the pool. Overrides the directives."""
    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""
    """Job name, for display and `%x`."""
    workdir: Annotated[str, msgspec.Meta(max_length=PATH_BYTES_MAX)] = ""


class TearDownExternalJobRequest(ExternalJobCommand, frozen=True, kw_only=True):
    """Body of POST /v1/external-jobs/{job}/teardown. `hurry`: discard unexported results."""

    hurry: bool = False
    reason: Annotated[str, msgspec.Meta(max_length=MESSAGE_CHARACTERS_MAX)] = ""
    """Reason, if the scheduler no longer knows the job. A job that has not run is then removed without lingering."""


class MissExternalJobRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/external-jobs/{job}/miss."""

    cluster: Name
    state: Name
    """Job state in the scheduler's terms."""


class ExternalJobView(View, frozen=True, kw_only=True):
    """Last epoch of one external job."""

    scheduler: str
    job: str
    epoch: int
    """0: no epoch exists."""
    phase: str
    """none, waiting, set-up, staging-in, stage-in-failed, staged-in, running, post-run, staging-out, stage-out-failed,
    lingering, retained, teardown, teardown-failed, over."""
    job_id: int | None = None
    """ID of its record among Forebay's jobs."""
    user: str = ""
    uid: int = 0
    """UID of the user on the scheduler's hosts."""
    pool: str = ""
    size: int = 0
    """Space it holds or waits for, in units of the pool."""
    message: str = ""
    """Failure of its setup or of its last operation."""
    path: str | None = None
    """Directory of its buffer on the pool's shared filesystem; null if none exists."""
    persistent: dict[str, str] = {}
    """Directory of each persistent buffer it uses, by name."""
    mover: str | None = None
    """Agent that stages for it."""
    submit_time: str | None = None
    kept_until: str | None = None
    """End of lingering, unless the space is needed earlier."""
    staged_in_files: int = 0
    staged_in_bytes: int = 0
    staged_out_files: int = 0
    staged_out_bytes: int = 0


class ExternalJobAnswer(ExternalJobView, frozen=True, kw_only=True):
    """Response with one external job. `warnings`: directive options that have no effect here, after a setup."""

    revision: int
    warnings: tuple[str, ...] = ()


class ExternalJobsAnswer(Answer, frozen=True, kw_only=True):
    """External jobs of the calling scheduler, each with its last epoch."""

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
    """Persistent buffer on a shared filesystem, or the scheduler's pending request for it."""

    name: str
    state: str
    """none, allocating, allocated, deleting."""
    user: str = ""
    pool: str = ""
    size: int = 0
    """Space it holds, in units of the pool."""
    path: str | None = None
    """Directory of the buffer; null if none exists."""
    number: int = 0
    """ID of the job that creates or removes it."""
    create_time: str | None = None


class PersistentAnswer(PersistentView, frozen=True, kw_only=True):
    """Response with one persistent buffer. `under_way`: the named user's pending operation: make, remove, or empty."""

    revision: int
    under_way: str = ""
    failed: bool = False
    """True if the operation is stuck and needs an operator: remove the buffer, then request it again."""
    message: str = ""
    """Reason the operation has not ended."""


class PersistentsAnswer(Answer, frozen=True, kw_only=True):
    """Persistent buffers on shared filesystems, by name."""

    buffers: tuple[PersistentView, ...]


class ExternalJobPoolView(View, frozen=True, kw_only=True):
    """Pool available to external jobs. Numbers are units of the pool."""

    name: str
    unit: str
    quantity: int
    """Capacity in service, in whole grains."""
    granularity: int
    free: int
    """Space available to one more setup. Lingering buffers count as free, space reserved for others does not.

    The result is 0 while an external job waits for space there, or a job that has been passed over as often as allowed.
    """
    default: bool = False


class SchedulerSiteAnswer(Answer, frozen=True, kw_only=True):
    """Facts about this site for another scheduler: pools and request limits."""

    pools: tuple[ExternalJobPoolView, ...]
    directive: str
    provider: str
    allow_users: tuple[str, ...]
    deny_users: tuple[str, ...]
    setup_wait_s: int
    linger_s: int
    path_variables: tuple[str, ...] = ()
    """Variables that paths in directives may contain, as in the configuration key PathVariables."""


class SchedulerView(View, frozen=True, kw_only=True):
    """Scheduler with external jobs here."""

    scheduler: str
    cluster: str
    address: str
    """Address of its last registration."""
    since: str | None


class SchedulersAnswer(Answer, frozen=True, kw_only=True):
    """Registered schedulers, by name."""

    schedulers: tuple[SchedulerView, ...]
