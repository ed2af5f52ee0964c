"""The quick start of the README, as whoever runs the tests: a job runs, and what it could read is said."""

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.account import KNOWN
from tests.faults.attacks.jobs import SECRET_VARIABLE, TRIES, private
from tests.ports import free_ports

FOREBAY = Path(sys.executable).with_name("forebay")
PORTS = 14
TIMEOUT_S = 120
"""Seconds that a step may take: a bound against hanging."""

IS_ROOT = os.geteuid() == 0


@pytest.fixture
def place() -> Iterator[Path]:
    # Not below pytest's own directory, which is closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="forebay-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def typed(*words: str, directory: Path, config: Path | None = None) -> str:
    environment = {**os.environ, **({"FOREBAY_CONFIG": str(config)} if config else {})}
    del environment["FOREBAY_IDENTITY"]
    done = subprocess.run(
        [str(FOREBAY), *words], cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def test_the_quick_start_runs_a_job_which_as_root_reads_nothing_but_what_is_public(place: Path) -> None:
    user = pwd.getpwnam(KNOWN) if IS_ROOT else pwd.getpwuid(os.geteuid())
    data, site = place / "data", place / "site"
    data.mkdir()
    os.chown(data, user.pw_uid, user.pw_gid)
    words = ["--pool", "fast=1GiB/16MiB,default", "--source-root", "data", "--destination-root", "data"]
    base = str(free_ports(PORTS)[0])
    typed("cluster", "init", "site", *words, "--user", user.pw_name, "--base-port", base, directory=place)
    cluster = subprocess.Popen(
        [str(FOREBAY), "cluster", "up"], cwd=site, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, SECRET_VARIABLE: "secret"},
    )  # fmt: skip
    try:
        assert cluster.stdout is not None
        said: list[str] = []
        for line in cluster.stdout:
            said.append(line)
            if "Ready:" in line:
                break
        assert "Ready:" in said[-1], said
        file = site / "forebay.toml"
        (data / "job.sh").write_text(TRIES)
        found = private(site)
        assert {"tls", "ca.key", "operator.key", "n1.key", "r1.key", "r1", "data.mdb"} <= {path.name for path in found}
        (data / "private").write_text("".join(f"{path}\n" for path in found))
        assert "leader" in typed("cluster", "members", directory=data, config=file)
        typed("--identity", user.pw_name, "submit", "job.sh", directory=data, config=file)
        for line in cluster.stdout:
            said.append(line)
            if "job 1: run attempt 1 ended" in line or "ended with exit code" in line:
                break
        tried = (data / "tried").read_text().splitlines()
        assert (tried[0], tried[-1]) == (str(user.pw_uid), "over")
        if IS_ROOT:
            # What it has to pass on the way to its own buffer may be read by name, and not listed or changed.
            assert tried[1:-1] == []
            keys = [path for path in found if path.suffix == ".key"]
            assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.communicate(timeout=TIMEOUT_S)
