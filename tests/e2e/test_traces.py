"""Traces of real jobs, read by a third-party library: every span, under every leader, without secrets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cluster.api.traces.spans import trace_id
from tests.account import OWN
from tests.collector import Collector, collecting, needs_otel, values
from tests.faults.local_cluster import USER
from tests.ports import free_ports

pytestmark = needs_otel

FOREBAY = Path(sys.executable).with_name("forebay")
PORTS = 14
TIMEOUT_S = 120
"""Seconds that a step may take: a bound against hanging."""

SECRET = "5up3r-s3cr3t"


class Site:
    """Three running replicas and an agent, with a collector."""

    def __init__(self, directory: Path, collector: Collector) -> None:
        self.directory = directory
        self.collector = collector
        self.file = directory / "site" / "forebay.toml"
        for name in ("in", "out"):
            (directory / name).mkdir()
        self.type(
            "cluster", "init", str(self.file.parent), "--replicas=3", "--agents=1", f"--user={USER}",
            f"--accounts={OWN}", f"--base-port={free_ports(PORTS)[0]}", f"--source-root={directory / 'in'}",
            f"--destination-root={directory / 'out'}",
        )  # fmt: skip
        with self.file.open("a") as file:
            file.write(f'\n[traces]\nendpoint = "{collector.endpoint}"\n')
        self.up = subprocess.Popen(
            [str(FOREBAY), "--config", str(self.file), "cluster", "up"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.up.stdout is not None
        for line in self.up.stdout:
            if line.startswith("Ready: "):
                break

    def type(self, *words: str) -> str:
        """Run a command and return its output."""
        done = subprocess.run([str(FOREBAY), *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def ask(self, *words: str) -> Any:
        """Return the answer to a command as JSON."""
        return msgspec.json.decode(self.type("--config", str(self.file), "--json", *words))

    def run(self, text: str) -> int:
        """Run a job until its trace has arrived, and return the job ID."""
        script = self.directory / "job.sh"
        script.write_text(text)
        words = ("submit", "--identity", USER, "--chdir", str(self.directory), str(script))
        job = int(self.ask(*words)["job_id"])
        until(lambda: f"job {job}" in self.collector.named(job))
        return job

    def stop(self) -> None:
        self.up.send_signal(signal.SIGINT)
        self.up.communicate(timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with collecting() as collector:
        made = Site(tmp_path_factory.mktemp("traces"), collector)
        try:
            yield made
        finally:
            made.stop()


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def job_of(site: Site) -> str:
    (site.directory / "in" / "data").write_bytes(b"x" * 1000)
    return (
        "#!/bin/sh\n"
        "#DW jobdw capacity=16MiB access_mode=striped type=scratch\n"
        f"#DW stage_in source={site.directory}/in/data destination=$DW_JOB_STRIPED/data type=file\n"
        f"#DW stage_out source=$DW_JOB_STRIPED/data destination={site.directory}/out/data type=file\n"
        f"export TOKEN={SECRET}\n"
        "test -s $DW_JOB_STRIPED/data\n"
    )


def test_a_trace_covers_a_job_from_submit_to_teardown(site: Site) -> None:
    job = site.run(job_of(site))
    spans = site.collector.named(job)
    whole = spans[f"job {job}"]
    names = {f"job {job}", *"submit pending stage-in queued pre-run run post-run stage-out teardown".split()}
    assert names >= spans.keys() >= names - {"queued", "pre-run", "post-run"}
    cluster = values(whole.attributes)["forebay.cluster.id"]
    assert {span.trace_id for span in spans.values()} == {trace_id(cluster, job)}
    assert {span.parent_span_id for span in spans.values() if span is not whole} == {whole.span_id}
    assert whole.parent_span_id == b"" and len({span.span_id for span in spans.values()}) == len(spans)
    # All times are the ledger's, so a span begins at the end of the previous one.
    others = [span for span in spans.values() if span is not whole]
    in_order = sorted(others, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
    for before, after in zip(in_order[1:], in_order[2:], strict=False):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert in_order[0].name == "submit" and in_order[-1].name == "teardown"
    assert whole.start_time_unix_nano == in_order[0].start_time_unix_nano
    assert whole.end_time_unix_nano == in_order[-1].end_time_unix_nano
    shown = site.ask("job", "show", str(job), "--identity", USER)
    said = {name: values(span.attributes) for name, span in spans.items()}
    for attributes in said.values():
        assert (attributes["forebay.user"], attributes["forebay.pool"]) == (shown["user"], shown["pool"])
        assert attributes["forebay.revision"] > 0
    assert said[f"job {job}"]["forebay.outcome"] == "completed" == said["run"]["forebay.outcome"]
    assert said["stage-in"]["forebay.bytes"] == said["stage-out"]["forebay.bytes"] == 1000
    assert said["run"]["forebay.node"] == said["stage-in"]["forebay.node"] == "n1"
    assert site.collector.resources[0]["service.name"] == "forebay"


def test_traces_contain_no_script_path_or_secret(site: Site) -> None:
    site.run(job_of(site))
    everything = "".join(map(str, site.collector.spans)) + str(site.collector.resources)
    for secret in (SECRET, "TOKEN", str(site.directory), "#DW", "data"):
        assert secret not in everything, secret


def test_the_trace_of_a_failed_job_shows_the_failure(site: Site) -> None:
    job = site.run("#!/bin/sh\nexit 3\n")
    spans = site.collector.named(job)
    assert values(spans["run"].attributes)["forebay.outcome"] == "failed"
    assert spans[f"job {job}"].status.code == spans["run"].status.code != spans["submit"].status.code


def test_a_new_leader_sends_the_remaining_traces(site: Site) -> None:
    leader = site.ask("cluster", "transfer", "--identity", "operator")["leader"]
    assert leader
    job = site.run("#!/bin/sh\ntrue\n")
    spans = [span for span in site.collector.spans if values(span.attributes)["forebay.job.id"] == job]
    assert {span.trace_id for span in spans} == {spans[0].trace_id}


def test_sighup_switches_the_trace_collector(site: Site) -> None:
    with collecting() as other:
        site.file.write_text(site.file.read_text().replace(site.collector.endpoint, other.endpoint))
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"forebay.cluster.serve" in words and str(site.file).encode() in words:
                    os.kill(int(process.name), signal.SIGHUP)
        script = site.directory / "job.sh"
        submitted = site.ask("submit", "--identity", USER, "--chdir", str(site.directory), str(script))
        until(lambda: f"job {submitted['job_id']}" in other.named(submitted["job_id"]))


def test_without_a_collector_opentelemetry_is_not_imported(tmp_path: Path) -> None:
    file = tmp_path / "site" / "forebay.toml"
    words = ("cluster", "init", str(file.parent), "--replicas=1", "--agents=1", f"--accounts={OWN}")
    subprocess.run([str(FOREBAY), *words, f"--base-port={free_ports(PORTS)[0]}"], check=True, timeout=TIMEOUT_S)
    up = subprocess.Popen(
        [str(FOREBAY), "--config", str(file), "cluster", "up"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Every started process prints its imports.
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
    )
    assert up.stdout is not None
    said = []
    for line in up.stdout:
        said.append(line)
        # The history service starts last, five seconds after the others.
        if line.rstrip().endswith("forebay.cluster.api.history_service.queries"):
            break
    up.send_signal(signal.SIGINT)
    said.append(up.communicate(timeout=TIMEOUT_S)[0])
    imported = "".join(said)
    assert "forebay.cluster.api.traces" in {line.split()[-1] for line in imported.splitlines() if line.strip()}
    assert "opentelemetry" not in imported and "forebay.cluster.api.traces.exporter" not in imported
