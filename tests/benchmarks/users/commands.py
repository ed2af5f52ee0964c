"""Command-line calls as people and scripts make them: a process each, beside etcdctl with TLS and Slurm's commands."""

import os
import pwd
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from tests.benchmarks.etcd import EtcdCluster
from tests.benchmarks.processes import ServerFailed
from tests.benchmarks.users import slurm
from tests.benchmarks.users.rows import Found, Row, Say, median
from tests.benchmarks.users.site import USER, ForebaySite, job_script

CALLS = 15
"""Calls of each command, count: a median that a busy second does not move."""


class Call(NamedTuple):
    """One command line, and as whom it runs."""

    name: str
    command: list[str]
    environment: Mapping[str, str] | None = None
    user: int | None = None


def timed(call: Call) -> tuple[float, float]:
    """Run one command to its end; return its wall and processor time, seconds; ServerFailed if it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(
        call.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=call.environment,
        user=call.user,
        cwd="/",
    )
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise ServerFailed(f"`{call.name}` exited {process.returncode}: {said.decode(errors='replace')[-500:]}")
    return wall_s, usage.ru_utime + usage.ru_stime


def in_turn(calls: Sequence[Call], count: int) -> dict[str, dict[str, float]]:
    """Run each command `count` times, in turn, after once each for the caches; return name -> its medians."""
    taken: dict[str, list[tuple[float, float]]] = {call.name: [] for call in calls}
    for number in range(count + 1):
        for call in calls if number % 2 else calls[::-1]:
            one = timed(call)
            if number:
                taken[call.name].append(one)
    return {
        name: {
            "wall_ms": median([1000 * wall for wall, _ in ones], 1),
            "wall_min_ms": round(1000 * min(wall for wall, _ in ones), 1),
            "processor_ms": median([1000 * cpu for _, cpu in ones], 1),
        }
        for name, ones in taken.items()
    }


async def _start(cluster: "ForebaySite | EtcdCluster") -> None:
    await cluster.start()
    if isinstance(cluster, ForebaySite):
        async with cluster.client() as client:
            await cluster.submit(client, "shown")


def report(directory: Path, calls: int, say: Say, *, only_forebay: bool = False) -> Found:
    """Start one cluster of each, and run the commands in turn; return the rows."""
    why_not = slurm.missing()
    say(f"\nCommands: {calls} calls of each, in turn; a process each")
    if why_not:
        say(why_not)
    site = ForebaySite(directory / "commands-forebay")
    # No node of either answers, so what is submitted here does not run beside what is measured.
    site.agents = ()
    etcd = None if only_forebay else EtcdCluster(directory / "commands-etcd")
    beside = None if why_not else slurm.SlurmSite(directory / "commands-slurm", nodes=False)
    try:
        uvloop.run(_start(site))
        # As in a session of somebody who has logged in, which outlives one command.
        session = directory / "session"
        session.mkdir(mode=0o700)
        environment = os.environ | {"XDG_RUNTIME_DIR": str(session)}
        script = directory / "command.sh"
        script.write_text(job_script(site.files, "command"))
        script.chmod(0o644)
        typed = [
            Call("forebay queue", site.forebay("queue"), environment),
            Call("forebay job show", site.forebay("job", "show", "1"), environment),
            Call(
                "forebay submit",
                site.forebay("submit", "--chdir", str(site.files.results), str(script)),
                environment,
            ),
            Call("forebay --help", site.forebay("--help")),
        ]
        others: dict[str, str] = {}
        if etcd is not None:
            uvloop.run(_start(etcd))
            subprocess.run(etcd.control("put", "bench", "value"), check=True, capture_output=True)
            typed += [
                Call("etcdctl get", etcd.control("get", "bench")),
                Call("etcdctl put", etcd.control("put", "bench", "value")),
                Call("etcdctl --help", etcd.control("--help")),
            ]
            others = dict.fromkeys(("forebay queue", "forebay job show"), "etcdctl get")
            others |= {"forebay submit": "etcdctl put", "forebay --help": "etcdctl --help"}
        if beside is not None:
            beside.start()
            beside_script = directory / "beside.sh"
            beside_script.write_text(slurm.job_script(beside.files, "command"))
            beside_script.chmod(0o644)
            user = pwd.getpwnam(USER).pw_uid
            typed += [
                Call(name, [*name.split(), *more], beside.environment, user)
                for name, more in (("squeue", []), ("sbatch", [str(beside_script)]), ("squeue --help", []))
            ]
        found = in_turn(typed, calls)
        for name, one in found.items():
            say(f"{name:<18} {one['wall_ms']:>8.1f} ms {one['processor_ms']:>8.1f} ms of processor")
    finally:
        for cluster in (site, etcd, beside):
            if cluster is not None:
                cluster.stop()
    in_slurm = {"forebay queue": "squeue", "forebay submit": "sbatch", "forebay --help": "squeue --help"}
    return Found(
        [_row(name, found, others, in_slurm) for name in found if name.startswith("forebay")], {"calls": found}
    )


def _row(
    name: str, found: Mapping[str, Mapping[str, float]], others: Mapping[str, str], in_slurm: Mapping[str, str]
) -> Row:
    def text(of: str) -> str:
        return f"{found[of]['wall_ms']:.0f} ms, {found[of]['processor_ms']:.0f} of processor"

    beside = [(other, text(other)) for other in (others.get(name), in_slurm.get(name)) if other in found]
    if (other := others.get(name)) in found:
        times = found[name]["wall_ms"] / found[other]["wall_ms"]
        beside[0] = (other, f"{text(other)} (Forebay takes {times:.1f} times that)")
    return Row(f"`{name}`, one call at p50", text(name), "; ".join(f"`{one}` {said}" for one, said in beside))
