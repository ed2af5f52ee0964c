"""`forebay node buffers`: buffers on a node, compared with those that the cluster knows."""

import json
import shutil

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas import BuffersAnswer, BufferView
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.views import PENDING


def test_buffers_unknown_to_the_cluster_are_listed_as_unknown(double: Double) -> None:
    agent = double.config.agents[0]
    shutil.rmtree(agent.directory, ignore_errors=True)  # also used by other tests of this process
    words = ("node", "buffers", "--name", agent.name)
    assert forebay(double.config, *words).exit_code == ExitCode.NOT_FOUND
    for directory in ("buffers/42", "buffers/7", "buffers/.images", "persistent/shared", "persistent/old"):
        (agent.directory / directory).mkdir(parents=True)
    shared = BufferView(
        job_id=None, name="shared", user="alice", state="allocated", pool="fast", capacity_bytes=8, requested_bytes=8,
        held_bytes=8, node=agent.name, revision=5,
    )  # fmt: skip
    double.answer("GET", "/v1/jobs/42", PENDING)
    double.refuse("GET", "/v1/jobs/7", 404, "unknown_job", "there is no job 7")
    double.answer("GET", "/v1/buffers.*", BuffersAnswer(revision=5, buffers=(shared,)))
    answer = forebay(double.config, *words, "--json")
    assert answer.stderr == "", "what a program reads is all on standard output"
    found = json.loads(answer.stdout)["buffers"]
    assert [(one["job_id"] or one["name"], one["state"]) for one in found] == [
        (7, "UNKNOWN"), (42, "PENDING"), ("old", "UNKNOWN"), ("shared", "allocated"),
    ]  # fmt: skip
    result = forebay(double.config, *words)
    assert (
        f"{agent.directory}/buffers/7" in result.stdout
        and "2 of these buffers are unknown to the cluster" in result.stderr
    )
    assert (agent.directory / "buffers" / "7").is_dir()


def test_no_note_is_printed_if_all_buffers_are_known(double: Double) -> None:
    agent = double.config.agents[0]
    shutil.rmtree(agent.directory, ignore_errors=True)
    for directory in ("buffers/42", "persistent"):
        (agent.directory / directory).mkdir(parents=True)
    double.answer("GET", "/v1/jobs/42", PENDING)
    result = forebay(double.config, "node", "buffers", "--name", agent.name)
    assert (result.exit_code, result.stderr) == (ExitCode.OK, "")
