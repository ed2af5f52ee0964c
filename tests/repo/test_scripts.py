"""What people and CI run: executable, documented, free of syntax errors, and the same files for both."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, repository_files, scripts, text_of

HELP_WAIT_S = 600
"""Seconds that `--help` may take at most: a bound against hanging, not a measure of speed."""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

SCRIPT_LINES_MAX = 160
"""Lines of a script in shell, at most: scripts/setup is the longest."""


def test_the_scripts_that_the_documents_name_are_there() -> None:
    assert {Path("scripts/setup"), Path("scripts/test"), Path("scripts/bench"), Path(".ci/run")} <= set(scripts())


@pytest.mark.parametrize("path", scripts(), ids=str)
def test_a_script_is_executable_and_says_what_it_is(path: Path) -> None:
    lines = text_of(path).splitlines()
    assert os.access(ROOT / path, os.X_OK), f"chmod +x {path}"
    assert lines[0] == "#!/usr/bin/env bash", "what is in Python is a module below tests/, run from here"
    assert lines[1].startswith("# "), "the second line says what the script does"


@pytest.mark.parametrize("path", scripts(), ids=str)
def test_a_script_has_no_syntax_error(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", ROOT / path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("path", [path for path in scripts() if path != Path(".ci/run")], ids=str)
def test_help_is_printed_and_nothing_else_is_done(path: Path) -> None:
    result = subprocess.run(
        [ROOT / path, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HELP_WAIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout.lower()


@pytest.mark.parametrize("path", [path for path in scripts() if path.name not in ("run", "test")], ids=str)
def test_a_misspelt_option_is_refused(path: Path) -> None:
    result = subprocess.run(
        [ROOT / path, "--no-such-option"], capture_output=True, text=True, check=False, timeout=HELP_WAIT_S
    )
    assert result.returncode == 2
    assert "--no-such-option" in result.stderr


@pytest.mark.parametrize("option", ["--help", "--no-such-option"])
def test_help_and_a_misspelt_option_set_nothing_up(option: str, tmp_path: Path) -> None:
    for path in (*scripts(), Path("tests/repo/options.sh")):
        copy = tmp_path / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy)
    (tmp_path / "scripts" / "setup").write_text('#!/bin/sh\n>"$(dirname "$0")/../was-set-up"\nexit 1\n')
    for path in scripts():
        if path.name in ("run", "setup") or (path.name == "test" and option != "--help"):
            continue  # What is no option of scripts/test is one of pytest's.
        result = subprocess.run(
            [path, option], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=HELP_WAIT_S
        )
        assert not (tmp_path / "was-set-up").exists(), f"{path} {option}"
        assert result.returncode == (0 if option == "--help" else 2), f"{path} {option}: {result.stderr}"
        assert option != "--help" or "usage:" in result.stdout.lower()


@pytest.mark.parametrize("path", [path for path in scripts() if "tests/repo/options.sh" in text_of(path)], ids=str)
def test_the_usage_of_a_script_names_each_option_of_its_module(path: Path) -> None:
    told = subprocess.run(
        [ROOT / path, "--help"], capture_output=True, text=True, check=True, timeout=HELP_WAIT_S
    ).stdout
    usage = text_of(path).partition("\nset -")[0]
    assert set(OPTION.findall(told)) - set(OPTION.findall(usage)) <= {"--help"}


@pytest.mark.parametrize("verb", ["start", "stop", "exercise", "root"])
def test_the_usage_of_scripts_slurm_names_each_option_of_a_verb(verb: str) -> None:
    asked = [sys.executable, "-m", "tests.slurm", verb, "--help"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT, timeout=HELP_WAIT_S).stdout
    usage = text_of(Path("scripts/slurm")).partition("# usage:")[2].partition("# `start`")[0]
    [mine] = [part for part in usage.split("scripts/slurm ") if part.startswith(verb)]
    assert set(re.findall(r"--[a-z]+", mine)) == set(re.findall(r"--[a-z]+", told)) - {"--help"}


def test_shell_scripts_stop_at_errors() -> None:
    careless = [
        str(path)
        for path in scripts()
        if not re.search(r"^set -e?uo? ?pipefail|^set -[eu]+", text_of(path), re.MULTILINE)
    ]
    assert careless == []


def test_scripts_are_short_and_nothing_else_is_beside_them() -> None:
    assert [str(path) for path in repository_files() if path.parts[0] == "scripts" and len(path.parts) > 2] == []
    assert [str(path) for path in scripts() if len(text_of(path).splitlines()) > SCRIPT_LINES_MAX] == []


def test_ci_runs_what_people_run() -> None:
    text = text_of(Path(".ci/run"))
    assert "scripts/test" in text
    assert "scripts/demo" in text
