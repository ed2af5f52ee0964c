"""Answers made of a state: jobs, events, reasons, and what is private."""

from cluster.api.render.events import (
    actor_words,
    as_json,
    configuration_record,
    event_name,
    event_views,
    record_view,
    sentence_of,
    verdict_words,
)
from cluster.api.render.job_details import job_words, task_words
from cluster.api.render.jobs import buffer_view, holders, job_view, node_jobs, node_view, persistent_view, pool_view
from cluster.api.render.reasons import Verdicts
