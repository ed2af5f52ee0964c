"""The lock holds everything that is installed, exactly, with hashes, and says nothing about where it came from."""

import re
import tomllib
from pathlib import Path

from tests.repo.tree import text_of

PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^ ;\\]+)(?P<rest>.*)$", re.MULTILINE)


def pins() -> dict[str, str]:
    """Return the pinned versions by name."""
    return {match["name"]: match["version"] for match in PIN.finditer(text_of(Path("requirements.lock")))}


def declared() -> list[str]:
    """Return what pyproject.toml asks for: to run, to test and to build."""
    project = tomllib.loads(text_of(Path("pyproject.toml")))
    wanted: list[str] = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for group in project["dependency-groups"].values():
        wanted += group
    return wanted


def test_everything_that_the_project_asks_for_is_pinned() -> None:
    locked = pins()
    missing = [entry for entry in declared() if entry.split("==")[0] not in locked]
    assert missing == [], "run scripts/lock"


def test_exact_demands_and_the_lock_agree() -> None:
    exact = dict(entry.split("==") for entry in declared() if "==" in entry)
    assert exact["pysyncobj"] == "0.3.17"
    assert {name: pins()[name] for name in exact} == exact


def test_what_builds_pysyncobj_from_source_is_pinned_too() -> None:
    assert {"setuptools", "wheel", "hatchling", "editables"} <= set(pins())


def test_every_pin_has_hashes() -> None:
    entries = re.split(r"^(?=[a-z0-9])", text_of(Path("requirements.lock")), flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins())
    assert [entry.split()[0] for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []


def test_the_lock_names_no_index_and_no_host() -> None:
    text = text_of(Path("requirements.lock"))
    assert re.findall(r"^--?(?:i|f|index|extra|find|trusted).*$|https?:|file:|@ ", text, flags=re.MULTILINE) == []


def test_packages_are_listed_explicitly_for_the_build() -> None:
    project = tomllib.loads(text_of(Path("pyproject.toml")))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [
        "replica",
        "wal",
        "snapshots",
        "cluster",
    ]
