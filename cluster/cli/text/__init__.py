"""Output of commands: tables, progress bars, Key=Value blocks, squeue's formats."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.cli.text.history import changes_text, event_line, terms_table
    from forebay.cluster.cli.text.job import job_block, timeline, why_text
    from forebay.cluster.cli.text.output import (
        Cell,
        Listing,
        fields_table,
        is_terminal,
        json_line,
        json_text,
        list_fields,
        note,
        present,
        show,
        show_json,
        size,
        stderr_console,
        stdout_console,
        table,
    )
    from forebay.cluster.cli.text.squeue import STANDARD, STARTS, Field, details_of, format_line, read_format, sort_jobs
    from forebay.cluster.cli.text.status import status_lines
    from forebay.cluster.cli.text.tables import (
        buffers_table,
        external_jobs_table,
        failures_first,
        format_age,
        format_time,
        job_label,
        jobs_table,
        members_table,
        nodes_table,
        pools_table,
        snapshot_fields,
        unit_in,
    )
    from forebay.cluster.cli.text.times import (
        PAST_FORMS,
        format_duration,
        format_elapsed,
        parse_begin,
        parse_duration,
        parse_past,
    )
    from forebay.cluster.cli.text.transfer import (
        STATE_STYLES,
        bar,
        draw_transfers,
        job_transfers_text,
        meter,
        receipt_text,
        state_words,
        transfers_table,
    )
else:
    __getattr__ = export_lazily(__name__)
