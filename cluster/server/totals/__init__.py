"""What one replica counts of what it applies: sums for Prometheus, which begin anew with each process."""

from cluster.server.totals.jobs import Durations, JobTotals, TransferTotals
