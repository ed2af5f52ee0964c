"""Files that hold state, history, reports or configuration are made in one way, which lets nobody else read them."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.repo.tree import modules, text_of

MAKES_THEM: Final = "cluster/system/private_files.py"

OTHER: Final = {
    "cluster/agent/files/images.py": "a file of /sys",
    "cluster/drills/prober.py": "a file of /proc",
    "cluster/cli/group.py": "a formatter of help, no file",
    "cluster/system/job_process.py": "a file of /proc",
}
"""Modules that write files in another way, and which."""

OTHER_DIRECTORIES: Final = {
    "cluster/agent/runtime/state_directory.py": "above the agent's directory, where users pass to their scripts",
    "cluster/agent/files/paths.py": "a destination of a user, made with the user's rights",
    "cluster/agent/processes/cgroups.py": "cgroups",
    "cluster/agent/transfer/transfer.py": "a destination of a user, made with the user's rights",
    "cluster/gateway/service.py": "the directory of a socket that all accounts of the machine use",
    "cluster/slurm/install.py": "a directory of slurmctld's configuration",
    "snapshots/store.py": "beneath a replica's directory, which is private",
}
"""Modules that make directories that others may enter, and which."""

PRIVATE_NAMES: Final = frozenset({"_PRIVATE", "DIRECTORY_MODE", "PRIVATE_MODE", "ARCHIVE_MODE", "mode"})
"""Names that modes of 0700 have; `mode` is an argument that is one of them."""


def writes(source: str) -> Iterator[int]:
    """Yield the lines that make a file whose mode only the umask bounds, or write through a link."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if name in ("write_text", "write_bytes", "touch") and "." in called:
            yield node.lineno
        elif called == "os.open":
            flags = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
            has_mode = len(node.args) > 2 or any(keyword.arg == "mode" for keyword in node.keywords)
            if "O_CREAT" in flags and not has_mode:
                yield node.lineno
        elif name == "open" and called != "os.open":
            given = [*node.args[1 if called == "open" else 0 :][:1]]
            given += [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
            modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            # A descriptor that is opened has a mode already, which the rule for os.open sees.
            is_descriptor = bool(node.args) and ast.unparse(node.args[0]).startswith(("os.open(", "descriptor"))
            if not is_descriptor and any(set(mode) & set("wax+") and set(mode) <= set("wax+brt") for mode in modes):
                yield node.lineno


def makes_directories(source: str) -> Iterator[int]:
    """Yield the lines that make a directory with another mode than 0700, or its parents with none."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if name == "makedirs":
            yield node.lineno
        elif name == "mkdir":
            modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
            modes += node.args[1:2] if called == "os.mkdir" else node.args[:1]
            is_private = any(
                (isinstance(mode, ast.Constant) and mode.value == 0o700) or ast.unparse(mode) in PRIVATE_NAMES
                for mode in modes
            )
            if not is_private or any(keyword.arg == "parents" for keyword in node.keywords):
                yield node.lineno


def test_nothing_writes_a_file_that_others_may_read() -> None:
    found = {str(path): lines for path in modules() if (lines := list(writes(text_of(path))))}
    unknown = {path: lines for path, lines in found.items() if path not in OTHER}
    assert unknown == {}, (
        "use replace_private or new_private_file of forebay.cluster.system, or say here what else is written"
    )
    assert set(OTHER) <= set(found), "remove the module from the list"
    assert MAKES_THEM not in found


def test_nothing_makes_a_directory_that_others_may_enter() -> None:
    found = {str(path): lines for path in modules() if (lines := list(makes_directories(text_of(path))))}
    unknown = {path: lines for path, lines in found.items() if path not in OTHER_DIRECTORIES}
    assert unknown == {}, (
        "use make_private_directory of forebay.cluster.system, or say here who else enters the directory"
    )
    assert set(OTHER_DIRECTORIES) <= set(found), "remove the module from the list"


@pytest.mark.parametrize(
    "source",
    [
        'open("a", "w")', 'open("a", mode="ab")', 'open("a", "r+")', 'path.open("w", encoding="ascii")',
        'path.open("xb")',
        'path.write_text("a")', 'path.write_bytes(b"a")', "path.touch()", 'os.open("a", os.O_WRONLY | os.O_CREAT)',
    ],
)  # fmt: skip
def test_the_rule_for_files_finds(source: str) -> None:
    assert list(writes(source)) == [1]


@pytest.mark.parametrize(
    "source",
    ['open("a")', 'open("a", "rb")', "path.open()", 'os.open("a", os.O_CREAT, 0o600)'],
)
def test_the_rule_for_files_lets_pass(source: str) -> None:
    assert list(writes(source)) == []


@pytest.mark.parametrize(
    "source",
    ["path.mkdir()", "path.mkdir(mode=0o755)", "path.mkdir(mode=0o700, parents=True)", 'os.makedirs("a", 0o700)',
     'os.mkdir("a")', 'os.mkdir("a", 0o711, dir_fd=1)'],
)  # fmt: skip
def test_the_rule_for_directories_finds(source: str) -> None:
    assert list(makes_directories(source)) == [1]


def test_every_exception_is_a_module() -> None:
    assert set(OTHER) | set(OTHER_DIRECTORIES) <= {str(path) for path in modules()} and Path(MAKES_THEM) in modules()
