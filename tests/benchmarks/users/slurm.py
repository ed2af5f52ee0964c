"""A real Slurm on loopback: munged, slurmctld and slurmd of Debian's packages, with a script that stages by `cp`."""

import contextlib
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forebay.cluster.slurm.checks import PLUGIN_PLACES, POLL_INTERVAL_S
from tests.benchmarks.processes import Members, ServerFailed, end_trees
from tests.benchmarks.users.site import CPUS, REAPER, USER, Files
from tests.ports import free_ports

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "sinfo")
NODES = ("n1", "n2")
START_WAIT_S = 120.0

KEY_BYTES = 128
"""Bytes of munge's key: what its own tool makes."""

CONFIGURATION = """\
ClusterName=bench
{hosts}
SlurmUser={user}
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={run}/munge/socket
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
SlurmctldDebug=error
SlurmdDebug=error
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
MaxJobCount=200000
SchedulerType=sched/backfill
SchedulerParameters=default_queue_depth=1000
BurstBufferType=burst_buffer/{plugin}
{settings}
NodeName={nodes} NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs={cpus} RealMemory=16000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
"""

SCRIPT_OF_SITE = """\
local root = "@ROOT@"
local function option(script, key)
  for line in io.lines(script) do
    local found = line:match("^#BB_LUA.*[ ]" .. key .. "=(%S+)")
    if found then return found end
  end
end
local function run(command)
  local status = os.execute(command)
  if status == 0 or status == true then return slurm.SUCCESS end
  return slurm.ERROR, command .. " failed"
end
local function place(job) return root .. "/" .. job end
function slurm_bb_job_process(script) return slurm.SUCCESS end
function slurm_bb_pools()
  return slurm.SUCCESS, '{"pools": [{"id": "fast", "quantity": 1048576, "granularity": 1048576}]}'
end
function slurm_bb_setup(job, uid, gid)
  return run("mkdir -p " .. place(job) .. " && chown " .. uid .. ":" .. gid .. " " .. place(job))
end
function slurm_bb_data_in(job, script) return run("cp " .. option(script, "in") .. " " .. place(job) .. "/in") end
function slurm_bb_test_data_in() return slurm.SUCCESS end
function slurm_bb_real_size() return slurm.SUCCESS end
function slurm_bb_paths(job, script, file)
  local f = io.open(file, "w"); f:write("BUFFER=" .. place(job) .. "\\n"); f:close()
  return slurm.SUCCESS
end
function slurm_bb_pre_run() return slurm.SUCCESS end
function slurm_bb_post_run() return slurm.SUCCESS end
function slurm_bb_data_out(job, script) return run("cp " .. place(job) .. "/out " .. option(script, "out")) end
function slurm_bb_test_data_out() return slurm.SUCCESS end
function slurm_bb_job_teardown(job) return run("rm -rf " .. place(job)) end
function slurm_bb_get_status() return slurm.SUCCESS, "" end
"""
"""burst_buffer.lua: one directory a buffer, one file in and one out by `cp`, as the controller's account."""


def missing() -> str:
    """Return why no Slurm can be measured here, as a sentence; empty if one can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"Slurm is not installed ({', '.join(absent)}); as root: apt-get install {PACKAGES}"
    if os.geteuid() != 0:
        return "Slurm is not measured: its controller and nodes run jobs of a user, which takes root"
    return ""


def poll_interval(plugin: str) -> str:
    """Return the line of burst_buffer.conf that `forebay slurm install` writes where this Slurm knows the key."""
    places = (path for pattern in PLUGIN_PLACES for path in Path("/").glob(pattern.lstrip("/")))
    plugins = [path / f"burst_buffer_{plugin}.so" for path in places]
    knows = any(b"PollInterval" in path.read_bytes() for path in plugins if path.exists())
    return f"PollInterval={POLL_INTERVAL_S}\n" if knows else ""


def version() -> str:
    """Return what sbatch says that it is."""
    return subprocess.run(["sbatch", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def cgroup_settings(slurmd: str) -> str:
    """Return cgroup.conf for a slurmd: empty where it is older than 24.11 and needs none.

    A newer slurmd exits where the kernel has controllers of both versions of cgroups, though no plugin uses them.
    """
    shown = subprocess.run([slurmd, "-V"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", shown)
    newer = found is not None and (int(found[1]), int(found[2])) >= (24, 11)
    return "CgroupPlugin=disabled\n" if newer else ""


def job_script(files: Files, name: str) -> str:
    """Return the job that Forebay's `job_script` is, in this site's words."""
    return f"""#!/bin/sh
#SBATCH --job-name={name} --output=/dev/null
#BB_LUA pool=fast capacity=1MiB in={files.source} out={files.results}/{name}
cp "$BUFFER/in" "$BUFFER/out"
"""


class SlurmSite(Members):
    """A fresh Slurm; `nodes` False: nodes that never answer, so no job starts; `script`: its burst_buffer.lua;
    `buffers`: the text of its burst_buffer.conf; `settings`: further lines of slurm.conf; `preload`: more variables of
    slurmctld alone; `user`: SlurmUser.
    """

    name = "slurm"
    hosts = "SlurmctldHost=localhost(127.0.0.1)"

    def __init__(
        self,
        directory: Path,
        *,
        nodes: bool = True,
        script: str = SCRIPT_OF_SITE,
        plugin: str = "lua",
        buffers: str | None = None,
        settings: str = "",
        preload: Mapping[str, str] | None = None,
        user: str = "root",
    ) -> None:
        super().__init__()
        self._settings = settings
        self._user = pwd.getpwnam(user)
        self._plugin = plugin
        self._buffers_file = (buffers or "StageInTimeout=86400\n") + poll_interval(plugin)
        self._script = script
        self.preload = dict(preload or {})
        self._directory = directory.absolute()
        self._nodes = NODES if nodes else ()
        self._results = self._directory.with_name(f"{directory.name}-files")
        self.files = Files(self._results)
        self.account = pwd.getpwnam(USER)
        self.environment = {
            **os.environ,
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin",
            "SLURM_CONF": str(self._directory / "slurm.conf"),
        }

    def start(self) -> None:
        """Start everything; return when the controller answers and all nodes that run are idle."""
        run = self._directory
        for place in ("munge", "state", "spool", "buffers", *(f"spool/{name}" for name in NODES)):
            (run / place).mkdir(mode=0o755, parents=True, exist_ok=True)
        (run / "munge").chmod(0o711)
        for place in (run, self.state):
            os.chown(place, self._user.pw_uid, self._user.pw_gid)
        key = run / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(KEY_BYTES))
        ports = free_ports(2 + len(NODES))
        (run / "slurm.conf").write_text(
            CONFIGURATION.format(
                run=run,
                port=ports[0],
                node_port=ports[1],
                first_port=ports[2],
                last_port=ports[-1],
                cpus=CPUS,
                nodes=f"n[1-{len(NODES)}]",
                plugin=self._plugin,
                hosts=self.hosts,
                settings=self._settings,
                user=self._user.pw_name,
            )
        )
        slurmd = shutil.which("slurmd", path=self.environment["PATH"])
        if cgroups := cgroup_settings(slurmd or "slurmd"):
            (run / "cgroup.conf").write_text(cgroups)
        (run / "burst_buffer.conf").write_text(self._buffers_file)
        (run / "burst_buffer.lua").write_text(self._script.replace("@ROOT@", str(run / "buffers")))
        options = [f"--{name}-file={run}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        self._launch("munged", "--foreground", "--force", f"--socket={run}/munge/socket", "--num-threads=4", *options)
        self._wait("munged's socket", (run / "munge" / "socket").exists)
        self._launch_controllers()
        for name in self._nodes:
            self._launch("slurmd", "-D", "-f", str(run / "slurm.conf"), "-N", name)
        self._wait("slurmctld and idle nodes", self._ready)

    def _launch_controllers(self) -> None:
        self._launch_primary()

    def _launch_primary(self) -> None:
        self._launch("slurmctld", "-D", "-f", str(self._directory / "slurm.conf"))

    def _launch(self, program: str, *options: str, name: str = "", within: Sequence[str] = ()) -> None:
        """Start a program, `within` another's command line; `name` is what it is called here."""
        found = shutil.which(program, path=self.environment["PATH"])
        if found is None:
            raise ServerFailed(missing())
        more = [f"{key}={value}" for key, value in self.preload.items()] if program == "slurmctld" else []
        command = [*REAPER, *within, *(["env", *more] if more else []), found, *options]
        name = name or (f"{program}-{options[-1]}" if program == "slurmd" else program)
        self._processes.start(name, command, self._directory / f"{name}.output")

    def controller(self, name: str = "slurmctld") -> int:
        """Return the pid of slurmctld, or of its backup."""
        reaper = self._processes.process(name)
        children = Path(f"/proc/{reaper.pid}/task/{reaper.pid}/children").read_text().split()
        return int(children[0])

    def end_controller(self, number: int, name: str = "slurmctld") -> None:
        """End slurmctld, or its backup, by a signal, and wait for its end."""
        reaper = self._processes.process(name)
        os.kill(self.controller(name), number)
        reaper.wait()
        self._processes.end(name)

    def end_node(self, name: str) -> None:
        """Kill a slurmd and all that it runs, as a node that loses its power."""
        reaper = self._processes.process(f"slurmd-{name}")
        end_trees([reaper.pid])
        reaper.wait()
        self._processes.end(f"slurmd-{name}")

    def node_again(self, name: str) -> None:
        """Start the slurmd of a node that was ended."""
        self._processes.again(f"slurmd-{name}")

    def configure_buffers(self, more: str) -> None:
        """Add lines to burst_buffer.conf; slurmctld reads it when it starts."""
        (self._directory / "burst_buffer.conf").write_text(self._buffers_file + more)

    @property
    def state(self) -> Path:
        """StateSaveLocation."""
        return self._directory / "state"

    def wipe_state(self) -> None:
        """Replace StateSaveLocation by an empty directory of SlurmUser."""
        old = self.state.with_name("state.old")
        self.state.rename(old)  # a bridge that runs writes into it at any time
        self.state.mkdir(mode=0o755)
        os.chown(self.state, self._user.pw_uid, self._user.pw_gid)
        shutil.rmtree(old)

    def controller_again(self) -> None:
        """Start slurmctld on its state, with what `preload` says now; return when it answers."""
        self._launch_primary()
        self._wait("slurmctld", lambda: self.ask("squeue", "-h").returncode == 0)

    def _ready(self) -> bool:
        asked = self.ask("sinfo", "-h", "-o", "%T %D")
        idle = sum(int(line.split()[1]) for line in asked.stdout.splitlines() if line.startswith("idle "))
        return asked.returncode == 0 and idle >= len(self._nodes)

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_WAIT_S
        while not is_there():
            self.check()
            if time.monotonic() > deadline:
                raise ServerFailed(f"Slurm: no {what} after {START_WAIT_S:g} s")
            time.sleep(0.1)

    def ask(self, *command: str, script: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run one of Slurm's commands as the user."""
        return subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            cwd="/",
            user=self.account.pw_uid,
            group=self.account.pw_gid,
            extra_groups=[],
        )

    def submit(self, name: str) -> None:
        """Submit one job by sbatch; ServerFailed if it is refused."""
        done = self.ask("sbatch", script=job_script(self.files, name))
        if done.returncode != 0:
            raise ServerFailed(f"sbatch: {done.stderr.strip()}")

    def buffers(self) -> int:
        """Return how many buffers there are."""
        return len(os.listdir(self._directory / "buffers"))

    def jobs(self) -> int:
        """Return how many jobs the controller has."""
        return len(self.ask("squeue", "-h", "-t", "all", "-o", "%i").stdout.splitlines())

    def stop(self) -> None:
        """End all servers, and remove their data and that of the jobs."""
        self._processes.stop()
        for place in (self._directory, self._results):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(place)
