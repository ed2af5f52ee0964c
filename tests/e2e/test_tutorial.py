"""Commands of the tutorial in their order, compared with the output that the page shows."""

import contextlib
import os
import pwd
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Final, NamedTuple

import pytest

from tests.account import KNOWN
from tests.e2e.test_quick_start import FOREBAY, IS_ROOT, PORTS, TIMEOUT_S, place, up
from tests.ports import free_ports
from tests.repo.tree import ROOT, text_of

__all__ = ["place"]

FENCE: Final = re.compile(r"^( *)```(sh|text)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
VALUE: Final = re.compile(r"\b[0-9a-f]{8,}\b|[0-9][0-9.,:]*")
AGAIN_S: Final = 10.0
"""Seconds until a drill is planned again; states are compared once a minute after changes."""

SLOW: Final = "the goal is 500 ms"
"""Part of a drill's result on a machine that is too busy."""


class Block(NamedTuple):
    """Command of the tutorial, with the output lines that the page shows."""

    commands: str
    shown: tuple[str, ...]


def blocks() -> list[Block]:
    """Return the blocks of commands, each with the output that follows it."""
    found: list[Block] = []
    for _, kind, text in FENCE.findall(text_of(Path("docs/tutorial.md"))):
        lines = dedent(text)
        if kind == "sh":
            found.append(Block(lines, ()))
        elif not found[-1].shown:
            found[-1] = found[-1]._replace(shown=tuple(lines.splitlines()))
    return found


def words(text: str) -> list[str]:
    """Return the words of a text, with numbers, digests and times replaced by a mark."""
    return VALUE.sub("#", text).split()


def assert_shown(block: Block, output: str) -> None:
    """Compare the lines that the tutorial shows with the output of its commands."""
    known = [set(words(line)) for line in output.splitlines()]
    for line in block.shown:
        expected = line
        if line.startswith("proven:"):  # the count of a job's records may be a minute away
            expected = "proven: records of job 1"
        if SLOW in output and line.startswith("Verdict"):
            continue
        assert any(set(words(expected)) <= one for one in known), f"{line!r} is not in: {output}"


@contextlib.contextmanager
def service(command: str, directory: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a service until the block ends."""
    process = subprocess.Popen(
        shlex.split(command), cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


@pytest.mark.campaign(4)
def test_the_tutorial_shows_the_real_output(place: Path) -> None:
    account = KNOWN if IS_ROOT else pwd.getpwuid(os.geteuid()).pw_name
    environment = {
        **os.environ,
        "PATH": f"{FOREBAY.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(ROOT / ".venv"),
        "COLUMNS": "100",
    }
    environment.pop("FOREBAY_IDENTITY", None)
    as_account = f"--identity {account}" if IS_ROOT else ""
    directory = place / "demo"

    def run(commands: str, where: Path = directory) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-uc", commands], cwd=where, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    create, start, *rest = blocks()
    options = ["--base-port", str(free_ports(PORTS)[0]), *(["--user", account] if IS_ROOT else [])]
    done = run(create.commands.replace("init site", f"init site {shlex.join(options)}"), place)
    assert done.returncode == 0, done.stderr
    assert start.commands == "(cd site && forebay cluster up)\n"
    if IS_ROOT:
        directory.chmod(0o1777)  # for the job's output, and still trusted by root
        for name in ("data", "results"):
            shutil.chown(directory / name, account)
    leader = planned = ""
    with contextlib.ExitStack() as running:
        running.enter_context(up(directory / "site"))
        # Wait as long as a reader needs to open a second terminal, while the agents register.
        end_s = time.monotonic() + TIMEOUT_S
        while "2 UP" not in run("FOREBAY_CONFIG=site/forebay.toml forebay status").stdout:
            assert time.monotonic() < end_s
        for block in rest:
            commands = block.commands.replace("--name r1", f"--name {leader or 'r1'}")
            if "activate" in commands:
                continue
            if IS_ROOT:  # root submits for an account, whose job then runs as that account
                commands = commands.replace("forebay submit", f"forebay {as_account} submit")
            for name, value in re.findall(r"^export (\w+)=(.*)$", commands, re.MULTILINE):
                environment[name] = value.replace("$PWD", str(directory))
            if "run replica" in commands:
                environment_now = dict(environment)
                running.enter_context(service(commands.splitlines()[-1], directory, environment_now))
                continue
            if "drill run" in commands:
                commands = f"{planned} || [ $? = 7 ]"
            done = run(commands)
            end_s = time.monotonic() + TIMEOUT_S
            while "drill plan" in commands and "drill run" not in done.stdout + done.stderr:
                assert time.monotonic() < end_s, done.stdout + done.stderr
                time.sleep(AGAIN_S)
                run(f"env -u FOREBAY_IDENTITY forebay {as_account} submit --wait job.sh")
                done = run(commands)
            output = done.stdout + done.stderr
            if "drill plan" in commands:
                ((planned),) = re.findall(r"forebay drill run switchover .*", output)
            if "Replicas   leader" in output and not leader:
                leader = re.findall(r"leader (r\d)", output)[0]
            assert block.shown or done.returncode == 0, (commands, output)
            if not any("●" in line for line in block.shown):
                assert_shown(block, re.sub(rf"\b{account}\b", "dana", output))
    assert (directory / "drill.html").exists()
