"""Quick start of the README as the account that runs the tests, and the files that its job could read."""

import contextlib
import os
import pwd
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.account import KNOWN
from tests.faults.attacks.jobs import SECRET_VARIABLE, TRIES, private
from tests.ports import free_ports
from tests.repo.tree import text_of

FOREBAY = Path(sys.executable).with_name("forebay")
PORTS = 14
TIMEOUT_S = 120
"""Seconds that a step may take: a bound against hanging."""

IS_ROOT = os.geteuid() == 0


@pytest.fixture
def place() -> Iterator[Path]:
    # Do not use pytest's directory, which other users cannot traverse.
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


def quick_start() -> list[str]:
    """Return the blocks of commands in the README's quick start."""
    section = text_of(Path("README.md")).partition("## Quick start\n")[2].partition("\n## ")[0]
    blocks = [dedent(block) for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)]
    return [block.strip("\n") for block in blocks]


@contextlib.contextmanager
def up(site: Path) -> Iterator[None]:
    """Run the README's cluster until the block ends."""
    cluster = subprocess.Popen(
        [str(FOREBAY), "cluster", "up"], cwd=site, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert cluster.stdout is not None
        assert any("Ready:" in line for line in cluster.stdout)
        reader = threading.Thread(target=cluster.stdout.read, daemon=True)
        reader.start()
        yield
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(TIMEOUT_S)


def test_the_readme_quick_start_gives_the_documented_sum(place: Path) -> None:
    create, submit, *_, more = quick_start()
    account = KNOWN if IS_ROOT else pwd.getpwuid(os.geteuid()).pw_name
    create, _, start = create.rpartition("\n")
    assert start.partition("#")[0].strip() == "cd site && forebay cluster up"
    options = ["--base-port", str(free_ports(PORTS)[0]), *(["--user", account] if IS_ROOT else [])]
    create = create.replace("cluster init site", f"cluster init site {shlex.join(options)}")
    # Root submits on behalf of an account, so the job runs as that account.
    submit = submit.replace("forebay submit", f"forebay --identity {account} submit") if IS_ROOT else submit
    submit, _, show = submit.rpartition("\n")
    expected = show.partition("#")[2].split(",")[0].strip()
    environment = {**os.environ, "PATH": f"{FOREBAY.parent}:{os.environ['PATH']}"}
    environment.pop("FOREBAY_IDENTITY", None)

    def run(script: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", script], cwd=place, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        seen = "".join(path.read_text() for path in place.glob("*.out"))
        assert done.returncode == 0, (script, done.stdout, done.stderr, seen)
        return done.stdout

    run(create)
    if IS_ROOT:
        place.chmod(0o1777)  # for the job's output, and still trusted by root
        for name in ("data", "results"):
            shutil.chown(place / name, account)
    with up(place / "site"):
        run(submit)
        until_s = time.monotonic() + TIMEOUT_S
        while not (place / "results/sum.txt").exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert run(show).strip() == expected
        environment["FOREBAY_CONFIG"] = str(place / "site/forebay.toml")
        for command in more.splitlines():
            if not command.startswith("forebay drill plan"):  # needs helpers
                run(f"{command.partition('#')[0]} || [ $? = 1 ]" if "status" in command else command)
        assert (place / "page.html").exists()
    assert (place / "results/sum.txt").read_text() == "500500\n"


def test_the_quick_start_as_root_reads_only_public_files(place: Path) -> None:
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
            # The job can traverse the directories above its buffer, but not list or change them.
            assert tried[1:-1] == []
            keys = [path for path in found if path.suffix == ".key"]
            assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.communicate(timeout=TIMEOUT_S)
