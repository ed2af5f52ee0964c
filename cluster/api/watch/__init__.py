"""The cluster at a glance: what it is doing, what needs somebody, how full pools were."""

from cluster.api.watch.overview import list_pool_use, show_overview
