"""Cluster in memory for users' tests, exported as `forebay.testing`."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.testing.memory_cluster import MemoryCluster, cluster
else:
    __getattr__ = export_lazily(__name__)
