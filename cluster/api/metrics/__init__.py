"""Prometheus metrics: counters incremented by events, and gauges read at the scrape."""

from forebay.cluster.api.metrics.registry import CONTENT_TYPE, MetricsRegistry
