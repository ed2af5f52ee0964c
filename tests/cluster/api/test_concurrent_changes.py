"""Several operators change one record at once, each with the command line: all changes are in it afterwards."""

import asyncio
import subprocess
import sys
from pathlib import Path

from forebay.cluster.client import Client
from forebay.cluster.schemas import operations as ops
from tests.cluster.harness import Harness, story
from tests.cluster.test_serve import make


@story
async def test_operators_who_change_different_limits_at_once_lose_none(tmp_path: Path) -> None:
    config = make(tmp_path / "site", 1)
    limits = [f"GrpBB:bb/p{number}=1GiB" for number in range(6)]
    async with Harness(config):
        line = [sys.executable, "-m", "forebay.cluster.cli", "--config", str(config.file), "--identity", "operator"]
        words = ("policy", "account", "set", "physics", "--limit")
        ended = await asyncio.gather(
            *(asyncio.to_thread(subprocess.run, [*line, *words, one], capture_output=True) for one in limits)
        )
        assert [one.returncode for one in ended] == [0] * len(limits), [one.stderr for one in ended]
        async with Client.from_config(config, "operator") as client:
            (account,) = (await client.call(ops.LIST_ACCOUNTS)).accounts
    assert account.limits == dict(limit.split("=") for limit in limits)
