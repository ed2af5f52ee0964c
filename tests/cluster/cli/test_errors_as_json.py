"""With --json, an error is the last line of stderr, in the API's form, and stdout is empty."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from forebay.cluster.cli import check
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas import ErrorAnswer, ErrorView
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.test_what_is_imported import EVERY

# The words after bbstat belong to the site's provider.
OURS = tuple(words for words in EVERY if words != ("slurm", "bbstat"))


def said(result: Result) -> ErrorView:
    return msgspec.json.decode(result.stderr.splitlines()[-1], type=ErrorAnswer, strict=True).error


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_every_usage_error_is_one_json_object(double: Double, words: tuple[str, ...], first: bool) -> None:
    typed = ("--json", *words, "--no-such-option") if first else (*words, "--json", "--no-such-option")
    result = forebay(double.config, *typed)
    assert (result.exit_code, result.stdout) == (ExitCode.BAD_INPUT, "")
    (line,) = result.stderr.splitlines()
    error = said(result)
    assert line.startswith('{"error":') and error.code == "bad_input" and "no-such-option" in error.sentence
    assert error.remedy.endswith(f" {' '.join(words)} --help")


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [(400, ExitCode.BAD_INPUT), (403, ExitCode.PERMISSION_DENIED), (404, ExitCode.NOT_FOUND), (409, ExitCode.REFUSED)],
)
def test_an_api_rejection_keeps_code_place_and_exit_code(double: Double, status: int, exit_code: ExitCode) -> None:
    double.refuse("GET", "/v1/jobs/7", status, "its_code", "it is so", remedy="GET /v1/jobs", place="id")
    result = forebay(double.config, "job", "show", "7", "--json")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert said(result) == ErrorView(
        code="its_code", sentence="it is so", remedy="GET `forebay queue --all`", place="id"
    )
    # Without --json, the errors are sentences.
    text = forebay(double.config, "job", "show", "7")
    assert text.stderr.splitlines()[0] == "forebay: id: it is so" and text.exit_code == exit_code


def test_a_rejected_submit_keeps_the_api_code(double: Double, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    double.refuse("POST", "/v1/jobs", 507, "journal_full", "the journal is 80% full")
    assert said(forebay(double.config, "submit", str(tmp_path / "job.sh"), "--json")).code == "journal_full"


def test_configuration_errors_interrupts_and_internal_errors_are_json(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = double.config.file.read_text()
    double.config.file.write_text(text + "[nonsense]\n")
    try:
        error = said(forebay(double.config, "queue", "--json"))
    finally:
        double.config.file.write_text(text)
    assert error.code == "bad_input" and str(double.config.file) in error.place and "line" in error.place

    def raising(what: BaseException) -> Any:
        def raise_it(*arguments: object) -> None:
            raise what

        return raise_it

    for what, exit_code in ((KeyboardInterrupt(), ExitCode.INTERRUPTED), (ValueError("\x1b[31m"), ExitCode.FAULT)):
        monkeypatch.setattr(check, "find_local_processes", raising(what))
        result = forebay(double.config, "cluster", "check", "--json")
        assert (result.exit_code, said(result).code) == (exit_code, exit_code.name.lower())
        assert "\x1b" not in result.stderr


def test_a_partly_failed_answer_stays_one_object_on_stdout(double: Double) -> None:
    text = double.config.file.read_text()
    port = double.config.replicas[0].api.port
    double.config.file.write_text(text.replace(f":{port}", ":1"))
    try:
        result = forebay(double.config, "cluster", "check", "--name", "r1", "--json")
    finally:
        double.config.file.write_text(text)
    rows = msgspec.json.decode(result.stdout, type=check.CheckAnswer).checks
    if result.exit_code != ExitCode.OK:
        assert any(row.verdict is check.CheckResult.FAIL for row in rows) and "checks failed" in said(result).sentence
