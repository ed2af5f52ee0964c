"""`forebay submit` of several scripts: one request, one line each, and independent failures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.cli.commands.options import BULK_BYTES_MAX, split_into_requests
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.jobs import BulkAnswer, CommandResult, ErrorView, JobsAnswer
from forebay.cluster.schemas.requests import BULK_COMMANDS_MAX, SubmitCommand
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.views import job

SCRIPT = "#!/bin/sh\n"
IDS = ("0" * 32, "1" * 32, "2" * 32, "3" * 32, "4" * 32)


@pytest.fixture
def scripts(tmp_path: Path) -> list[str]:
    """Create three scripts: a.sh, b.sh, c.sh."""
    paths = [tmp_path / f"{letter}.sh" for letter in "abc"]
    for path in paths:
        path.write_text(SCRIPT + f"# {path.stem}\n")
    return [str(path) for path in paths]


def submitted(number: int, **more: Any) -> CommandResult:
    return CommandResult(command_id=IDS[number % 5], status=201, revision=5, job=job(job_id=40 + number, **more))


def refused(status: int, code: str, sentence: str, **more: Any) -> CommandResult:
    return CommandResult(command_id=IDS[0], status=status, error=ErrorView(code=code, sentence=sentence, **more))


def answer(double: Double, *results: CommandResult) -> None:
    double.answer("POST", "/v1/commands", BulkAnswer(revision=7, results=results))


def names(double: Double) -> list[list[str]]:
    """Return the names of the jobs in each request."""
    return [[one["name"] for one in asked.body["commands"]] for asked in double.asked]


def test_several_scripts_share_a_request_and_print_lines_in_order(double: Double, scripts: list[str]) -> None:
    answer(double, *map(submitted, (2, 1, 3)))
    result = forebay(double.config, "submit", "--hold", *scripts)
    lines = "Submitted batch job 42\nSubmitted batch job 41\nSubmitted batch job 43\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, lines, "")
    [asked] = double.asked
    commands = asked.body["commands"]
    assert [one["name"] for one in commands] == ["a.sh", "b.sh", "c.sh"]
    assert all(one["type"] == "submit_job" and one["hold"] is True for one in commands)
    assert [one["script"] for one in commands] == [Path(script).read_text() for script in scripts]
    assert len({one["command_id"] for one in commands}) == 3


def test_a_script_list_on_standard_input_can_be_combined_with_arguments(double: Double, scripts: list[str]) -> None:
    answer(double, *map(submitted, range(3)))
    listed = f"{scripts[1]}\n\n  {scripts[2]}  ".encode()
    result = forebay(double.config, "submit", scripts[0], "-", stdin=listed)
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 3)
    assert names(double) == [["a.sh", "b.sh", "c.sh"]]


def test_a_list_with_one_script_submits_that_script(double: Double, scripts: list[str]) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    result = forebay(double.config, "submit", "-", stdin=f"{scripts[0]}\n".encode())
    assert (result.stdout, double.asked[0].body["name"]) == ("Submitted batch job 42\n", "a.sh")


@pytest.mark.parametrize("text", [b"", b"\n\n", b"echo hello\n", b"\x7fELF\0\n", b"\xff\xfe\n", b"a\0b.sh\n", b"/\n"])
def test_other_standard_input_is_rejected_as_an_invalid_script(double: Double, text: bytes) -> None:
    result = forebay(double.config, "submit", "-", stdin=text)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stderr.startswith("forebay: script line 1")
    assert double.asked == []


def test_a_rejected_script_is_named_and_the_others_are_submitted(double: Double, scripts: list[str]) -> None:
    fault = refused(400, "invalid_directive", "there is no such word", place="script line 2, column 5")
    limit = refused(409, "limit_exceeded", "alice has too many jobs", remedy="wait")
    answer(double, submitted(0), fault, limit)
    result = forebay(double.config, "submit", *scripts)
    assert (result.exit_code, result.stdout) == (ExitCode.BAD_INPUT, "Submitted batch job 40\n")
    assert result.stderr.splitlines() == [
        f"forebay: {scripts[1]} line 2, column 5: there is no such word",
        "Burst Buffer request invalid",
        f"forebay: {scripts[2]}: alice has too many jobs",
        "  what to do: wait",
    ]


@pytest.mark.parametrize("fault", ["missing", "no interpreter", "unknown option"])
def test_an_invalid_script_prevents_the_submit_of_all(double: Double, scripts: list[str], fault: str) -> None:
    """A user who types `submit job.sh data.txt` means data.txt as an argument of the script."""
    path = Path(scripts[1])
    if fault == "missing":
        path.unlink()
    else:
        path.write_text("1 2 3\n" if fault == "no interpreter" else "#!/bin/sh\n#SBATCH --gpuz=1\n")
    result = forebay(double.config, "submit", *scripts)
    assert (result.exit_code, result.stdout) == (ExitCode.BAD_INPUT, "")
    assert scripts[1] in result.stderr
    assert double.asked == []


def test_several_scripts_with_json_print_one_object(double: Double, scripts: list[str]) -> None:
    answer(double, submitted(0, warnings=("look at it",)), refused(403, "denied", "not yours"), submitted(2))
    result = forebay(double.config, "submit", "--json", *scripts)
    printed = msgspec.json.decode(result.stdout, type=JobsAnswer)
    assert (printed.revision, [one.job_id for one in printed.jobs]) == (7, [40, 42])
    assert result.exit_code == ExitCode.PERMISSION_DENIED
    assert result.stderr.splitlines() == [
        f"forebay: warning: {scripts[0]}: look at it",
        f"forebay: {scripts[1]}: not yours",
    ]


def test_scripts_with_unknown_outcome_each_get_a_command_id(double: Double, scripts: list[str]) -> None:
    double.refuse("POST", "/v1/commands", 503, "late", "nobody knows", outcome="unknown")
    result = forebay(double.config, "submit", *scripts, deadline_s=0.5)
    assert (result.exit_code, result.stdout) == (ExitCode.OUTCOME_UNKNOWN, "")
    commands = double.asked[0].body["commands"]
    for script, command in zip(scripts, commands, strict=True):
        assert f"forebay: {script}: " in result.stderr
        assert f"--command-id {command['command_id']}:" in result.stderr


def test_many_scripts_go_in_several_requests_until_one_is_unanswered(
    double: Double, scripts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.schemas.BULK_COMMANDS_MAX", 2)
    double.refuse("POST", "/v1/commands", 403, "denied", "you may not")
    result = forebay(double.config, "submit", *scripts)
    assert names(double) == [["a.sh", "b.sh"]]
    assert result.exit_code == ExitCode.PERMISSION_DENIED
    assert [line for line in result.stderr.splitlines() if line.startswith("forebay")] == [
        f"forebay: {scripts[0]}: you may not",
        f"forebay: {scripts[1]}: you may not",
        f"forebay: {scripts[2]}: the script was not submitted, because an earlier request failed",
    ]


def test_command_id_needs_one_script_and_standard_input_one_use(double: Double, scripts: list[str]) -> None:
    identified = forebay(double.config, "submit", *scripts, "--command-id", "017f22e279b07cc398c4dc0c0c07398f")
    twice = forebay(double.config, "submit", "-", "-", stdin=SCRIPT.encode())
    assert (identified.exit_code, twice.exit_code) == (ExitCode.BAD_INPUT, ExitCode.BAD_INPUT)
    assert "--command-id: several scripts are given" in identified.stderr
    assert "given twice" in twice.stderr
    assert double.asked == []


@given(st.lists(st.integers(0, BULK_BYTES_MAX // 3), max_size=12))
def test_bulk_commands_are_split_by_size_in_order(sizes: list[int]) -> None:
    commands: Sequence[SubmitCommand] = [
        SubmitCommand(command_id=IDS[0], script="x" * size, time_limit_s=at + 1, workdir="/")
        for at, size in enumerate(sizes)
    ]
    parts = list(split_into_requests(commands))
    assert [command for part in parts for command in part] == list(commands)
    for part in parts:
        assert 0 < len(part) <= BULK_COMMANDS_MAX
        assert len(msgspec.json.encode(part)) <= BULK_BYTES_MAX + len(part) + 2
