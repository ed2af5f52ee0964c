"""Read-only queries over a state, for agents and the API."""

from forebay.replica.views.burst import Burst, BurstBuffer, burst_buffers, burst_of, burst_place, job_tres
from forebay.replica.views.jobs import (
    NO_TRANSFERS,
    buffer_path,
    buffer_word,
    not_exported,
    persistent_notes,
    persistent_paths,
    pool_use,
    shared_destinations,
    verdict_of,
    verdicts,
)
from forebay.replica.views.orders import orders_for
