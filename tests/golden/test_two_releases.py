"""Replicas of an earlier release and of this one agree while commands of all kinds come, whichever of them leads.

Only with FOREBAY_EARLIER_TREE=DIRECTORY, where a tree of that release is: `git archive COMMIT | tar -x -C DIRECTORY`.
What the earlier one does not know is refused meanwhile; nothing that it cannot read is written before the level is
raised. FOREBAY_SEED chooses other commands.
"""

import asyncio
import collections
import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from forebay.cluster.client import Client
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import accounts as a
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas import requests as r
from forebay.cluster.schemas.job_fields import SubmitRequest, UpdateRequest
from forebay.replica.messages import features
from tests.cluster.harness import PLAIN, SCRIPT, story
from tests.cluster.test_serve import make, ready
from tests.golden.make_ledger import REPLICAS
from tests.golden.test_rolling_restart import EARLIER_TREE, STAND_IN, Skewed, ending, to, to_level

CREATES = "#!/bin/sh\n#BB create_persistent name={} capacity=8MiB access_mode=striped type=scratch\ntrue\n"
USES = "#!/bin/sh\n#DW persistentdw name={}\ntrue\n"

pytestmark = pytest.mark.skipif(EARLIER_TREE is None, reason="FOREBAY_EARLIER_TREE names no tree of an earlier release")


class Workload:
    """Commands of two people, drawn from one seed; refusals are counted, and are no failures."""

    def __init__(self, rng: random.Random, alice: Client, operator: Client, workdir: Path) -> None:
        self._rng = rng
        self._alice, self._operator = alice, operator
        self._workdir = workdir
        self._jobs: list[int] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()

    async def run(self, count: int) -> None:
        for _ in range(count):
            kind = self._rng.choice(KINDS)
            try:
                await kind(self)
                self.done[kind.__name__] += 1
            except ApiError as error:
                self.refused[f"{kind.__name__}: {error.code}"] += 1

    async def plain(self) -> None:
        await self._submit(PLAIN, hold=self._rng.random() < 0.5)

    async def with_a_buffer(self) -> None:
        await self._submit(SCRIPT)

    async def that_creates(self) -> None:
        await self._submit(CREATES.format(f"p{self._rng.randrange(4)}"), who=self._operator)

    async def that_uses(self) -> None:
        await self._submit(USES.format(f"p{self._rng.randrange(4)}"))

    async def array(self) -> None:
        await self._submit(PLAIN, array="1-3%2")

    async def dependent(self) -> None:
        kind = self._rng.choice(("afterok", "afterany", "afterburstbuffer"))
        await self._submit(SCRIPT, dependencies=(f"{kind}:{self._job()}",))

    async def singleton(self) -> None:
        await self._submit(PLAIN, name="alone", dependencies=("singleton",))

    async def cancel(self) -> None:
        await self._alice.call(ops.CANCEL_JOB, id=self._job())

    async def hold(self) -> None:
        await self._alice.call(ops.HOLD_JOB, id=self._job())

    async def release(self) -> None:
        await self._alice.call(ops.RELEASE_JOB, id=self._job())

    async def requeue(self) -> None:
        await self._alice.call(ops.REQUEUE_JOB, id=self._job())

    async def update(self) -> None:
        request = UpdateRequest(command_id=self._alice.new_command_id(), nice=self._rng.randrange(9))
        await self._alice.call(ops.UPDATE_JOB, request, id=self._job())

    async def licences(self) -> None:
        request = a.LicenseRequest(command_id=self._operator.new_command_id(), total=self._rng.randrange(1, 9))
        await self._operator.call(ops.SET_LICENSE, request, name="matlab")

    async def drain(self) -> None:
        request = r.DrainRequest(command_id=self._operator.new_command_id(), reason="a test")
        await self._operator.call(ops.DRAIN_NODE, request, name="n1")
        await self._operator.call(ops.RESUME_NODE, name="n1")

    def _job(self) -> int:
        return self._rng.choice(self._jobs) if self._jobs else 1

    async def _submit(self, script: str, *, who: Client | None = None, **more: object) -> None:
        client = who or self._alice
        request = SubmitRequest(
            command_id=client.new_command_id(), script=script, time_limit_s=60, workdir=str(self._workdir), **more
        )  # type: ignore[arg-type]
        self._jobs.append((await client.call(ops.SUBMIT_JOB, request)).job_id)


KINDS: tuple[Callable[[Workload], Awaitable[None]], ...] = (
    Workload.plain, Workload.with_a_buffer, Workload.with_a_buffer, Workload.that_creates, Workload.that_uses,
    Workload.array, Workload.dependent, Workload.singleton, Workload.cancel, Workload.hold, Workload.release,
    Workload.requeue, Workload.update, Workload.licences, Workload.drain,
)  # fmt: skip


@contextlib.asynccontextmanager
async def agent(config: Config, tree: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay.cluster.agent", "--config", str(config.file), "--name", "n1",
        cwd=tree, stderr=asyncio.subprocess.DEVNULL, stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@story
async def test_two_releases_agree_on_every_command_whoever_leads_until_the_level_is_raised_and_after(
    tmp_path: Path,
) -> None:
    assert EARLIER_TREE is not None
    earlier = (EARLIER_TREE, "forebay.cluster.serve")
    config = make(tmp_path, 3)
    rng = random.Random(int(os.environ.get("FOREBAY_SEED", "1")))
    async with ending(Skewed(config)) as site, site.client() as operator, site.client("alice") as alice:
        work = Workload(rng, alice, operator, tmp_path)

        for name in REPLICAS:
            await site.run(name, earlier)
        await ready(operator)
        async with agent(config, EARLIER_TREE):
            await work.run(60)
            await site.agreed(operator, 0)
            for name in REPLICAS:
                await site.stop(name)
                await work.run(10)
                await site.run(name, STAND_IN)
                await site.status(operator, name, 0)
                # The first and the last: a leader of this release, and, until the last round, one of the earlier.
                for leader in (name, REPLICAS[-1]):
                    if (await operator.call(ops.LIST_MEMBERS)).leader != leader:
                        await operator.call(ops.TRANSFER_LEADERSHIP, to(leader, operator))
                    await work.run(40)
                    await site.agreed(operator, 0)
        async with agent(config, STAND_IN[0]):
            level = (
                await operator.call(ops.SHOW_FEATURE_LEVEL, replica=config.replica(REPLICAS[-1]).api)
            ).feature_level
            for higher in range(level + 1, features.FEATURE_LEVEL_KNOWN + 1):
                await operator.call(ops.RAISE_FEATURE_LEVEL, to_level(higher, operator))
                await work.run(30)
                await site.agreed(operator, 0)
        assert work.done["with_a_buffer"] > 20, (work.done, work.refused)
