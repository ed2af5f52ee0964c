"""Command handlers: decide each command, one module per resource. Submit is one pipeline."""

from replica.decide.arrays import job_of_task, members
from replica.decide.cluster import loss_refusal
from replica.decide.configuration import (
    Wanted,
    configuration_events,
    differences,
    file_text,
    shown_default_pool,
    wanted_of,
    written_value,
)
from replica.decide.decide import decide, deciding, is_by_key, jobs_of_command
from replica.decide.persistent import job_about
from replica.decide.pools import overcommitted_bytes
from replica.decide.sessions import is_expiry_due
