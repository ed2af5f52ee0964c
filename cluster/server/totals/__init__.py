"""Counters of one replica for Prometheus, which start anew with each process."""

from forebay.cluster.server.totals.jobs import Durations, JobTotals, TransferTotals
