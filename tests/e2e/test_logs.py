"""`forebay cluster up` with JSON logs: every line is one record with its subject."""

import json
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.account import OWN
from tests.faults.local_cluster import USER
from tests.ports import free_ports

FOREBAY = Path(sys.executable).with_name("forebay")
PORTS = 14
TIMEOUT_S = 120
"""Seconds that a step may take: a bound against hanging."""


def typed(*words: str) -> None:
    done = subprocess.run([str(FOREBAY), *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, (words, done.stdout, done.stderr)


def test_every_log_line_is_a_record_with_job_and_revision(tmp_path: Path) -> None:
    file, script = tmp_path / "site" / "forebay.toml", tmp_path / "job.sh"
    base = free_ports(PORTS)[0]
    typed("cluster", "init", str(file.parent), "--replicas=1", "--agents=1", f"--user={USER}", f"--accounts={OWN}",
          f"--base-port={base}")  # fmt: skip
    script.write_text("#!/bin/sh\ntrue\n")
    cluster = subprocess.Popen(
        [str(FOREBAY), "--config", str(file), "cluster", "up", "--log-format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    records: list[dict[str, Any]] = []
    try:
        assert cluster.stdout is not None
        for line in cluster.stdout:
            records.append(json.loads(line))
            if records[-1]["message"].startswith("Ready: "):
                break
        typed("--config", str(file), "--identity", USER, "submit", "--chdir", str(tmp_path), str(script))
        for line in cluster.stdout:
            records.append(json.loads(line))
            if "run attempt 1 ended" in records[-1]["message"]:
                break
    finally:
        cluster.send_signal(signal.SIGINT)
        rest, _ = cluster.communicate(timeout=TIMEOUT_S)
    records += map(json.loads, rest.splitlines())
    assert all(datetime.fromisoformat(record["time"]).utcoffset() is not None for record in records)
    assert all({"level", "logger", "message"} <= record.keys() for record in records)
    ended = next(record for record in records if "run attempt 1 ended" in record["message"])
    assert (ended["job"], ended["node"], ended["logger"]) == (1, "n1", "forebay.cluster.agent.activities")
    of_replica = [record for record in records if record.get("replica") == "r1"]
    assert {"term", "revision"} <= {name for record in of_replica for name in record}
    assert {record["logger"] for record in records if record.keys().isdisjoint({"node", "replica"})} <= {
        "forebay.cluster.cli.up", "forebay.cluster.gateway",
    }  # fmt: skip
