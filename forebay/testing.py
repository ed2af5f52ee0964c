"""Cluster in memory for tests of programs that use the Python API.

    import forebay.testing

    with forebay.testing.cluster() as cluster:
        client = cluster.client(user="dana")
        job = client.submit("#!/bin/sh\\n#DW jobdw capacity=1GiB\\n")
        cluster.advance(60)
        assert client.job(job).state == "COMPLETED"

It decides and schedules as a real cluster, runs nothing and moves no data. It needs `forebay[testing]`.
"""

try:
    from forebay.cluster.testing import MemoryCluster, cluster
except ModuleNotFoundError as error:
    if error.name != "immutables":
        raise
    raise ModuleNotFoundError("forebay.testing needs immutables; install forebay[testing]", name=error.name) from error

__all__ = ["MemoryCluster", "cluster"]
