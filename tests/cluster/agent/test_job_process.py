"""What a process of a job gets, read from the kernel by a real script: the table, and nothing of the agent's."""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.system import CAPABILITIES, LIMITS, UNLIMITED, JobProcess, job_process
from forebay.replica.messages.commands import OperationDone, ScriptEnded
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import SpecialTransfers
from tests.cluster.agent.conftest import Site

NAMES: Final = {
    resource.RLIMIT_AS: "Max address space",
    resource.RLIMIT_CORE: "Max core file size",
    resource.RLIMIT_CPU: "Max cpu time",
    resource.RLIMIT_DATA: "Max data size",
    resource.RLIMIT_FSIZE: "Max file size",
    resource.RLIMIT_MEMLOCK: "Max locked memory",
    resource.RLIMIT_MSGQUEUE: "Max msgqueue size",
    resource.RLIMIT_NICE: "Max nice priority",
    resource.RLIMIT_NOFILE: "Max open files",
    resource.RLIMIT_NPROC: "Max processes",
    resource.RLIMIT_RSS: "Max resident set",
    resource.RLIMIT_RTPRIO: "Max realtime priority",
    resource.RLIMIT_RTTIME: "Max realtime timeout",
    resource.RLIMIT_SIGPENDING: "Max pending signals",
    resource.RLIMIT_STACK: "Max stack size",
}
"""As /proc/PID/limits calls them, proc(5)."""

SPOILT: Final = """
import ctypes, resource, signal
os.umask(0)
for name, soft in (("CORE", None), ("NOFILE", 200), ("STACK", 4 << 20), ("CPU", 5000), ("MEMLOCK", 0), ("NPROC", 9999)):
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    resource.setrlimit(number, (hard if soft is None else soft, hard))
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGALRM})
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
open("/proc/self/oom_score_adj", "w").write("-500" if os.geteuid() == 0 else "500")
if os.geteuid() == 0:
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    # Inheritable, so that even an ordinary user's process would get it from the ambient set.
    libc = ctypes.CDLL(None)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    data[2], data[5] = data[1], data[4]
    libc.capset(header, data)
    libc.prctl(47, 2, 13, 0, 0)
"""
"""What an agent is made to have that no job may have."""

TEXT: Final = (
    "cat /proc/self/status > status; cat /proc/self/limits > limits; cat /proc/self/oom_score_adj > oom; "
    "cat /proc/self/stat > stat; umask > umask; ls /proc/self/fd > fds; "
    "{python} -c 'import ctypes; print(ctypes.CDLL(None).syscall(250, 0, -3, 0))' > keyring"
)


class Seen:
    """What the kernel said of a process of a job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.status = dict(line.split(":\t", 1) for line in self._read("status").splitlines() if ":\t" in line)

    def _read(self, name: str) -> str:
        return (self._directory / name).read_text()

    def limit(self, name: str) -> tuple[int, int]:
        """Return soft and hard of a line of `limits`."""
        (line,) = (line for line in self._read("limits").splitlines() if line.startswith(name))
        soft, hard = line[len(name) :].split()[:2]
        return _number(soft), _number(hard)

    @property
    def nice(self) -> int:
        return int(self._read("stat").rpartition(")")[2].split()[16])

    def text(self, name: str) -> str:
        """Return a file that holds one value."""
        return self._read(name).strip()


def _number(text: str) -> int:
    return UNLIMITED if text == "unlimited" else int(text)


def bits(text: str) -> set[str]:
    """Return the names of a set of capabilities in /proc/PID/status."""
    return {name for number, name in enumerate(CAPABILITIES) if int(text, 16) >> number & 1}


def holds(seen: Seen, wanted: JobProcess) -> None:
    """Assert every row: of the table of limits, and of what is no limit."""
    root = os.geteuid() == 0
    for number, of in LIMITS.items():
        soft, hard = of(wanted)
        if "sys_resource" not in own("CapEff"):
            most = resource.getrlimit(number)[1]
            soft, hard = (one if most == UNLIMITED or 0 <= one <= most else most for one in (soft, hard))
        assert seen.limit(NAMES[number]) == (soft, hard), NAMES[number]
    # A program that root starts gets what the bounding set has, unless no program gets more than who starts it.
    gained = set(wanted.capabilities) & own("CapBnd") if root and not wanted.no_new_privs else set()
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert bits(seen.status[name]) == (gained if name in ("CapPrm", "CapEff") else set()), name
    if root:
        assert bits(seen.status["CapBnd"]) == set(wanted.capabilities) & own("CapBnd")
        assert (seen.nice, seen.text("oom")) == (wanted.nice, "0")
    assert seen.status["NoNewPrivs"].strip() == str(int(wanted.no_new_privs))
    assert int(seen.text("umask"), 8) == wanted.umask
    assert [int(seen.status[name], 16) for name in ("SigBlk", "SigIgn")] == [0, 1 << signal.SIGHUP - 1]
    # 3 is what `ls` reads the directory through.
    assert set(seen.text("fds").split()) <= {"0", "1", "2", "3"}


def own(kind: str) -> set[str]:
    """Return a set of capabilities of this process, which agents of the tests have, too."""
    status = Path("/proc/self/status").read_text()
    return bits(next(line for line in status.splitlines() if line.startswith(kind)).split()[1])


def text_of(site: Site) -> str:
    return TEXT.format(python=shlex.quote(sys.executable))


def through_a_script(site: Site) -> Seen:
    async def story() -> None:
        async with site.running(SPOILT) as (controller, _):
            await controller.order(site.order(7, 2, "run", script=f"#!/bin/sh\n{text_of(site)}\n"))
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded) and ended.result is JobState.COMPLETED, ended

    asyncio.run(story())
    return Seen(site.destinations)


def through_a_command(site: Site) -> Seen:
    async def story() -> None:
        async with site.running(SPOILT) as (controller, _):
            special = SpecialTransfers(commands=(text_of(site),))
            await controller.order(site.order(7, 2, "stage_in", special=special))
            done = await controller.result(7, 2)
            assert isinstance(done, OperationDone), done

    asyncio.run(story())
    return Seen(site.destinations)


WAYS = {"script": through_a_script, "command": through_a_command}


def configured(site: Site, text: str) -> Config:
    """Write the table [job_process] of the site's configuration."""
    site.file.write_text(site.file.read_text() + f"\n[job_process]\n{text}\n")
    site.config = Config.load(site.file)
    return site.config


def test_the_table_of_limits_has_every_limit_of_the_kernel_but_that_of_file_locks() -> None:
    shown = {line[:26].strip() for line in Path("/proc/self/limits").read_text().splitlines()[1:]}
    assert set(NAMES.values()) == shown - {"Max file locks"} and set(NAMES) == set(LIMITS)


@pytest.mark.parametrize("way", WAYS)
def test_a_process_of_a_job_gets_the_table_and_nothing_of_its_agent(site: Site, way: str) -> None:
    holds(WAYS[way](site), JobProcess())


@pytest.mark.parametrize("way", WAYS)
def test_a_process_of_a_job_gets_what_the_site_says(site: Site, way: str) -> None:
    config = configured(
        site,
        """
        umask = "0077"
        nice = 7
        core_size = "1MiB"
        locked_memory = "64KiB"
        stack_size = "16MiB"
        open_files = 900
        processes = 5000
        no_new_privs = false
        capabilities = ["CAP_NET_RAW"]
        """,
    )
    wanted = JobProcess(
        umask=0o077,
        nice=7,
        core_bytes=1 << 20,
        locked_bytes=1 << 16,
        stack_bytes=16 << 20,
        open_files=900,
        processes=5000,
        no_new_privs=False,
        capabilities=("CAP_NET_RAW",),
    )
    assert config.job_process == wanted
    seen = WAYS[way](site)
    holds(seen, JobProcess(**{**_fields(wanted), "capabilities": ("net_raw",)}))


def _fields(wanted: JobProcess) -> dict[str, object]:
    return {name: getattr(wanted, name) for name in wanted.__struct_fields__}


def test_a_script_has_a_session_keyring_of_its_own(site: Site) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the number of keyctl is known to this test for x86-64 alone")
    import ctypes

    mine = ctypes.CDLL(None).syscall(250, 0, -3, 1)
    if mine < 0:
        pytest.skip("this machine lets nobody have keyrings")
    theirs = int(through_a_script(site).text("keyring"))
    assert theirs > 0 and theirs != mine


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("no_new_privs", [True, False])
def test_root_starts_no_process_whose_rights_it_cannot_drop_unless_programs_gain_none(
    root: bool, no_new_privs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(job_process, "_prctl", denied)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    if not own("CapBnd"):
        pytest.skip("there are no rights to drop")
    with pytest.raises(PermissionError) if root and not no_new_privs else nullcontext():
        job_process.prepare(JobProcess(no_new_privs=no_new_privs))
