"""What a job asked for beyond the ordinary, as answers show it: a part of JobView that most jobs do not have."""

import msgspec


class JobDetailsView(msgspec.Struct, frozen=True, kw_only=True):
    """More of one job. Null in JobView where all of it is as it is here by default."""

    nodes: int = 1
    """0: the job runs no script, and only creates or destroys persistent buffers."""
    gid: int | None = None
    account: str | None = None
    qos: str | None = None
    licenses: tuple[str, ...] = ()
    """Such as `matlab:2`."""
    reservation: str | None = None
    partition: str | None = None
    nice: int = 0
    array_job_id: int | None = None
    array_task_id: int | None = None
    array_throttle: int = 0
    """How many tasks of the array may go at once; 0: all."""
    requeue: bool = True
    restarts: int = 0
    """How often the job was requeued."""
    singleton: bool = False
    dependency_any: bool = False
    """Whether one of its dependencies is enough."""
    mail_types: tuple[str, ...] = ()
    mail_user: str | None = None
    comment: str | None = None
    deadline: str | None = None
    """When it must have ended."""
    suspend_time: str | None = None
    """Since when it is suspended; null if it is not."""
    suspended_s: int = 0
    """For how long it was suspended before, whole seconds."""


NO_DETAILS = JobDetailsView()
