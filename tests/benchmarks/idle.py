"""What a cluster costs that nobody asks anything of: processor time, and bytes written to disk."""

import asyncio

import msgspec

from tests.benchmarks.etcd import EtcdCluster
from tests.benchmarks.forebay import ForebayCluster

QUIET_S = 8.0
"""Seconds after the start before it counts: elections, founding and the marks that are written lazily are over."""


class Idle(msgspec.Struct, frozen=True):
    """What three idle servers together took."""

    system: str
    seconds: float
    core_percent: float
    bytes_written: int


async def measure(cluster: "ForebayCluster | EtcdCluster", seconds: float) -> Idle:
    """Start a cluster, leave it alone, and read what it took."""
    try:
        await cluster.start()
        await asyncio.sleep(QUIET_S)
        run_s, written = cluster.run_s(), cluster.bytes_written()
        await asyncio.sleep(seconds)
        cluster.check()
        return Idle(
            cluster.name,
            seconds,
            round(100 * (cluster.run_s() - run_s) / seconds, 2),
            cluster.bytes_written() - written,
        )
    finally:
        cluster.stop()
