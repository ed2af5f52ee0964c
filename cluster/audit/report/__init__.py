"""A window of the ledger as figures, and as one page of pictures that needs nothing else."""

from cluster.audit.report.figures import COLUMNS, Bar, JobBars, PoolUse, Report, Source, Term, Transfer, Waiting
from cluster.audit.report.jobs import JobRow, read_jobs
from cluster.audit.report.page import page_of
from cluster.audit.report.window import JOBS_SHOWN_MAX, Window, read_window

__all__ = [
    "COLUMNS",
    "JOBS_SHOWN_MAX",
    "Bar",
    "JobBars",
    "JobRow",
    "PoolUse",
    "Report",
    "Source",
    "Term",
    "Transfer",
    "Waiting",
    "Window",
    "page_of",
    "read_jobs",
    "read_window",
]
