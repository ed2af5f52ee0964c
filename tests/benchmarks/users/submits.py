"""Real submits with a buffer request each, all scripts different, over both doors; beside it sbatch in loops."""

import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.schemas.requests import BulkCommand, SubmitCommand
from tests.benchmarks.load import Measurement, measure
from tests.benchmarks.pipelined import ChannelCluster
from tests.benchmarks.users import slurm
from tests.benchmarks.users.rows import Found, Row, Say, median

SBATCH_PER_RUN = 1000
"""Calls of sbatch in one run, count: two seconds of them."""

SBATCH_LOOPS_MAX = 64
"""Loops of sbatch at once, count: more processes than that measure the machine's scheduler."""


def script(directory: Path, client: int, number: int) -> str:
    """Return a batch script that no other call returns, with a request of each kind that a job makes."""
    return f"""#!/bin/sh
#SBATCH --job-name=s{client}-{number}
#DW jobdw type=scratch access_mode=striped capacity={1 + number % 8}MiB pool=fast
#DW stage_in type=file source={directory}/in-{client}-{number} destination=$DW_JOB_STRIPED/in
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination={directory}/out-{client}-{number}
program --client {client} --case {number} "$DW_JOB_STRIPED/in" > "$DW_JOB_STRIPED/out"
"""


class Submits(ChannelCluster):
    """Three replicas and no agents: what is submitted waits."""

    name = "channel"

    def command(self, client: int, number: int, command_id: str) -> BulkCommand:
        """Return a submit."""
        text = script(self._results, client, number)
        return SubmitCommand(command_id=command_id, script=text, time_limit_s=60, workdir=str(self._results))

    def request(self, client: int, number: int) -> tuple[str, Mapping[str, Any]]:
        """Return a submit."""
        return "/v1/jobs", {
            "command_id": new_command_id(self._clock),
            "script": script(self._results, client, number),
            "time_limit_s": 60,
            "workdir": str(self._results),
        }

    def accepted(self, status: int, answer: Mapping[str, Any]) -> bool:
        """Say whether the job is there for good."""
        return status in (200, 201) and "revision" in answer


class SubmitsHttp(Submits):
    """The same over HTTP."""

    name = "http"


async def one(kind: type[Submits], directory: Path, clients: int, seconds: float, warm_up_s: float) -> Measurement:
    """Measure one door with one number of clients on a fresh cluster."""
    cluster = kind(directory)
    try:
        await cluster.start()
        if isinstance(cluster, SubmitsHttp):
            return await measure(cluster, clients, warm_up_s=warm_up_s, seconds=seconds)
        return await cluster.measure(clients, warm_up_s=warm_up_s, seconds=seconds, connections_max=1)
    finally:
        cluster.stop()


def sbatch_per_s(directory: Path, loops: int, calls: int) -> float:
    """Return how many different scripts a fresh Slurm takes a second from `loops` shells that call sbatch."""
    site = slurm.SlurmSite(directory, nodes=False)
    each = -(-calls // loops)
    loop = (
        f'i=0; while [ $i -lt {each} ]; do printf "%s\\n" "#!/bin/sh" "#BB_LUA pool=fast capacity=1MiB in=/in-$1-$i '
        'out=/out-$1-$i" "program $1 $i" | sbatch -o /dev/null >/dev/null || exit 1; i=$((i+1)); done'
    )
    try:
        site.start()
        started = time.perf_counter()
        running = [
            subprocess.Popen(
                ["sh", "-c", loop, "sh", str(number)],
                env=site.environment,
                cwd="/",
                user=site.account.pw_uid,
                stderr=subprocess.DEVNULL,
            )
            for number in range(loops)
        ]
        failed = sum(process.wait() != 0 for process in running)
        seconds = time.perf_counter() - started
        site.check()
        return 0.0 if failed else round(site.jobs() / seconds, 1)
    finally:
        site.stop()


def report(directory: Path, rounds: int, clients: Sequence[int], seconds: float, warm_up_s: float, say: Say) -> Found:
    """Measure both doors and sbatch with every number of clients in every round; return the rows."""
    why_not = slurm.missing()
    say("\nSubmits: a #DW request each, all scripts different; p99/p50; least: of the mean client's answers")
    if why_not:
        say(why_not)
    say(
        f"{'round':>5} {'clients':>7} {'door':<8} {'submits/s':>9} {'p50 ms':>8} {'p99 ms':>8} {'p99/p50':>7} "
        f"{'least':>6} {'errors':>6} {'server cores':>12}"
    )
    results: list[Measurement] = []
    sbatch: dict[int, list[float]] = {}
    for round_ in range(rounds):
        for count in clients:
            for kind in (Submits, SubmitsHttp) if round_ % 2 == 0 else (SubmitsHttp, Submits):
                place = directory / f"submits-{kind.name}-{round_}-{count}"
                result = uvloop.run(one(kind, place, count, seconds, warm_up_s))
                results.append(result)
                say(
                    f"{round_ + 1:>5} {count:>7} {result.system:<8} {result.commits_per_s:>9,.0f} "
                    f"{result.p50_ms:>8.2f} {result.p99_ms:>8.2f} {_ratio(result):>7.1f} "
                    f"{result.slowest_share or 0:>6.2f} {result.errors:>6} {result.server_cores:>12.2f}"
                )
                for example in result.error_examples:
                    say(f"      {example}")
            loops = min(count, SBATCH_LOOPS_MAX)
            if not why_not and len(sbatch.setdefault(loops, [])) <= round_:
                sbatch[loops].append(sbatch_per_s(directory / f"submits-slurm-{round_}", loops, SBATCH_PER_RUN))
                say(f"{round_ + 1:>5} {loops:>7} {'sbatch':<8} {sbatch[loops][-1]:>9,.0f}")
    rows = []
    for kind, door in ((Submits, "the channel"), (SubmitsHttp, "HTTP")):
        for count in clients:
            mine = [result for result in results if (result.system, result.clients) == (kind.name, count)]
            loops = min(count, SBATCH_LOOPS_MAX)
            rates = sbatch.get(loops)
            rows.append(
                Row(
                    f"real `#DW` submits over {door}, {count} client{'s' * (count > 1)}",
                    _said(mine),
                    f"{statistics.median(rates):,.0f} sbatch/s in {loops} loop{'s' * (loops > 1)}" if rates else "",
                )
            )
    whole = not any(result.errors or not result.commits for result in results)
    return Found(rows, {"measurements": msgspec.to_builtins(results), "sbatch_per_s": sbatch}, whole)


def _said(mine: Sequence[Measurement]) -> str:
    rate, p50, p99 = (median([getattr(one, key) for one in mine]) for key in ("commits_per_s", "p50_ms", "p99_ms"))
    least = median([one.slowest_share or 0.0 for one in mine])
    return (
        f"{rate:,.0f} a second; p50 {p50:.1f}, p99 {p99:.1f} ms ({median([_ratio(one) for one in mine]):.1f} times); "
        f"slowest client {100 * least:.0f} % of the mean"
    )


def _ratio(result: Measurement) -> float:
    return result.p99_ms / result.p50_ms if result.p50_ms else 0.0
