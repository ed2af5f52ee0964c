"""The wheel holds the four packages below one name, all of their files, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.repo.tree import NAME, OWN_FILES, PACKAGES, ROOT, repository_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel as a packager would, without a network."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    [path] = directory.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_one_import_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    metadata = {top for top in tops if top.endswith(".dist-info")}
    assert len(metadata) == 1
    assert tops - metadata == {NAME}


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {str(Path(NAME, path)) for path in repository_files() if path.parts[0] in PACKAGES}
    assert packed == expected | {f"{NAME}/{name}" for name in OWN_FILES}


def test_the_wheel_has_the_command_and_the_license(wheel: zipfile.ZipFile) -> None:
    [entry_points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "forebay = forebay.cluster.cli:main" in wheel.read(entry_points).decode()
    assert any(Path(name).name == "LICENSE" for name in wheel.namelist())


def test_the_license_is_the_whole_apache_license() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
