"""The tree under test: which files belong to the repository, and where its parts are."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.repo.rules import Code, parse

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("replica", "wal", "snapshots", "cluster")
NAME = "forebay"
"""Import name. Its directory has a link to each package, and the files of OWN_FILES."""

OWN_FILES = ("__init__.py", "py.typed", "testing.py")
"""Files of the import name itself: the public Python API."""

IGNORED_DIRECTORIES = {".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "__pycache__"}
"""Left out where git cannot be asked (an unpacked archive): what .gitignore names."""


@cache
def repository_files() -> tuple[Path, ...]:
    """Return every file that is in the repository or would be added to it, relative to ROOT, sorted."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        files = [Path(name) for name in listing.split("\0") if name]
    except (subprocess.CalledProcessError, FileNotFoundError):
        files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file() and not path.is_symlink()]
        files = [path for path in files if not IGNORED_DIRECTORIES.intersection(path.parts)]
    return tuple(sorted({path for path in files if (ROOT / path).is_file()}))


def text_of(path: Path) -> str:
    """Return a file's text; `path` is relative to ROOT."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def code_of(path: Path) -> Code:
    """Return the facts about a module, parsed once a process; `path` is relative to ROOT."""
    return parse(text_of(path))


def text_files() -> list[Path]:
    """Return every file that is text: golden ledgers and the like hold bytes."""
    return [path for path in repository_files() if b"\0" not in (ROOT / path).read_bytes()]


def modules(*packages: str) -> list[Path]:
    """Return the modules of these packages (all four if none is named)."""
    wanted = packages or PACKAGES
    return [path for path in repository_files() if path.parts[0] in wanted and path.suffix == ".py"]


def scripts() -> list[Path]:
    """Return what people and CI run: every file directly in scripts/, and .ci/run."""
    return [path for path in repository_files() if path.parent == Path("scripts") or path == Path(".ci/run")]


def python_files() -> list[Path]:
    """Return every file of Python."""
    return [path for path in repository_files() if path.suffix == ".py"]


def dotted(path: Path) -> str:
    """Return a module's dotted name, which is below forebay for the packages."""
    parts = path.with_suffix("").parts
    if parts[0] in PACKAGES:
        parts = (NAME, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def copy_packages(tree: Path) -> None:
    """Copy the packages, and the links below their import name, into a directory."""
    for package in (NAME, *PACKAGES):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tree / package, symlinks=True, ignore=skipped)


def is_standard(module: str) -> bool:
    """Say whether the first part of a dotted name is a module of the standard library."""
    return module.split(".")[0] in sys.stdlib_module_names
