"""Command handlers: decide each command, one module per resource. A submit passes several of them in order."""

from forebay.replica.decide.accounts import record_etag
from forebay.replica.decide.arrays import job_of_task, jobs_of_tasks
from forebay.replica.decide.cluster import loss_rejection
from forebay.replica.decide.configuration import (
    TargetConfiguration,
    configuration_events,
    configured_default_pool,
    differences,
    file_text,
    file_value,
    target_configuration,
)
from forebay.replica.decide.decide import decide, decide_steps, is_by_key, jobs_of_command
from forebay.replica.decide.persistent import find_persistent_job
from forebay.replica.decide.pools import overcommitted_bytes
from forebay.replica.decide.sessions import is_expiry_due
