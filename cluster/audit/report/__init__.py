"""Report of a ledger window: figures, and a self-contained page with charts."""

from forebay.cluster.audit.report.figures import (
    COLUMNS,
    JobBars,
    PendingJobs,
    PoolUsage,
    ReasonFigures,
    ReportSource,
    StateBar,
    Term,
    TransferFigures,
    WindowReport,
    WindowTotals,
)
from forebay.cluster.audit.report.jobs import JobRow, read_jobs
from forebay.cluster.audit.report.page import KIND_COLOURS, amount, page_of, waiting_picture
from forebay.cluster.audit.report.window import JOBS_SHOWN_MAX, PoolColumns, Window, read_window
