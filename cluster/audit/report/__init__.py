"""Report of a ledger window: figures, and a self-contained page with charts."""

from cluster.audit.report.figures import (
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
from cluster.audit.report.jobs import JobRow, read_jobs
from cluster.audit.report.page import KIND_COLOURS, amount, page_of, waiting_picture
from cluster.audit.report.window import JOBS_SHOWN_MAX, PoolColumns, Window, read_window
