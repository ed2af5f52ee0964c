"""Forebay as a site runs it: three replicas with channels, agents on nodes, and one user's jobs with a buffer each."""

import asyncio
import getpass
import os
import pwd
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from forebay.cluster.client import Client
from forebay.cluster.schemas import SubmitRequest, operations
from tests.account import KNOWN
from tests.benchmarks.forebay import START_WAIT_S
from tests.benchmarks.pipelined import ChannelCluster
from tests.benchmarks.processes import ServerFailed

USER = KNOWN if os.geteuid() == 0 else getpass.getuser()
"""Who submits: root's agents switch to an account that every machine has, others run jobs as themselves."""

FILE_BYTES = 100_000
"""Bytes staged in and out by a job."""

CPUS = 8
"""CPUs of each node, of either system: so many small jobs may run at once."""

REAPER = [sys.executable, "-m", "tests.benchmarks.users.reaper"]


class Files:
    """What a run's jobs read and write."""

    def __init__(self, directory: Path) -> None:
        self.source = directory / "source"
        self.results = directory / "results"
        for place in (directory, self.results):
            place.mkdir(mode=0o755, exist_ok=True)
        self.source.write_bytes(os.urandom(FILE_BYTES))
        if os.geteuid() == 0:
            account = pwd.getpwnam(USER)
            for path in (self.source, self.results):
                os.chown(path, account.pw_uid, account.pw_gid)

    def finished(self) -> int:
        """Return how many results are there whole."""
        # By name, since what is half there goes while one looks.
        return sum(self.is_finished(name) for name in os.listdir(self.results))

    def is_finished(self, name: str) -> bool:
        """Say whether one result is there whole."""
        try:
            return (self.results / name).stat().st_size == FILE_BYTES
        except FileNotFoundError:
            return False


def job_script(files: Files, name: str) -> str:
    """Return a job that stages its file in, copies it within its buffer, and stages the copy out as `name`."""
    return f"""#!/bin/sh
#SBATCH --job-name={name}
#DW jobdw type=scratch access_mode=striped capacity=1MiB pool=fast
#DW stage_in type=file source={files.source} destination=$DW_JOB_STRIPED/in
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination={files.results}/{name}
cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out"
"""


class ForebaySite(ChannelCluster):
    """A fresh cluster with its agents, each process below a reaper."""

    name = "forebay"
    user = USER
    agents: Sequence[str] = ("n1", "n2")
    cpus = CPUS
    accounts = "switch" if os.geteuid() == 0 else "own"
    parent = REAPER

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._results = directory.absolute().with_name(f"{directory.name}-files")
        self.files = Files(self._results)

    async def start(self) -> None:
        """Start replicas and agents; return when all nodes are up."""
        await super().start()
        deadline = time.monotonic() + START_WAIT_S
        async with self.client() as client:
            while True:
                nodes = (await client.call(operations.LIST_NODES)).nodes
                if sum(node.state == "UP" for node in nodes) >= len(self.agents):
                    return
                self.check()
                if time.monotonic() > deadline:
                    raise ServerFailed(f"not all agents registered within {START_WAIT_S:g} s: {nodes}")
                await asyncio.sleep(0.1)

    def client(self) -> Client:
        """Return a client of the cluster as the user."""
        return Client.from_config(self.config, self.user)

    def forebay(self, *words: str) -> list[str]:
        """Return the command line of `forebay` as the user types it."""
        config = str(self._directory / "forebay.toml")
        return [str(Path(sys.executable).with_name("forebay")), "--config", config, "--identity", self.user, *words]

    async def submit(self, client: Client, name: str) -> int:
        """Submit one job, and return its number."""
        request = SubmitRequest(
            command_id=await client.next_command_id(),
            script=job_script(self.files, name),
            output="/dev/null",
            time_limit_s=600,
            workdir=str(self.files.results),
        )
        return (await client.call(operations.SUBMIT_JOB, request)).job_id

    def stop(self) -> None:
        """End all servers, and remove their data and that of the jobs."""
        super().stop()
        shutil.rmtree(self._results, ignore_errors=True)
