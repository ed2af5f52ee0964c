"""Complete site on loopback: replicas, movers of a shared filesystem, a bridge, and a real Slurm of two nodes.

All processes, TLS and Slurm are real. Needs root, because data is moved as the jobs' user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from forebay.cluster.client import Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.jobs import JobView
from forebay.cluster.slurm import programs, script_text, submission_check
from forebay.cluster.slurm.install import SUBMISSION_CHECK
from tests.account import KNOWN
from tests.benchmarks.users.slurm import SlurmSite, missing
from tests.faults.local_cluster import REPLICAS, LocalCluster, RunFailed
from tests.slurm.controllers import BACKUP, TwoControllers, on_host
from tests.slurm.gates import FUNCTIONS
from tests.slurm.slurm import SETTINGS, Seen, Submitted

GRAIN = 2**20
POOL_GRAINS = 20
MOVERS = ("n1", "n2")
MEMORY = Path("/dev/shm")
START_S = 120.0
REFUSED_S = 240.0
"""Seconds within which a bridge that may not be one has ended."""

_JOB_SUBMIT = """\
local check_buffer = dofile("{check}")
function slurm_job_submit(job, partitions, uid) return check_buffer(job) end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
"""

_PLUGINS = {"lua": "#BB_LUA", "datawarp": "#DW"}

__all__ = ["GRAIN", "POOL_GRAINS", "REPLICAS", "RunFailed", "Seen", "Site", "missing"]


class Outcome(NamedTuple):
    """How a row of the campaign ended; `cause` is empty where it passed."""

    row: str
    cause: str = ""


class Site(Submitted):
    """One such site in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        *,
        plugin: str = "lua",
        grains: int = POOL_GRAINS,
        gates: bool = True,
        backup: bool = False,
        checked: bool = False,
        rows: Iterable[str] = (),
        user: str = "root",
        settings: str = "",
    ) -> None:
        """`gates`: calls of Slurm can be stopped on their way; `backup`: slurmctld has one; `checked`: with lua its
        job_submit.lua calls the check that `install` writes; `rows`: which parts of an exercise that has several are
        done, none: all; `user`: SlurmUser, as whom the bridge runs, too;
        `settings`: further lines of slurm.conf.
        """
        super().__init__(directory)
        self.plugin = plugin
        self.grains = grains
        self.rows = frozenset(rows)
        self.outcomes: list[Outcome] = []
        self._user = pwd.getpwnam(user)
        self.cluster = LocalCluster(directory / "site", user=KNOWN)
        self.filesystem = directory / "bb"
        # In memory, as /run is: its files are made and removed many times a job.
        self._memory = MEMORY / directory.name
        self.run = self._memory / "run"
        self._helpers = directory / "helpers"
        self._metrics = directory / "metrics"
        self._gated = gates
        self._checked = checked and plugin == "lua"
        settings = SETTINGS + settings + ("JobSubmitPlugins=lua\n" if self._checked else "")
        buffers = None if plugin == "lua" else self._datawarp()
        if backup:
            self.slurm: SlurmSite = TwoControllers(
                directory / "slurm",
                script=self._script(),
                plugin=plugin,
                buffers=buffers,
                settings=settings,
                run=self.run,
                user=user,
            )
        else:
            self.slurm = SlurmSite(
                directory / "slurm",
                script=self._script(),
                plugin=plugin,
                buffers=buffers,
                settings=settings,
                user=user,
            )
        self._more: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: set[str] = set()

    # From nothing to a first idle node

    def _script(self) -> str:
        text = script_text(self.run)
        return text + self.gates.around(FUNCTIONS) if self._gated else text

    def _datawarp(self) -> str:
        programs = f"GetSysState={self._helpers}/dw_wlm_cli\nGetSysStatus={self._helpers}/dwstat\n"
        # A job was held once since `paths` waited for longer at its gate, on a busy machine, than the default of 5 s.
        return f"{programs}StageInTimeout=86400\nValidateTimeout=60\nFlags=EnablePersistent\n"

    def _write_helpers(self) -> None:
        """Write what Slurm runs, with the line that `install` writes, behind gates."""
        self.gates.make()
        self._helpers.mkdir(exist_ok=True)
        for name, text in programs(self.run).items():
            path = self._helpers / name
            if self._gated:
                self.gates.program(path, text)
            else:
                path.write_text(text)
                path.chmod(0o755)

    def found(self) -> None:
        """Write the cluster's configuration, its certificates, the shared filesystem, and what jobs read."""
        super().found()
        self._memory.mkdir()
        self._metrics.mkdir()
        # As at a real site the bridge has its word in StateSaveLocation, which is there before slurmctld starts.
        for path, mode in ((self.filesystem, 0o711), (self.slurm.state, 0o755)):
            path.mkdir(parents=True)
            path.chmod(mode)
        self.cluster.found({"fast": f"{self.grains}MiB/1MiB,default"}, "1GiB", accounts="switch")
        text = self.cluster.file.read_text()
        filesystem = f'[[filesystem]]\nname = "bb"\npath = "{self.filesystem}"\n\n[[pool]]\nfilesystem = "bb"\n'
        text = text.replace("[[pool]]\n", filesystem, 1)
        text = re.sub(r"sources = .*", f'sources = ["{self.input}"]', text)
        text = re.sub(r"destinations = .*", f'destinations = ["{self.results}"]', text)
        tls = str(self.directory / "site" / "tls")
        self.cluster.file.write_text(text)
        self.cluster.forebay("pool", "filesystem", "mark", str(self.filesystem))
        self.cluster.forebay("cert", "issue", "slurm", "--role", "scheduler", "--into", tls)
        self._write_helpers()
        self._let_slurm_user_in()
        if self._checked:
            check = self.slurm.state.with_name(SUBMISSION_CHECK)
            check.write_text(submission_check("BB_LUA"))
            check.with_name("job_submit.lua").write_text(_JOB_SUBMIT.format(check=check))

    def _let_slurm_user_in(self) -> None:
        """Give SlurmUser what is its own: a configuration with the bridge's certificate (docs/slurm/install.md),
        and the directories that its programs write to.
        """
        if self._user.pw_uid == 0:
            return
        text, tls = self.cluster.file.read_text(), self.cluster.directory / "tls"
        self._bridge_file.parent.mkdir()
        for name in ("ca.pem", "slurm.pem", "slurm.key"):
            shutil.copy(tls / name, self._bridge_file.with_name(name))
        self._bridge_file.write_text(text.replace('"tls/ca.pem"', '"ca.pem"').replace('"tls"', '"."'))
        for path in (self._memory, self.slurm.state, self.gates.directory, self._metrics, self._bridge_file.parent):
            for one in (path, *path.iterdir()):
                os.chown(one, self._user.pw_uid, self._user.pw_gid)

    @property
    def _bridge_file(self) -> Path:
        """Return the configuration that the bridge reads."""
        return self.cluster.file if self._user.pw_uid == 0 else self.directory / "etc" / "forebay.toml"

    async def start(self) -> None:
        """Start everything; return when a buffer job could be submitted."""
        self.found()
        for name in REPLICAS:
            self.cluster.start(name)
        for name in MOVERS:
            self.start_mover(name)
        async with asyncio.timeout(START_S):
            async with self.client(deadline_s=START_S) as client:
                while True:
                    filesystems = (await client.call(ops.LIST_FILESYSTEMS)).filesystems
                    if filesystems and len(filesystems[0].movers_up) == len(MOVERS):
                        break
                    await asyncio.sleep(0.1)
            # Slurm's own burst_buffer.conf says so, too; with lua it asks for none.
            await asyncio.to_thread(self.cluster.forebay, "config", "set", "Flags=EnablePersistent")
            self.start_bridge()
            while not all((run / "pools.json").exists() for run in self.runs().values()):
                self.check()
                await asyncio.sleep(0.05)
        await asyncio.to_thread(self.slurm.start)

    def stop(self) -> None:
        """End every process that was started here."""
        # A bridge writes into StateSaveLocation, which is removed with Slurm.
        for name in self.runs():
            if name in self._more:
                self.signal(name, signal.SIGCONT)
                self.signal(name, signal.SIGTERM)
        with contextlib.suppress(FileNotFoundError):
            # Slurm's directory is removed, and a run that failed is explained by its output.
            shutil.copy(self.directory / "slurm" / "slurmctld.output", self.directory)
            self.slurm.stop()
        for process in self._more.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        self.gates.open()
        self.cluster.stop_all()
        for process in self._more.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._memory, ignore_errors=True)

    def _start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        self._ended.discard(name)
        with (self.directory / f"{name}.log").open("ab") as log:
            self._more[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
            )

    def start_mover(self, name: str) -> None:
        """Start the agent of a mover."""
        self._start(name, self.cluster.command("run", "agent", "--name", name, "--mover"))

    def _bridge(self, state: Path, run: Path) -> list[str]:
        words = ["--config", str(self._bridge_file), "--name", "slurm", "--state", str(state), "--run", str(run)]
        account = ["setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups"]
        return [*account, sys.executable, "-m", "forebay.cluster.slurm", *words]

    def runs(self) -> dict[str, Path]:
        """Return where each bridge is, by its name here."""
        if isinstance(self.slurm, TwoControllers):
            return {"bridge": self.run, "bridge-backup": self.slurm.backup_run}
        return {"bridge": self.run}

    def start_bridge(self, *more: str) -> None:
        """Start the bridge, and that of the backup's host, with further options."""
        for name, run in self.runs().items():
            command = self._bridge(self.slurm.state, run)
            host = on_host(BACKUP) if name == "bridge-backup" else []
            metrics = ["--metrics", str(self._metrics / f"{name}.prom")]
            self._start(name, [*host, *command, *metrics, *more], self.slurm.environment)

    def pids(self) -> list[int]:
        """Return the processes of Forebay: replicas, movers, bridge."""
        return [process.pid for process in (*self.cluster.processes.values(), *self._more.values())]

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """Return the bridge or a mover."""
        return self._more[name]

    async def refused_bridge(self, state: Path | None = None, run: Path | None = None) -> tuple[int, str]:
        """Run a bridge that ends by itself, of this host unless told otherwise; return its code and what it said."""
        command = self._bridge(state or self.slurm.state, run or self.run)
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False, timeout=REFUSED_S
        )
        return done.returncode, done.stderr

    def start_agent(self, name: str) -> None:
        """Add a node to the cluster that runs scripts of Forebay's own jobs, and start its agent."""
        text = self.cluster.file.read_text()
        agent = f'[[agent]]\nname = "{name}"\ndirectory = "{name}"\ncpus = 2\naccounts = "switch"\n\n[[filesystem]]'
        self.cluster.file.write_text(text.replace("[[filesystem]]", agent, 1))
        self.cluster.forebay("cert", "issue", name, "--role", "agent")
        self.cluster.forebay("node", "admit", name)
        self._start(name, self.cluster.command("run", "agent", "--name", name))

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the bridge or a mover, and wait for the end of who is killed."""
        process = self._more[name]
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._ended.add(name)
        process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            process.wait()

    def check(self) -> None:
        """Raise RunFailed if a process has ended by itself."""
        for name, process in self._more.items():
            if process.poll() is not None and name not in self._ended:
                log = (self.directory / f"{name}.log").read_text(errors="replace").splitlines()
                raise RunFailed(f"{name} exited {process.returncode}: {' / '.join(log[-3:])}")
        if ended := self.cluster.ended():
            raise RunFailed("; ".join(ended))

    @contextlib.contextmanager
    def recorded(self, row: str) -> Iterator[None]:
        """Record how a row of the campaign ends: that it passed, or the cause of its failure, which is raised again.

        A row that consists of others, as `refusals` does, has no outcome of its own beside theirs.
        """
        known = len(self.outcomes)
        try:
            yield
        except Exception as error:
            if not any(one.cause for one in self.outcomes[known:]):
                self.outcomes.append(Outcome(row, str(error).replace(str(self.directory), "DIRECTORY")))
            raise
        if len(self.outcomes) == known:
            self.outcomes.append(Outcome(row))

    # Forebay's side

    def client(self, *, deadline_s: float = 10.0) -> Client:
        """Return an operator's client."""
        return self.cluster.client(deadline_s=deadline_s)

    async def leader(self, client: Client) -> str:
        """Return the name of the leader."""
        members = await client.call(ops.LIST_MEMBERS, deadline_s=30)
        return next(member.name for member in members.members if member.role == "leader")

    async def external_jobs(self, client: Client) -> dict[str, JobView]:
        """Return all external jobs by the number of their job."""
        jobs = (await client.call(ops.LIST_JOBS, external_jobs="yes", deadline_s=30)).jobs
        return {str(job.external_job).partition(":")[2]: job for job in jobs}

    async def newest(self, client: Client) -> int:
        """Return the number of the newest external job, 0 where there is none."""
        return max((job.job_id for job in (await self.external_jobs(client)).values()), default=0)

    async def written_in(self, client: Client, jobs: Iterable[str], *, since: int = 0) -> dict[str, int]:
        """Return how many bytes stage-ins of jobs of Slurm have written, in all attempts of all epochs, but for those
        that had run when Slurm began the job anew.

        Of external jobs that are newer than `since`: a slurmctld that forgets jobs gives their numbers to others.
        """
        written = dict.fromkeys(jobs, 0)
        listed = (await client.call(ops.LIST_JOBS, external_jobs="yes", deadline_s=30)).jobs
        last: dict[str, int] = {}
        for one in listed:
            last[str(one.external_job)] = max(one.epoch or 0, last.get(str(one.external_job), 0))
        for one in listed:
            job = str(one.external_job).partition(":")[2]
            ran_before = one.start_time is not None and one.epoch != last[str(one.external_job)]
            if job in written and one.job_id > since and not ran_before:
                answer = await client.call(ops.LIST_RECEIPTS, id=one.job_id, stage="stage_in", deadline_s=30)
                written[job] += sum(receipt.written_bytes for receipt in answer.receipts)
        return written

    async def discard_retained(self, client: Client) -> int:
        """Remove retained buffers, as an operator would; return their number."""
        listed = (await client.call(ops.LIST_JOBS, external_jobs="yes", deadline_s=30)).jobs
        retained = [one.job_id for one in listed if one.phase == "retained"]
        for number in retained:
            await asyncio.to_thread(self.cluster.forebay, "buffer", "clear", str(number), "--discard", "--yes")
        return len(retained)

    def left(self) -> list[str]:
        """Return the buffers that are in the shared filesystem."""
        found = [path for path in self.filesystem.glob("*/*") if path.parent.name != ".forebay-records"]
        return sorted(path.name for path in found)

    def space(self, grains: int) -> str:
        """Return the directive that asks for so many MiB."""
        if self.plugin == "lua":
            return f"#BB_LUA pool=fast capacity={grains}MiB"
        return f"#DW jobdw pool=fast capacity={grains}MiB access_mode=striped type=scratch"

    def script(self, name: str, *body: str, grains: int = 1, lines: Iterable[str] = ()) -> str:
        """Return a job that stages `name` in and what it makes of it out; `lines` are further directives' texts."""
        word, space = _PLUGINS[self.plugin], self.space(grains)
        moves = [
            f"stage_in type=file source={self.input}/{name} destination=$DW_JOB_STRIPED/in",
            f"stage_out type=file source=$DW_JOB_STRIPED/out destination={self.results}/{name}",
            *lines,
        ]
        work = body or ("cp $DW_JOB_STRIPED/in $DW_JOB_STRIPED/out",)
        return "\n".join(("#!/bin/sh", "#SBATCH -o /dev/null", space, *(f"{word} {move}" for move in moves), *work, ""))
