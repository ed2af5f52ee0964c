"""Cluster overview: activity, items that need attention, and pool use."""

from cluster.api.watch.overview import list_pool_use, show_overview
