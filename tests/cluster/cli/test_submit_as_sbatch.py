"""What sbatch can be told of a submit: arguments, a command instead of a script, one number to print, and waiting."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.exits import ExitCode
from cluster.cli.submission.sbatch import UNSUPPORTED
from cluster.cli.submission.waiting import exit_code_of
from cluster.schemas.jobs import JobsAnswer
from replica.model.job_states import ENDED, JobState
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.views import job

LIST = r"/v1/jobs\?.*"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\necho hello\n")
    return str(path)


def test_what_follows_two_dashes_are_the_arguments_of_the_script(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    assert forebay(double.config, "submit", "--hold", script, "--", "-n", "a b", "--", "").exit_code == 0
    [asked] = double.asked
    assert (asked.body["arguments"], asked.body["hold"]) == (["-n", "a b", "--", ""], True)


def test_a_word_that_is_no_script_is_refused_with_where_arguments_stand(
    double: Double, script: str, tmp_path: Path
) -> None:
    (tmp_path / "input.txt").write_text("1 2 3\n")
    result = forebay(double.config, "submit", script, str(tmp_path / "input.txt"))
    assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    assert "arguments of a script stand after it and --" in result.stderr


def test_a_command_of_the_command_line_is_a_script_of_its_own(double: Double) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    assert forebay(double.config, "submit", "--wrap", "sort a | uniq", "-c2").exit_code == 0
    body = double.asked[0].body
    assert body["script"].startswith("#!/bin/sh\n") and body["script"].endswith("\nsort a | uniq\n")
    assert (body["name"], body["cpus"]) == ("wrap", 2)


@pytest.mark.parametrize("words", [("--wrap", "x", "SCRIPT"), ("--wrap", "x", "--", "a"), ()])
def test_a_command_and_a_script_or_neither_are_refused(double: Double, script: str, words: tuple[str, ...]) -> None:
    result = forebay(double.config, "submit", "--hold", *(script if word == "SCRIPT" else word for word in words))
    assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    assert "--wrap" in result.stderr


def test_a_program_that_submits_reads_the_number_alone(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    assert forebay(double.config, "submit", "--parsable", script).stdout == "42\n"


def test_files_and_how_they_are_opened_reach_the_controller(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    words = ("-o", "out-%j", "-e", "err-%j", "--open-mode=append", "--ntasks=1")
    assert forebay(double.config, "submit", *words, script).exit_code == 0
    body = double.asked[0].body
    assert (body["output"], body["error"], body["open_mode"]) == ("out-%j", "err-%j", "append")


@pytest.mark.parametrize(
    "option", sorted(UNSUPPORTED.keys() - {"--wait", "-W", "--parsable", "--wrap", "--uid", "--export"})
)
def test_an_option_of_sbatch_that_cannot_be_had_is_refused_with_what_it_would_need(
    double: Double, script: str, option: str
) -> None:
    """On the command line as in a script: the sentence is the same."""
    result = forebay(double.config, "submit", option, "1", script)
    assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    Path(script).write_text(f"#!/bin/sh\n#SBATCH {option} 1\n")
    of_script = forebay(double.config, "submit", script)
    assert (of_script.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    for stderr in (result.stderr, of_script.stderr):
        assert f"{option} cannot be had: {UNSUPPORTED[option][0]}" in stderr
        assert f"what to do: {UNSUPPORTED[option][1]}" in stderr


def test_a_submit_that_waits_ends_with_the_exit_code_of_the_script(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    double.answer("GET", LIST, JobsAnswer(revision=7, jobs=(job(job_id=42, state="FAILED", exit_code=5),)))
    result = forebay(double.config, "submit", "--wait", script)
    assert (result.exit_code, result.stdout) == (5, "Submitted batch job 42\n")
    assert "job=42" in double.asked[-1].target


def test_a_submit_that_waits_looks_until_all_tasks_are_over_and_ends_with_the_worst(
    double: Double, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    tasks = [job(job_id=42, state="COMPLETED"), job(job_id=43, state="RUNNING"), job(job_id=44, state="STAGE_OUT")]
    double.answer("GET", LIST, JobsAnswer(revision=7, jobs=tuple(tasks)))
    looked: list[float] = []

    async def pause(length_s: float) -> None:
        looked.append(length_s)
        if len(looked) == 3:
            done = tasks[0], job(job_id=43, state="FAILED", exit_code=2), job(job_id=44, state="CANCELLED")
            double.answer("GET", LIST, JobsAnswer(revision=8, jobs=done))

    monkeypatch.setattr("cluster.cli.submission.waiting.asyncio.sleep", pause)
    assert forebay(double.config, "submit", "-W", "--array=0-2", script).exit_code == 2
    assert len(looked) == 3 and looked == sorted(looked)


def test_who_waits_is_told_that_a_job_is_gone(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    double.refuse("GET", LIST, 404, "unknown_job", "job 42 is over and has left the list of finished jobs")
    result = forebay(double.config, "submit", "--wait", script)
    assert result.exit_code == ExitCode.NOT_FOUND and "has left the list" in result.stderr


@given(st.sampled_from(sorted(ENDED)), st.integers(0, 255), st.integers(0, 64))
def test_a_job_comes_to_zero_only_where_its_script_did(state: JobState, exit_code: int, signal: int) -> None:
    came_to = exit_code_of(job(state=state.name, exit_code=exit_code, signal=signal))
    assert (came_to == 0) == (state is JobState.COMPLETED and exit_code == 0 and signal == 0)
    assert came_to == exit_code or exit_code == 0 or signal


def test_waiting_and_json_are_not_both_had(double: Double, script: str) -> None:
    assert forebay(double.config, "submit", "--wait", "--json", script).exit_code == ExitCode.BAD_INPUT
    assert double.asked == []


def test_all_of_it_reads_back_as_it_was_written(double: Double, script: str) -> None:
    """Whatever a shell can pass."""
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    words = [chr(code) for code in (1, 9, 10, 34, 39, 92, 127, 0xE9, 0x1F600)]
    forebay(double.config, "submit", script, "--", *words)
    assert msgspec.json.decode(msgspec.json.encode(double.asked[0].body["arguments"])) == words
