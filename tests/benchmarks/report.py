"""The sections of scripts/bench: what is run in which order, and the tables that are printed."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tests.benchmarks import failover as failovers_module
from tests.benchmarks import idle as idle_module
from tests.benchmarks.etcd import EtcdCluster
from tests.benchmarks.forebay import ForebayCluster
from tests.benchmarks.inside import InsideCluster
from tests.benchmarks.load import Measurement, measure
from tests.benchmarks.pipelined import ChannelCluster, EtcdGrpcCluster

Say = Callable[[str], None]

FAILOVERS_PER_LINE = 10
"""Leaders lost of each system between two lines that say how far it is, count."""


SYSTEMS: dict[str, type[ForebayCluster] | type[EtcdCluster]] = {
    "forebay": ForebayCluster,
    "etcd": EtcdCluster,
    "channel": ChannelCluster,
    "etcd-grpc": EtcdGrpcCluster,
    "inside": InsideCluster,
}


async def _one(
    name: str, directory: Path, clients: int, connections: int, warm_up_s: float, seconds: float
) -> Measurement:
    cluster = SYSTEMS[name](directory)
    try:
        await cluster.start()
        if isinstance(cluster, ChannelCluster | EtcdGrpcCluster):
            return await cluster.measure(clients, warm_up_s=warm_up_s, seconds=seconds, connections_max=connections)
        if isinstance(cluster, InsideCluster):
            return await cluster.measure(clients, warm_up_s=warm_up_s, seconds=seconds)
        return await measure(cluster, clients, warm_up_s=warm_up_s, seconds=seconds)
    finally:
        cluster.stop()


def loads(
    options: argparse.Namespace, pairs: Sequence[tuple[str, str]], directory: Path, say: Say, *, warm_up_s: float
) -> tuple[dict[str, Any], bool]:
    """Run every load in every round; return the medians and all measurements, and whether there was no error."""
    ours = [pair[0] for pair in pairs] if options.only != "etcd" else []
    others = list(dict.fromkeys(pair[1] for pair in pairs)) if options.only != "forebay" else []
    systems = [*ours, *others]
    beside = dict(pairs)
    say("")
    for system in systems:
        say(f"{system:<10} {SYSTEMS[system].operation}")
    say("")
    say(
        f"{'round':>5} {'clients':>7} {'system':<10} {'commits/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} "
        f"{'errors':>6} {'client cores':>12} {'server cores':>12}"
    )
    results: list[Measurement] = []
    for round_ in range(options.rounds):
        for clients in options.clients:
            for system in systems if round_ % 2 == 0 else systems[::-1]:
                place = directory / f"{system}-{round_}-{clients}"
                result = uvloop.run(_one(system, place, clients, options.connections, warm_up_s, options.seconds))
                results.append(result)
                say(
                    f"{round_ + 1:>5} {clients:>7} {system:<10} {result.commits_per_s:>10,.0f} {result.p50_ms:>8.2f} "
                    f"{result.p99_ms:>8.2f} {result.max_ms:>8.1f} {result.errors:>6} "
                    f"{result.client_cores:>12.2f} {result.server_cores:>12.2f}"
                )
                for example in result.error_examples:
                    say(f"      {example}")
    medians = _medians(results, systems, options.clients, beside)
    say("")
    say(f"Median of {options.rounds} rounds of {options.seconds:g} s; `of etcd`: median of the ratios within a round")
    say(f"{'clients':>7} {'system':<10} {'commits/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'of etcd':>8}")
    for median in medians:
        share = "" if median["of_etcd"] is None else f"{median['of_etcd']:.2f}"
        say(
            f"{median['clients']:>7} {median['system']:<10} {median['commits_per_s']:>10,.0f} {median['p50_ms']:>8.2f} "
            f"{median['p99_ms']:>8.2f} {share:>8}"
        )
    found = {
        "operations": {system: SYSTEMS[system].operation for system in systems},
        "medians": medians,
        "measurements": msgspec.to_builtins(results),
    }
    return found, not any(result.errors or not result.commits for result in results)


def _medians(
    results: Sequence[Measurement], systems: Sequence[str], all_clients: Sequence[int], beside: dict[str, str]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for clients in all_clients:
        of = {name: [one for one in results if (one.system, one.clients) == (name, clients)] for name in systems}
        for system in systems:
            mine, other = of[system], of.get(beside.get(system, ""), [])
            ratios = [
                one.commits_per_s / two.commits_per_s for one, two in zip(mine, other, strict=False) if two.commits
            ]
            found.append(
                {
                    "system": system,
                    "clients": clients,
                    "commits_per_s": round(statistics.median(one.commits_per_s for one in mine), 1),
                    "p50_ms": round(statistics.median(one.p50_ms for one in mine), 3),
                    "p99_ms": round(statistics.median(one.p99_ms for one in mine), 3),
                    "errors": sum(one.errors for one in mine),
                    "of_etcd": round(statistics.median(ratios), 3) if ratios else None,
                }
            )
    return found


def failovers(
    systems: Sequence[str],
    count: int,
    directory: Path,
    say: Say,
    timings: Sequence[str] = tuple(failovers_module.TIMINGS),
    faults: Sequence[str] = tuple(failovers_module.FAULTS),
) -> list[dict[str, Any]]:
    """Lose leaders, of the systems in turn; return one row for each timing, fault and system."""
    say("")
    say(f"Failover: from the fault to the next acknowledged write, {count} leaders lost per row")
    say(
        f"{'election s':>10} {'fault':<6} {'system':<8} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} "
        f"{'p50 of etcd':>11} {'p99 of etcd':>11}"
    )
    rows: list[dict[str, Any]] = []
    for timing in timings:
        for fault in faults:

            def tell(done: int, timing: str = timing, fault: str = fault) -> None:
                if done % FAILOVERS_PER_LINE == 0 and done < count:
                    say(f"{timing:>10} {fault:<6} {done} of {count}")

            place = directory / f"failover-{timing}-{fault}"
            found = uvloop.run(failovers_module.measure(systems, timing, fault, count, place, tell))
            of = {row.system: row for row in found}
            for row in found:
                ratios: dict[str, float] = {}
                if row.system != "etcd" and "etcd" in of:
                    ratios["p50_of_etcd"] = round(row.p50_ms / of["etcd"].p50_ms, 3)
                    ratios["p99_of_etcd"] = round(row.p99_ms / of["etcd"].p99_ms, 3)
                rows.append(msgspec.to_builtins(row) | ratios)
                say(
                    f"{timing:>10} {fault:<6} {row.system:<8} {row.p50_ms:>8.0f} {row.p99_ms:>8.0f} {row.max_ms:>8.0f} "
                    + " ".join(f"{ratio:>11.2f}" for ratio in ratios.values())
                )
    return rows


def idle(systems: Sequence[str], seconds: float, directory: Path, say: Say) -> list[dict[str, Any]]:
    """Leave clusters alone; return one row for each system."""
    say("")
    say(f"Idle: three servers, nobody asks, {seconds:g} s")
    say(f"{'system':<8} {'% of a core':>11} {'bytes written':>13}")
    rows = []
    for system in systems:
        row = uvloop.run(idle_module.measure(SYSTEMS[system](directory / f"idle-{system}"), seconds))
        rows.append(msgspec.to_builtins(row))
        say(f"{system:<8} {row.core_percent:>11.2f} {row.bytes_written:>13}")
    return rows
