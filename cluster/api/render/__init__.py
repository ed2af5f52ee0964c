"""Views of a state: jobs, events, reasons, with private data removed."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.api.render.events import (
        actor_words,
        as_json,
        entry_view,
        event_name,
        event_view,
        record_event,
        record_head,
        record_view,
        sentence_of,
        verdict_words,
    )
    from forebay.cluster.api.render.jobs import (
        NODE_WORDS,
        buffer_view,
        capacity_controls,
        external_job_fields,
        holders,
        job_view,
        job_words,
        left_out,
        lost_job_view,
        node_view,
        node_word,
        persistent_view,
        pool_view,
        task_words,
        why_view,
    )
    from forebay.cluster.api.render.reasons import JobVerdicts, Verdicts
else:
    __getattr__ = export_lazily(__name__)
