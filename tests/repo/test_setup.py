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
    assert "the Python package index is not reachable" in result.stderr
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


STUB_PYTHON = """\
#!/bin/sh
# In place of the interpreter and of .venv/bin/python: nothing is compiled until the file "compiler" exists.
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *Python.h*) [ -e "{bin}/compiler" ] ;;
  *" install "*" requirements.lock") [ -e "{bin}/compiler" ] || {{ echo "Failed to build immutables"; exit 1; }} ;;
esac
"""
STUB_APT = '#!/bin/sh\necho "$*" >> "{bin}/installed"\n{then}\n'


def set_up_without_wheel(tree: Path, stubs: Path, *, then: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run scripts/setup where a package must be compiled; `then` is what installing Debian packages does."""
    stubs.mkdir(exist_ok=True)
    stub_programs = {"python": STUB_PYTHON, "apt-get": STUB_APT, "id": "#!/bin/sh\necho 0\n"}
    for name, text in stub_programs.items():
        (stubs / name).write_text(text.format(bin=stubs, then=then.format(bin=stubs)), encoding="utf-8")
        (stubs / name).chmod(0o755)
    result = set_up(tree, PYTHON=str(stubs / "python"), PATH=f"{stubs}:{os.environ['PATH']}")
    installed = stubs / "installed"
    return result, installed.read_text(encoding="utf-8").splitlines() if installed.exists() else []


def test_a_compiler_is_installed_where_a_package_has_no_wheel_for_this_python(tree: Path, tmp_path: Path) -> None:
    result, installed = set_up_without_wheel(tree, tmp_path / "bin", then='touch "{bin}/compiler"')
    assert result.returncode == 0, result.stderr
    assert any(line.endswith("gcc libc6-dev python3-dev") for line in installed)


def test_a_package_that_cannot_be_compiled_is_reported_with_the_remedy(tree: Path, tmp_path: Path) -> None:
    result, _ = set_up_without_wheel(tree, tmp_path / "bin", then="true")
    assert result.returncode == 1
    assert "no wheel for" in result.stderr
    assert "install gcc and Python's headers" in result.stderr


def test_no_compiler_is_installed_where_every_package_has_a_wheel(tree: Path, tmp_path: Path) -> None:
    stubs = tmp_path / "bin"
    stubs.mkdir()
    (stubs / "compiler").touch()
    result, installed = set_up_without_wheel(tree, stubs, then="true")
    assert result.returncode == 0, result.stderr
    assert not [line for line in installed if "gcc" in line]
