"""Cluster overview: activity, items that need attention, pool use, and event sinks."""

from forebay.cluster.api.watch.live import live_values
from forebay.cluster.api.watch.overview import list_pool_use, show_overview
from forebay.cluster.api.watch.sinks import list_sinks
