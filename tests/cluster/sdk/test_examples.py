"""The examples of docs/use/python.md run as they are: in memory, and those of EVERYWHERE on a real replica too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forebay.testing
from forebay import AsyncClient, Client
from forebay.cluster.config.config import Config
from tests.cluster.harness import Harness, story
from tests.cluster.sdk.agent import Agent, access
from tests.repo.tree import ROOT

PAGE = (ROOT / "docs" / "use" / "python.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"^## ([^\n]+)\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

EXAMPLES = {found[1]: found[2] for found in EXAMPLE.finditer(PAGE)}
"""Heading -> program."""

SCRIPT = "".join(f"{line[4:]}\n" for line in re.findall(r"^    (?:#!?|wc ).*$", PAGE, re.MULTILINE))

EVERYWHERE = [title for title in EXAMPLES if title[:2] in ("1.", "3.", "7.")]


def test_there_are_ten_examples_and_a_test() -> None:
    assert [title.partition(".")[0] for title in EXAMPLES][:10] == [str(number) for number in range(1, 11)]
    assert len(EXAMPLES) == 11
    assert SCRIPT.startswith("#!/bin/sh\n#SBATCH")


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs_in_memory(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text(SCRIPT)
    with forebay.testing.cluster() as cluster:
        monkeypatch.setattr(Client, "connect", lambda **_: cluster.client("dana"))
        monkeypatch.setattr(AsyncClient, "connect", lambda **_: cluster.async_client("dana"))
        exec(compile(EXAMPLES[title], title, "exec"), {"__name__": "example"})  # noqa: S102
        if title != "Test your own program" and not title.startswith(("3.", "8.")):
            assert cluster.client("dana").jobs()


@story
async def test_examples_run_on_a_real_replica(config: Config) -> None:
    directory = config.file.parent / "out"
    directory.mkdir(exist_ok=True)
    (directory / "job.sh").write_text(SCRIPT.replace("1GiB", "16MiB"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert len(EVERYWHERE) == 3
    async with Harness(config):
        agent = Agent(config, "n1")
        await agent.register()

        async def work() -> None:
            while True:
                await agent.work()
                await asyncio.sleep(0.05)

        working = asyncio.create_task(work())
        for title in EVERYWHERE:
            # The replica of a test has other ports than its configuration file.
            program = EXAMPLES[title].replace("Client.connect()", f"Client.connect(**{access(config, 'alice')})")
            program = program.replace("timeout_s=60", "timeout_s=1")
            command = [sys.executable, "-c", program]
            ran = await asyncio.to_thread(
                subprocess.run, command, cwd=directory, env=environment, capture_output=True, text=True, check=False
            )
            assert ran.returncode == 0, (title, ran.stderr)
            expected = {"1.": "1 COMPLETED 0", "3.": "unknown_pool script line 2, column 25", "7.": "torn_down"}
            assert expected[title[:2]] in ran.stdout
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        await agent.close()
