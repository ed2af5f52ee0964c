"""Prometheus metrics: counters incremented by events, and gauges read at the scrape."""

from forebay.cluster.api.metrics.families import CONTENT_TYPE, MetricFamily, prometheus_text
from forebay.cluster.api.metrics.registry import MetricsRegistry
from forebay.cluster.api.metrics.work import state_families
