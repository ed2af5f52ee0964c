"""Command handlers: decide each command, one module per resource. Submit is one pipeline."""

from replica.decide.accounts import record_etag
from replica.decide.arrays import job_of_task, jobs_of_tasks
from replica.decide.cluster import loss_refusal
from replica.decide.configuration import (
    TargetConfiguration,
    configuration_events,
    configured_default_pool,
    differences,
    file_text,
    file_value,
    target_configuration,
)
from replica.decide.decide import decide, decide_steps, is_by_key, jobs_of_command
from replica.decide.persistent import find_persistent_job
from replica.decide.pools import overcommitted_bytes
from replica.decide.sessions import is_expiry_due
