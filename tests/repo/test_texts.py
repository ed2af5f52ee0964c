"""What no committed file says: where packages were fetched from, and where somebody's checkout was."""

import re
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, repository_files, text_files, text_of

# Put together here, so that this file does not name them either.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("deb", "debian", "org"),
        ("npmjs", "org"),
        ("crates", "io"),
        ("golang", "org"),
        ("conda", "anaconda", "org"),
    ]
)

MACHINE_PATH = re.compile(
    r"(?<![\w.%}~-])/(?:home|Users|root|work)/(?!(?:a|ann|alice|bob|carol|me|you|user)\b|%u|\$|\{|<)[\w.-]+"
)
"""Paths that exist on one machine only; examples use the users a, ann, alice, bob, carol, me, you and user."""

MARKDOWN_LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)")

PACKAGES_WITH_DESIGN = ("replica", "wal", "snapshots", "cluster")


def machine_paths(text: str) -> list[str]:
    """Return the absolute paths of somebody's machine in a text."""
    return MACHINE_PATH.findall(text)


@pytest.mark.parametrize(
    "text", ["cd " + "/work" + "/main", "'/home" + "/jane/x'", "/root" + "/.cache", "=/Users" + "/jane"]
)
def test_a_path_of_one_machine_is_recognised(text: str) -> None:
    assert machine_paths(text)


@pytest.mark.parametrize(
    "text", ["docs/work/x", "/home/%u/data", "/home/alice/data", "./root/x", "{tmp}/work/x", "/var/tmp/x"]
)
def test_paths_that_mean_no_machine_are_left_alone(text: str) -> None:
    assert machine_paths(text) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    found = {str(path): machine_paths(text_of(path)) for path in text_files()}
    assert {path: paths for path, paths in found.items() if paths} == {}


def test_no_file_names_the_host_of_a_package_registry() -> None:
    found = [f"{path}: {host}" for path in text_files() for host in REGISTRY_HOSTS if host in text_of(path)]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES_WITH_DESIGN)
def test_every_package_has_its_design(package: str) -> None:
    text = text_of(Path(package) / "DESIGN.md").lower()
    missing = [part for part in ("purpose", "invariants", "lifecycle", "trade-offs") if part not in text]
    assert missing == [], f"{package}/DESIGN.md"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"])
def test_the_documents_at_the_top_are_there(name: str) -> None:
    assert len(text_of(Path(name))) > 200


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in text_files():
        if path.suffix == ".md":
            targets = MARKDOWN_LINK.findall(text_of(path))
            broken += [f"{path}: {target}" for target in targets if not (ROOT / path.parent / target).exists()]
    assert broken == []


def test_pages_of_docs_that_files_name_exist() -> None:
    missing = []
    for path in text_files():
        if path.parts[:2] != ("tests", "golden"):  # which hold messages of their day
            named = set(re.findall(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|sh|conf)\b", text_of(path)))
            missing += [f"{path}: {name}" for name in sorted(named) if not (ROOT / name).exists()]
    assert missing == []


def test_what_documents_call_a_script_exists() -> None:
    missing = []
    for path in text_files():
        if path.suffix == ".md":
            named = set(re.findall(r"(?<![\w/])scripts/([a-z][a-z0-9_-]*)", text_of(path)))
            missing += [f"{path}: scripts/{name}" for name in sorted(named) if not (ROOT / "scripts" / name).exists()]
    assert missing == []


def test_no_file_is_large_or_ends_without_a_newline() -> None:
    odd = []
    for path in repository_files():
        data = (ROOT / path).read_bytes()
        if len(data) > 1024 * 1024:
            odd.append(f"{path}: {len(data)} bytes; generate it in the test")
        if data and b"\0" not in data and path.suffix in (".py", ".md", ".toml", ".lock") and not data.endswith(b"\n"):
            odd.append(f"{path}: no newline at the end")
    assert odd == []
