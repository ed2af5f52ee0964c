"""The wheel without extras, in a fresh environment: few distributions, a working client, errors that name extras."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packages.build import install, runtime
from tests.repo.tree import ROOT

DISTRIBUTIONS_MAX = 5
"""Distributions of the client with itself, count (issue 41)."""

BYTES_MAX = 20_000_000
"""Size of all of them without compiled files, bytes."""


class Environment:
    """A virtual environment with the wheel and what it requires with some extras, copied from this one."""

    def __init__(self, directory: Path, wheel: Path, extra: str = "") -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = directory / "bin" / "python"
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python), "install"]
        subprocess.run([*command, "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
        [self.site] = directory.glob("lib/python*/site-packages")
        [information] = self.site.glob("forebay-*.dist-info")
        self.required = {"forebay"}
        for text in PathDistribution(information).requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                self.required |= {found.metadata["Name"] for found in runtime(wanted.name, "")} | {wanted.name}
        for found in (one for name in self.required - {"forebay"} for one in runtime(name, "", itself=True)):
            install(found, self.site)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's interpreter."""
        return subprocess.run([self.python, "-P", *words], capture_output=True, text=True, check=False, cwd=self.site)

    @property
    def size_bytes(self) -> int:
        """Size of everything installed, without compiled files."""
        return sum(file.stat().st_size for file in self.site.rglob("*") if file.is_file() and file.suffix != ".pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    [path] = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def client_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("client") / "venv", wheel)


def test_the_client_has_few_distributions_and_is_small(client_only: Environment) -> None:
    assert client_only.required == {"forebay", "msgspec"}
    assert len(client_only.required) <= DISTRIBUTIONS_MAX
    assert client_only.size_bytes < BYTES_MAX


def test_the_client_is_imported_and_submits_without_extras(client_only: Environment) -> None:
    program = (
        "import forebay\n"
        "from forebay import AsyncClient, Client\n"
        "try:\n"
        "    Client.connect('nowhere.toml')\n"
        "except forebay.ConfigurationError as error:\n"
        "    print(error.code)\n"
        "from forebay.cluster.sdk.submission import submit_request\n"
        "from forebay.cluster.client.exchange import Exchange\n"
        "from forebay.cluster.client.events import EventStream\n"
        "request, _ = submit_request('#!/bin/sh\\n#SBATCH -J sum\\n', {}, arguments=(), environment={}, user=None,\n"
        "    command_id='0' * 32, now=0)\n"
        "print(request.name)\n"
    )
    ran = client_only.run("-c", program)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["configuration", "sum"]


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("-m", "forebay.cluster.cli", "queue"), "forebay[cli]"),
        (("-c", "import forebay.testing"), "forebay[testing]"),
    ],
)
def test_what_lacks_an_extra_names_it(client_only: Environment, words: tuple[str, ...], extra: str) -> None:
    ran = client_only.run(*words)
    assert ran.returncode == 1
    assert extra in ran.stderr


def test_a_command_that_lacks_the_server_names_it(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv", wheel, extra="cli")
    assert environment.run("-m", "forebay.cluster.cli", "--help").returncode == 0
    ran = environment.run("-m", "forebay.cluster.cli", "cluster", "init", str(tmp_path / "site"))
    assert (ran.returncode, "forebay[server]" in ran.stderr) == (1, True), ran.stderr
