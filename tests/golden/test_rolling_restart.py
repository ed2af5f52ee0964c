"""A rolling upgrade from the directories of the previous release, with real processes: in, up, and no way back.

The present code runs as the previous release, and with made-up feature levels as the one after it (tests.golden.later).
FOREBAY_EARLIER_TREE=DIRECTORY, a tree of an earlier release (see tests.golden.make_ledger), lets that very release run
where otherwise the present code stands in for it.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forebay.cluster.client import Client
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.jobs import StatusView
from forebay.cluster.schemas.requests import AddMemberRequest, FeatureLevelRequest
from forebay.cluster.serve import EXIT_RELEASE_NEEDED
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.server.test_membership import Site, members, to, voters
from tests.cluster.test_serve import ROOT, ready, request
from tests.golden.make_ledger import REPLICAS
from tests.golden.previous import EXPECTED, previous_cluster
from tests.later_release import MADE_UP

EARLIER_TREE = os.environ.get("FOREBAY_EARLIER_TREE")
STAND_IN = (str(ROOT), "forebay.cluster.serve")
EARLIER = STAND_IN if EARLIER_TREE is None else (EARLIER_TREE, "forebay.cluster.serve")
LATER = (str(ROOT), "tests.golden.later")
NEEDED = f"start release {MADE_UP[1].release} or a later one"


def to_level(level: int, client: Client) -> FeatureLevelRequest:
    return FeatureLevelRequest(command_id=client.new_command_id(), level=level)


class Skewed(Site):
    """A cluster of three whose replicas are of two releases."""

    def __init__(self, config: Config) -> None:
        self.directory = config.file.parent
        self.config = config
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.said: dict[str, list[str]] = {}
        self.reading: dict[str, asyncio.Task[None]] = {}

    async def run(self, name: str, release: tuple[str, str], *words: str) -> None:
        tree, module = release
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, "--config", str(self.config.file), "--name", name, *words,
            cwd=tree, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.processes[name], self.said[name] = process, []
        self.reading[name] = asyncio.create_task(self._read(process, self.said[name]))

    async def stop(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGTERM)
        assert (await self.ends(name))[0] == 0, self.said[name]

    async def status(self, client: Client, name: str, revision: int, *, digest: bool = False) -> StatusView:
        """Wait until a replica is in step and has applied `revision`; return what it says of itself."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(ApiError):
                    found = await client.call(
                        ops.SHOW_STATUS, replica=self.config.replica(name).api, digest=digest, deadline_s=2
                    )
                    if found.ready and found.revision >= revision:
                        return found
                await asyncio.sleep(0.05)

    async def agreed(self, client: Client, revision: int) -> list[StatusView]:
        """Wait until all replicas are at one revision, this or a later one, and their digests equal; what each says."""
        while True:
            found = [await self.status(client, name, revision, digest=True) for name in REPLICAS]
            if len({one.revision for one in found}) == 1:
                break
            # A scheduling pass, or an agent's report, came in between.
            revision = max(one.revision for one in found)
        assert len({(one.revision, one.state_digest, one.ledger_digest) for one in found}) == 1, found
        return found


@contextlib.asynccontextmanager
async def ending(site: Skewed) -> AsyncIterator[Skewed]:
    try:
        yield site
    finally:
        for process in site.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        await asyncio.gather(*site.reading.values())


async def refusal(work: object) -> ApiError:
    with pytest.raises(ApiError) as error:
        await work  # type: ignore[misc]
    return error.value


@pytest.mark.campaign(3)
@story
async def test_replicas_are_upgraded_one_by_one_the_level_is_raised_once_and_no_earlier_release_comes_back(
    tmp_path: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        config = previous_cluster(tmp_path, patch)
    async with ending(Skewed(config)) as site, site.client() as operator, site.client("alice") as alice:
        jobs: list[int] = []

        async def submitted() -> int:
            workdir = Path("/out")  # where the policy of the golden ledger lets jobs work
            job = await alice.call(ops.SUBMIT_JOB, request(alice, workdir))
            jobs.append(job.job_id)
            return job.revision

        async def all_agree(revision: int) -> set[int]:
            return {one.feature_level for one in await site.agreed(operator, revision)}

        # 1. The previous release, on what it left.
        for name in REPLICAS:
            await site.run(name, EARLIER)
        await ready(operator)
        assert await submitted() > EXPECTED["revision"]

        # 2. One after the other is stopped and started as the later release, on the same directory.
        for upgraded, name in enumerate(REPLICAS, start=1):
            await site.stop(name)
            await submitted()
            await site.run(name, LATER)
            await site.status(operator, name, await submitted())
            if upgraded == len(REPLICAS):
                break
            if (await operator.call(ops.LIST_MEMBERS)).leader != name:
                await operator.call(ops.TRANSFER_LEADERSHIP, to(name, operator))
            shown = await operator.call(ops.SHOW_FEATURE_LEVEL, replica=site.config.replica(name).api)
            assert (shown.feature_level, shown.next_level, shown.may_be_raised) == (1, 2, False)
            knows = {member.name: member.known for member in shown.members}
            assert knows == {one: MADE_UP[-1].number if one in REPLICAS[:upgraded] else 1 for one in REPLICAS}
            error = await refusal(operator.call(ops.RAISE_FEATURE_LEVEL, to_level(2, operator)))
            if error.code != "unknown_route":  # of a release that has never heard of it
                assert error.code == "wrong_state" and f"{REPLICAS[-1]} knows 1" in str(error)
            assert await all_agree(await submitted()) == {1}

        # 3. A member that does not answer may be of any release.
        leader = (await operator.call(ops.LIST_MEMBERS)).leader
        lost = next(name for name in REPLICAS if name != leader)
        await site.stop(lost)
        error = await refusal(operator.call(ops.RAISE_FEATURE_LEVEL, to_level(2, operator)))
        assert error.code == "wrong_state" and f"{lost} did not answer" in str(error)
        await site.run(lost, LATER)
        await site.status(operator, lost, await submitted())

        # 4. All know the next level: it is raised, once.
        for wrong in (1, 3):
            error = await refusal(operator.call(ops.RAISE_FEATURE_LEVEL, to_level(wrong, operator)))
            assert error.code == "wrong_state"
        raising = to_level(2, operator)
        raised = await operator.call(ops.RAISE_FEATURE_LEVEL, raising)
        assert (raised.feature_level, raised.next_level, raised.release) == (2, 3, MADE_UP[1].release)
        again = await operator.call(ops.RAISE_FEATURE_LEVEL, raising)
        assert again.feature_level == 2
        assert (await refusal(operator.call(ops.RAISE_FEATURE_LEVEL, to_level(2, operator)))).code == "wrong_state"
        assert (await refusal(alice.call(ops.RAISE_FEATURE_LEVEL, to_level(3, alice)))).code == "permission_denied"
        assert await all_agree(await submitted()) == {2}

        # 5. There is no way back: the earlier release stops, and what it stopped on is as it was.
        await site.stop(lost)
        await site.run(lost, STAND_IN)
        code, said = await site.ends(lost)
        assert code == EXIT_RELEASE_NEEDED, site.said[lost]
        assert said.startswith("forebay: revision ") and "feature level 2" in said and NEEDED in said
        assert not any("Traceback" in line for line in site.said[lost])
        await site.run(lost, LATER)
        await all_agree(await submitted())

        # 6. Nor does one of the earlier release come in: it stops at the entry that raised the level.
        peer, api = site.admit("r4")
        added = AddMemberRequest(command_id=operator.new_command_id(), name="r4", peer=str(peer), api=str(api))
        await operator.call(ops.ADD_MEMBER, added)
        await site.run("r4", STAND_IN, "--join")
        code, said = await site.ends("r4")
        assert code == EXIT_RELEASE_NEEDED, site.said["r4"]
        assert "forebay: this replica stops itself: ReleaseNeeded: revision " in said and NEEDED in said
        await site.run("r4", LATER)
        await members(operator, lambda found: any(one.startswith("r4#") for one in voters(found)))
        level_of_r4 = (await site.status(operator, "r4", await submitted())).feature_level
        assert (level_of_r4, len(jobs), sorted(set(jobs))) == (2, len(set(jobs)), jobs)
