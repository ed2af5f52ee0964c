"""scripts/setup where it goes wrong: what a person reads then. That it works, every run of CI shows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT

SETUP_WAIT_S = 600
"""Seconds that a failing setup may take at most: a bound against hanging, not a measure of speed."""


def set_up(tree: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup of a copied tree with a package index that nobody serves."""
    nobody = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "VIRTUAL_ENV"))}
    return subprocess.run(
        [tree / "scripts" / "setup", *options],
        env=own | nobody | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SETUP_WAIT_S,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy what setup reads into a directory with a space in its name."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", copy / "scripts" / "setup")
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def test_without_a_network_setup_says_so_and_is_not_taken_for_done(tree: Path) -> None:
    result = set_up(tree)
    assert result.returncode == 1
    assert "no way to the Python package index" in result.stderr
    assert not (tree / ".venv" / ".forebay-setup").exists()


def test_an_interpreter_that_is_not_there_is_named(tree: Path) -> None:
    result = set_up(tree, PYTHON="python-that-nobody-has")
    assert result.returncode == 1
    assert "PYTHON=python-that-nobody-has" in result.stderr


def test_an_interpreter_that_is_too_old_is_named_with_what_is_needed(tree: Path, tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && { echo Python 3.9.2; exit 0; }\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    result = set_up(tree, PYTHON=str(old))
    assert result.returncode == 1
    assert "Python 3.9.2" in result.stderr
    assert "3.11 or newer" in result.stderr
