"""Compares the write stops that drills report with an independent stopwatch, on `forebay cluster up`.

Switchovers and leader-kills by turns, each beside the stopwatch, which runs in the same seconds. No root is needed. Run
by scripts/drills --loopback.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from forebay.cluster.config.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Address, SystemClock, parse_instant
from tests.faults.local_cluster import USER, LocalCluster, RunFailed
from tests.ports import free_ports

STOPWATCH = Path(__file__).with_name("stopwatch.py")
SCENARIOS = ("switchover", "leader-kill")
AGREES_MS = 20.0
"""How far the figure of a drill may be off from what the stopwatch saw, ms."""

READY_S = 60.0
DRILL_S = 300.0


class Stopwatch:
    """The independent stopwatch, a program of its own."""

    def __init__(self, config: Config, identity: str, job: int) -> None:
        """`job`: one that is held and released again and again."""
        files = config.tls_files(identity)
        places = [str(replica.api) for replica in config.replicas]
        options = [f"--ca={files.authority}", f"--cert={files.certificate}", f"--key={files.key}", f"--job={job}"]
        self._command = [sys.executable, "-I", str(STOPWATCH), *options, *places]
        self.acknowledged_s: list[float] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], None]]:
        """Send a write to each replica every few milliseconds until the end of the block, or what is given is called.

        It comes before everything else on the machine, so it ends where there is nothing more to see.
        """
        with subprocess.Popen(
            # A session of its own: the kernel shares the processors out among sessions.
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RunFailed("the stopwatch does not begin")
            says, hears = process.stdin, process.stdout

            def stop() -> None:
                if not says.closed:
                    says.close()
                    self.acknowledged_s = json.loads(hears.readline() or "[]")

            try:
                yield stop
            finally:
                stop()

    def longest_ms(self, ended: dict[str, Any]) -> float:
        """Return the longest time without an acknowledgement from the fault of a drill on, by its own window."""
        # The same stretch of time, by the wall clock of this machine.
        began = (parse_instant(ended["began"]) - SystemClock().now()) / 1e6 + time.monotonic()
        since_s = began + ended["figures"]["fault_at_us"] / 1e6
        until_s = since_s + ended["figures"]["watched_us"] / 1e6
        gaps = [
            b - a
            for a, b in zip(self.acknowledged_s, self.acknowledged_s[1:], strict=False)
            if b > since_s and a < until_s
        ]
        return max(gaps, default=0.0) * 1000


def confirmed(command: Any, scenario: str, *more: str) -> dict[str, Any]:
    """Plan a drill until nothing refuses it, carry it out, and return how it ended; RunFailed."""
    forced, until_s = ("--force", "digests", *more), time.monotonic() + READY_S
    while True:
        plan = typed(command("drill", "plan", scenario, *forced, "--json"))
        unmet = [one for one in plan["preconditions"] if not one["holds"] and one["name"] not in plan["forced"]]
        if not unmet:
            break
        if time.monotonic() > until_s:
            raise RunFailed(f"{scenario} has no plan: {unmet}")
    words = ("--goal-ms", "5000", "--abort-after-s", "20", "--abort-if-slower", "0", "--confirm", plan["id"], "--json")
    return typed(command("drill", "run", scenario, "--target", plan["target"], *forced, *words))


def typed(command: list[str]) -> dict[str, Any]:
    """Return the JSON that a command prints, whatever its exit code; RunFailed where it prints none."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DRILL_S)
    if not done.stdout:
        raise RunFailed(f"{' '.join(command[1:])}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Stops:
    """A cluster under `forebay cluster up`, and each drill of it beside the stopwatch."""

    def __init__(self, directory: Path) -> None:
        self.cluster = LocalCluster(directory)
        self.up: subprocess.Popen[bytes] | None = None
        self.stops_ms: dict[str, list[float]] = defaultdict(list)
        self.off_ms: dict[str, list[float]] = defaultdict(list)

    async def run(self, rounds: int) -> None:
        """Carry out `rounds` drills of each kind."""
        self._start()
        async with self.cluster.client(USER, deadline_s=READY_S) as client:
            await client.call(ops.LIST_MEMBERS)
        self._submit()
        for number in range(rounds):
            for scenario in SCENARIOS:
                self.round(scenario, number)

    def _start(self, targets: Iterable[str] = ("r1", "r2", "r3")) -> None:
        cluster = self.cluster
        cluster.found({"fast": "64MiB/1MiB,default"}, "1GiB")
        (port,) = free_ports(1)
        with cluster.file.open("a") as file:
            address = Address("127.0.0.1", port)
            file.write(f'[[helper]]\nname = "h1"\naddress = "{address}"\ntargets = {json.dumps(list(targets))}\n')
            file.write('[drill]\nallow = ["process"]\n')
        cluster.forebay("cert", "issue", "h1", "--role", "helper")
        with (cluster.directory / "up.log").open("wb") as log:
            self.up = subprocess.Popen(cluster.command("cluster", "up"), stdout=log, stderr=log, start_new_session=True)

    def _submit(self) -> None:
        """Submit the job of the stopwatch, held."""
        cluster = self.cluster
        script = cluster.work / "never"
        script.write_text("#!/bin/sh\n")
        submit = cluster.command("submit", "--chdir", str(cluster.work), "--hold", str(script), identity=USER)
        subprocess.run(submit, check=True, capture_output=True)

    def round(self, scenario: str, number: int) -> None:
        """Carry one out."""
        assert self.cluster.config is not None
        stopwatch = Stopwatch(Config.load(self.cluster.file), USER, 1)
        with stopwatch.watching():
            ended = confirmed(self.cluster.command, scenario, *(("--hold-s", "3") if scenario != "switchover" else ()))
        figures = ended["figures"]
        if ended["verdict"] != "passed":
            raise RunFailed(f"{scenario}: {ended['verdict']}: {ended['sentence']}")
        said_ms, saw_ms = figures["write_stop_us"] / 1000, stopwatch.longest_ms(ended)
        self.stops_ms[scenario].append(said_ms)
        self.off_ms[scenario].append(round(said_ms - saw_ms, 1))
        print(
            f"{number + 1:2} {scenario:<11} of {ended['target']}: writes stopped {said_ms:7.1f} ms, the stopwatch saw "
            f"{saw_ms:7.1f} ms, a user met {figures['user_write_stop_us'] / 1000:7.1f} ms; the probe was "
            f"{figures['client_late_us'] / 1000:.1f} ms late, {figures['control_write_gap_us'] / 1000:.1f} ms normal",
            flush=True,
        )

    def release(self) -> None:
        """End every process."""
        if self.up is not None:
            self.up.terminate()
            self.up.wait()

    def figures(self) -> dict[str, Any]:
        """Return what is said in the end."""
        off_ms = [abs(one) for row in self.off_ms.values() for one in row]
        return {
            "write_stop_ms": dict(self.stops_ms),
            "off_from_stopwatch_ms": dict(self.off_ms),
            "off_median_ms": round(statistics.median(off_ms), 1) if off_ms else None,
            "within_20_ms": all(one <= AGREES_MS for one in off_ms),
        }
