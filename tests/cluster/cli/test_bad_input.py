"""Invalid arguments: exit code 2 before any request, with the argument and a remedy in the message."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.cluster.cli.exits import ExitCode
from tests.cluster.cli.double import Double, forebay

REJECTED: dict[str, tuple[str, ...]] = {
    "--watch --json": ("transfer", "list", "--watch", "--json"),
    "--watch terminal": ("transfer", "list", "--watch"),
    "--watch  --json": ("transfer", "show", "17", "--watch", "--json"),
    "--watch  terminal": ("transfer", "show", "17", "--watch"),
    "'cmd' bash": ("support", "completion", "cmd"),
    "--automatic --confirm": ("drill", "run", "leader-kill", "--automatic", "--confirm", "abc"),
    "--automatic --force": ("drill", "run", "leader-kill", "--automatic", "--force", "why"),
    "--release upgrade": ("drill", "plan", "leader-kill", "--release", "/"),
    "--backup restore": ("drill", "plan", "leader-kill", "--backup", "/"),
    "--peer --api": ("cluster", "update", "r1"),
    "--peer '10.0.0.1'": ("cluster", "update", "r1", "--peer", "10.0.0.1"),
    "--check --remove": ("slurm", "install", "--conf-dir", "/", "--check", "--remove"),
    "none.pem certificate": ("cert", "revoke", "none.pem"),
    "--host 'r2='": ("cluster", "init", "new", "--host", "r1=10.0.0.1,r2="),
    "--node 'n1'": ("cluster", "init", "new", "--host", "r1=10.0.0.1", "--node", "n1"),
    "--replica-account 'no.such.account'": ("cluster", "init", "new", "--replica-account", "no.such.account"),
}
"""Text that the message must contain -> command line."""


@pytest.mark.parametrize("named", REJECTED)
def test_an_invalid_argument_is_named_in_the_error(
    named: str, double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = forebay(double.config, *REJECTED[named])
    assert result.exit_code == ExitCode.BAD_INPUT, (result.exit_code, result.stderr, result.exception)
    assert all(word in result.stderr for word in named.split()), result.stderr
    assert not double.asked
    assert not list(tmp_path.iterdir())


SCRIPTS: dict[str, str] = {
    "--exclusive=foo": "line 2, column 21",
    "--dependency=expand:4": "line 2, column 22",
    "--dependency=afterok:3,after:4?5": "line 2, column 22",
    "--job-name": "line 2, column 9",
    "--nodes=2": "line 2, column 17",
}
"""Options of a script -> where the message says they are."""


@pytest.mark.parametrize("option", SCRIPTS)
def test_an_option_of_a_script_is_rejected_with_its_place(option: str, double: Double, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH {option}\ntrue\n")
    result = forebay(double.config, "submit", str(script))
    assert result.exit_code == ExitCode.BAD_INPUT, (result.exit_code, result.stderr, result.exception)
    assert f"job.sh {SCRIPTS[option]}: " in result.stderr, result.stderr
    assert not double.asked


def test_an_option_on_the_command_line_without_its_value_is_named(double: Double, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    for words in (("--distribution",), ("-m",)):
        result = forebay(double.config, "submit", *words)
        assert (result.exit_code, words[0] in result.stderr) == (ExitCode.BAD_INPUT, True), result.stderr
    assert not double.asked
