"""What Prometheus scrapes: counters where things happen, gauges read from the replica at the moment of the scrape."""

from cluster.api.metrics.registry import CONTENT_TYPE, MetricsRegistry
