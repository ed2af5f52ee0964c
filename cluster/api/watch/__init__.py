"""Cluster overview: activity, items that need attention, and pool use."""

from forebay.cluster.api.watch.live import live_values
from forebay.cluster.api.watch.overview import list_pool_use, show_overview
