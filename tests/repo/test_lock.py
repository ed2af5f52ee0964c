"""The lock holds everything that is installed, exactly, with hashes, and says nothing about where it came from."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.repo.tree import text_of

PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^ ;\\]+)(?P<rest>.*)$", re.MULTILINE)


LOCKS = ("requirements.lock", "requirements-otel.lock", "requirements-docs.lock")


def pins(lock: str = "requirements.lock") -> dict[str, str]:
    """Return the pinned versions by name."""
    return {match["name"]: match["version"] for match in PIN.finditer(text_of(Path(lock)))}


def declared() -> list[str]:
    """Return what pyproject.toml asks for: to run, to test and to build."""
    project = tomllib.loads(text_of(Path("pyproject.toml")))
    wanted: list[str] = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for name, extra in project["project"]["optional-dependencies"].items():
        wanted += [entry for entry in extra if name != "otel" and not entry.startswith("forebay[")]
    for group in ("dev", "build"):
        wanted += project["dependency-groups"][group]
    return wanted


def test_everything_that_the_project_asks_for_is_pinned() -> None:
    locked = pins()
    missing = [entry for entry in declared() if entry.split("==")[0] not in locked]
    assert missing == [], "run scripts/lock"


@pytest.mark.parametrize("name", ["otel", "docs"])
def test_the_other_locks_pin_what_is_wanted_and_agree_with_the_first(name: str) -> None:
    project = tomllib.loads(text_of(Path("pyproject.toml")))
    wanted = {**project["project"]["optional-dependencies"], **project["dependency-groups"]}[name]
    beside, locked = pins(f"requirements-{name}.lock"), pins()
    assert set(wanted) <= beside.keys() and not set(wanted) & locked.keys()
    assert {name: beside[name] for name in beside.keys() & locked.keys()} == {
        name: locked[name] for name in beside.keys() & locked.keys()
    }


def test_exact_demands_and_the_lock_agree() -> None:
    exact = dict(entry.split("==") for entry in declared() if "==" in entry)
    assert exact["pysyncobj"] == "0.3.17"
    assert {name: pins()[name] for name in exact} == exact


def test_what_builds_pysyncobj_from_source_is_pinned_too() -> None:
    assert {"setuptools", "wheel", "hatchling", "editables"} <= set(pins())


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_hashes(lock: str) -> None:
    entries = re.split(r"^(?=[a-z0-9])", text_of(Path(lock)), flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins(lock))
    assert [entry.split()[0] for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_names_no_index_and_no_host(lock: str) -> None:
    text = text_of(Path(lock))
    assert re.findall(r"^--?(?:i|f|index|extra|find|trusted).*$|https?:|file:|@ ", text, flags=re.MULTILINE) == []


def test_packages_are_listed_explicitly_for_the_build() -> None:
    project = tomllib.loads(text_of(Path("pyproject.toml")))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["forebay"]
