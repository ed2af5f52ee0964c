"""SIGHUP at every process of an agent, as `systemctl kill -s HUP` sends it: jobs and transfers go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from forebay.cluster.agent.processes.job_processes import spawn
from forebay.cluster.system.processes import descendants
from forebay.replica.messages.commands import ScriptEnded, ScriptStarted
from forebay.replica.model.job_states import JobState
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import script_of


def ignores_hangup(pid: int) -> bool:
    """Say whether SIGHUP does nothing to a process: it is ignored, not only held back."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) >> signal.SIGHUP - 1 & 1)


def test_a_job_completes_although_every_process_of_its_agent_gets_sighup(site: Site) -> None:
    # The script has children of its own, and none of them handles SIGHUP.
    script = script_of(
        "sleep 600 & echo $! > child", "until [ -e gate ]; do sleep 0.02; done", "kill $!", "echo > over"
    )

    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=8 << 20))
            await controller.result(7, 2, ScriptStarted)
            async with asyncio.timeout(20):
                while not (site.destinations / "child").is_file() or not (site.destinations / "child").read_text():
                    await asyncio.sleep(0.01)
            tree = [*site.supervisors(), *descendants(agent.pid)]
            tree += [one for supervisor in site.supervisors() for one in descendants(supervisor)]
            assert int((site.destinations / "child").read_text()) in tree
            for pid in {agent.pid, *tree}:
                # The shell's own `sleep` comes and goes.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGHUP)
            (site.destinations / "gate").touch()
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert (site.destinations / "over").exists() and agent.poll() is None

    asyncio.run(story())


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("forebay.cluster.agent.worker.worker", ()),
        ("forebay.cluster.agent.worker.usage_counter", ("PID",)),
        ("forebay.cluster.providers.worker", ("PID",)),
    ],
)
def test_a_process_of_an_agent_that_is_started_and_not_forked_ignores_sighup(
    module: str, arguments: tuple[str, ...]
) -> None:
    process = spawn(
        module,
        tuple(word.replace("PID", str(os.getpid())) for word in arguments),
        descriptors=(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=None,
        new_session=False,
    )
    try:
        while not ignores_hangup(process.pid):
            assert process.poll() is None
            signal.sigtimedwait((), 0.01)
        process.send_signal(signal.SIGHUP)
        assert ignores_hangup(process.pid) and process.poll() is None
    finally:
        process.kill()
        process.communicate()
