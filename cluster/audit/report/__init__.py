"""A window of the ledger as figures, and as one page of pictures that needs nothing else."""

from cluster.audit.report.figures import (
    COLUMNS,
    JobBars,
    PendingJobs,
    PoolUsage,
    ReportSource,
    StateBar,
    Term,
    TransferFigures,
    WindowReport,
)
from cluster.audit.report.jobs import JobRow, read_jobs
from cluster.audit.report.page import KIND_COLOURS, amount, page_of, waiting_picture
from cluster.audit.report.window import JOBS_SHOWN_MAX, PoolColumns, Window, read_window
