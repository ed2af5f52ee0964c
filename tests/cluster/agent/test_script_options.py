"""Scripts that ask for tasks, a file as standard input, or a signal before their time limit."""

import asyncio
import signal

import pytest

from forebay.cluster.agent.processes.environment import UnixAccount, environment_of
from forebay.cluster.cli.submission.request import pack_script
from forebay.replica.messages.commands import ScriptEnded
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from forebay.replica.model.requests import JobOptions
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import script_of, shown


def ended(site: Site, script: str, run: JobOptions, **fields: object) -> ScriptEnded:
    """Return how a script ends that is run in this way."""

    async def story() -> ScriptEnded:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=script, options=run, **fields))
            found = await controller.result(7, 2)
            assert isinstance(found, ScriptEnded)
            return found

    return asyncio.run(story())


WAITS = ("echo begun > begun", "while :; do sleep 0.05; done")


def test_the_script_alone_gets_its_signal_before_the_time_limit(site: Site) -> None:
    script = script_of(
        "sh -c 'trap \"echo child > child\" USR1; echo > ready; while :; do sleep 0.05; done' &",
        "trap 'echo script > script; exit 0' USR1",
        "until [ -e ready ]; do sleep 0.02; done",
        *WAITS,
    )
    found = ended(site, script, JobOptions(signal="B:USR1@597"), time_limit_s=600)
    assert (found.result, found.exit_code) == (JobState.COMPLETED, 0)
    assert shown(site.destinations / "script") == "script\n"
    assert not (site.destinations / "child").exists()


def test_what_the_script_has_started_gets_the_signal_and_the_script_does_not(site: Site) -> None:
    script = script_of(
        "trap 'echo script > script' USR1",
        "sh -c 'trap \"echo child > child; exit 3\" USR1; while :; do sleep 0.05; done' &",
        "wait $!",
    )
    found = ended(site, script, JobOptions(signal="USR1@597"), time_limit_s=600)
    assert (found.result, found.exit_code) == (JobState.FAILED, 3)
    assert shown(site.destinations / "child") == "child\n"
    assert not (site.destinations / "script").exists()


def test_a_script_that_outlives_its_signal_is_ended_at_its_time_limit(site: Site) -> None:
    found = ended(
        site, script_of("trap 'echo once >> said' USR1", *WAITS), JobOptions(signal="B:USR1@2"), time_limit_s=3
    )
    assert (found.result, found.signal) == (JobState.TIMEOUT, signal.SIGTERM)
    assert shown(site.destinations / "said") == "once\n"


def test_a_script_reads_the_file_that_it_asked_for(site: Site) -> None:
    given = site.sources / "input"
    given.write_text("one\ntwo\n")
    assert ended(site, script_of("cat > copy"), JobOptions(), input=str(given)).result is JobState.COMPLETED
    assert shown(site.destinations / "copy") == "one\ntwo\n"


def test_a_packed_script_runs_as_it_was_written(site: Site) -> None:
    script = script_of("cp $0 copy", *(f"true {number}" for number in range(100)))
    assert ended(site, pack_script(script, "job.sh"), JobOptions()).result is JobState.COMPLETED
    assert shown(site.destinations / "copy") == script


@pytest.mark.parametrize(("name", "says"), [("missing", "No such file"), ("", "is a directory"), ("link", "cannot be")])
def test_a_file_that_cannot_be_read_is_named_and_the_script_does_not_run(site: Site, name: str, says: str) -> None:
    (site.sources / "link").symlink_to("/etc/hostname")
    found = ended(site, script_of("touch ran"), JobOptions(), input=str(site.sources / name))
    assert (found.result, found.exit_code) == (JobState.FAILED, 126)
    assert "input file" in found.message and says in found.message
    assert not (site.destinations / "ran").exists()


@pytest.mark.parametrize(("tasks", "cpus", "each"), [(1, 6, 6), (4, 8, 2), (3, 16, 5)])
def test_a_script_knows_its_tasks_and_the_cpus_of_each(tasks: int, cpus: int, each: int) -> None:
    wanted = Order(
        job=7, attempt=1, stage="run", user="alice", name="x", workdir="/w", cpus=cpus,
        options=JobOptions(tasks=tasks, exclusive=True, input="i", signal="2"),
    )  # fmt: skip
    account = UnixAccount("alice", 1000, 1000, "/home/alice", "/bin/bash", False)
    found = environment_of(wanted, account, buffer="", node="n1", marker="m")
    for name in ("SLURM_NTASKS", "FOREBAY_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE"):
        assert found[name] == str(tasks)
    assert (found["SLURM_CPUS_PER_TASK"], found["SLURM_CPUS_ON_NODE"]) == (str(each), str(cpus))
    assert found.get("SLURM_NTASKS_PER_NODE", "1") == str(tasks)
