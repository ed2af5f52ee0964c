"""Commands named in messages exist, and are complete if they have arguments.

Users type a remedy as it is printed, so its options must exist and none may be missing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from forebay.cluster.cli.app import cli

ROOT = Path(__file__).parents[3]
PACKAGES = ("cluster", "replica", "wal", "snapshots")

VALUE = "\x00"
"""Example value of an f-string's placeholder."""

NAMED = re.compile(r"\bforebay ([a-z][a-z-]*(?: [^;`'\"(),:]*)?)")
PLACEHOLDER = re.compile(r"[A-Z][A-Z:]+")

UNKNOWN_YET = {
    f"drill abort {VALUE} --reason TEXT": "the reason is the reader's",
    f"run witness --key {VALUE} --listen ADDRESS --keys FILE": "the reader knows where it listens and the keys",
    "run agent --name NAME --mover": "any machine that mounts the filesystem",
    f"cert issue {VALUE} --role ROLE": "a name alone does not say what its holder may do",
    f"cert issue NAME --role {VALUE}": "it is to be a name that nobody has",
    "cert issue NAME --role gateway": "a gateway's certificate has any name",
    "cert issue NAME --role replica --host HOST --replace": "the replica at the other end did not prove a name",
    "cert issue NAME --role user --into DIR": "the operator chooses both",
    f"audit dump --job {VALUE} --archive DIR": "the archive is not at the cluster",
    "audit dump --data DIRECTORY": "the packages below do not know the directory",
    "cluster replace NAME": "a table of conditions, for any replica",
    "pool create NAME --unit count --quantity N": "the pool does not exist yet",
    "run replica --name NAME --first-start": "a table of conditions, for any replica",
    "slurm release NAME": "the reader knows which scheduler is unused",
    "submit SCRIPT && forebay queue": "an example",
    "transfer receipt JOB": "how the command is used",
}
"""Commands with a placeholder that only the reader can replace -> reason."""


RECORDED = {
    ("replica/decide/drills.py", f"drill abort {VALUE}"): "it lacks --reason TEXT",
}
"""Rejections in the golden ledger to correct when it is written again -> their fault."""


class Said(NamedTuple):
    place: str
    text: str


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every string that is no docstring; `VALUE` for what is formatted into it."""
    skipped = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, re.sub(r"\{[a-z_]+\}|%s|\\1", VALUE, node.value)


def said() -> Iterator[Said]:
    """Yield each command named in a string of the product."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for line, text in texts(ast.parse(file.read_text())):
                for found in NAMED.finditer(text):
                    if (str(file.relative_to(ROOT)), found[1].strip()) not in RECORDED:
                        yield Said(f"{file.relative_to(ROOT)}:{line}", found[1].strip())


def fault_of(text: str) -> str:
    """Return why a command is invalid; empty if it is valid or only prose."""
    words = [word.rstrip(".") for word in text.split()]
    found: click.Command = cli
    while words and isinstance(found, click.Group) and words[0] in found.commands:
        found = found.commands[words.pop(0)]
    if found is cli:
        return ""  # `forebay` is the subject of a sentence
    if isinstance(found, click.Group) and words[:1] == [VALUE]:
        return ""  # which one is the program's to say
    if isinstance(found, click.Group) and words:
        return f"there is no command {words[0]!r} in {found.name}"
    options = {
        name: one for one in found.params if isinstance(one, click.Option) for name in (*one.opts, *one.secondary_opts)
    }
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [name for name in given if name not in options and name not in COMMON]
    if unknown:
        return f"it has no option {unknown[0]}"
    is_whole = bool(given) or VALUE in text
    if not is_whole:
        return ""
    missing = [one.opts[0] for one in options.values() if one.required and not set(one.opts) & set(given)]
    return f"it needs {missing[0]}" if missing else ""


COMMON = frozenset({"--json", "--help"})
FOUND = sorted(set(said()))


def test_messages_name_many_commands() -> None:
    assert len(FOUND) > 200 and sum(VALUE in one.text for one in FOUND) > 50


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one.place} {one.text.replace(VALUE, '…')[:40]}")
def test_every_command_named_in_a_message_is_valid(one: Said) -> None:
    assert fault_of(one.text) == "", one


def test_placeholders_are_printed_only_for_values_of_the_reader() -> None:
    found = [one for one in FOUND if any(PLACEHOLDER.fullmatch(word) for word in one.text.split())]
    unknown = {one.text for one in found}
    assert [one for one in found if one.text not in UNKNOWN_YET] == []
    assert UNKNOWN_YET.keys() <= unknown, "no row is left over"


DRILLS = ROOT / "cluster" / "drills"


def typed_by_drills() -> Iterator[Said]:
    """Yield each command that a drill on a copy runs."""
    for file in sorted(DRILLS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "audit"
            args = (
                node.args if isinstance(node, ast.Call) and is_call else node.elts if isinstance(node, ast.List) else []
            )
            words = [str(one.value) if isinstance(one, ast.Constant) else VALUE for one in args]
            if words and words[0] != VALUE and (is_call or words[0] in cli.list_commands(click.Context(cli))):
                yield Said(f"{file.relative_to(ROOT)}:{node.lineno}", " ".join(words))


TYPED_BY_DRILLS = sorted(set(typed_by_drills()))


@pytest.mark.parametrize("one", TYPED_BY_DRILLS, ids=lambda one: f"{one.place} {one.text.replace(VALUE, '…')[:40]}")
def test_every_command_typed_by_a_drill_exists(one: Said) -> None:
    first = one.text.split()[0]
    assert first in cli.list_commands(click.Context(cli)) and fault_of(one.text) == "", one


def test_the_scan_finds_commands_in_drills() -> None:
    assert len(TYPED_BY_DRILLS) >= 5


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("cluster add r1", ""),
        ("cluster add \x00", "it needs --peer"),
        ("cluster add \x00 --peer \x00 --api \x00", ""),
        ("cluster members", ""),
        ("cluster forget \x00", "there is no command 'forget' in cluster"),
        ("drill plan \x00 --holds 3", "it has no option --holds"),
        ("stops the job", ""),
    ],
)
def test_the_check_finds_invalid_commands(text: str, fault: str) -> None:
    assert fault_of(text) == fault
