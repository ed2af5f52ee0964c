"""Imports dominate the cost of a command, so each command imports only what it needs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from forebay.cluster.cli.app import cli
from forebay.cluster.cli.tree import TREE, Leaf, paths
from tests.cluster.cli.double import Double
from tests.cluster.cli.views import PENDING

ROOT = Path(__file__).parents[3]

HEAVY = frozenset(
    """
    aiohttp asyncio concurrent cryptography email http importlib.metadata logging lupa lmdb multidict pysyncobj rich
    subprocess uvloop xml yarl
    """.split()
)
"""Modules whose import, with dependencies, takes longer than a request to the cluster."""

DEFERRED = frozenset(
    "ast dis gettext immutables inspect ipaddress locale platform textwrap tokenize".split()
) | frozenset({"msgspec.inspect", "msgspec.toml", "msgspec.yaml"})
"""Modules that click, msgspec and others import, and their dependencies; placeholders replace them."""

UNUSED = frozenset(
    """
    forebay.cluster.agent forebay.cluster.api forebay.cluster.audit forebay.cluster.client.channel
    forebay.cluster.client.events forebay.cluster.client.exchange forebay.cluster.consensus
    forebay.cluster.schemas.channel_frames forebay.cluster.security.pki forebay.cluster.server
    forebay.cluster.system.eventloop forebay.replica.decide forebay.replica.fold forebay.replica.messages
    forebay.replica.operations forebay.replica.scheduler forebay.replica.state forebay.replica.views
    forebay.snapshots forebay.wal
    """.split()
)
"""Packages and modules of Forebay that a simple request does not need."""

FOR_HELP = (
    HEAVY
    | UNUSED
    | frozenset(
        (
            "forebay.cluster.client",
            "forebay.cluster.cli.commands",
            "forebay.cluster.cli.text",
            "forebay.replica",
            "msgspec",
            "ssl",
        )
    )
)
"""Modules that the outermost help does not need either."""


def commands(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    for name in sorted(group.commands):
        command = group.commands[name]
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        yield (*before, name)


EVERY = tuple(commands(cli))


def command_of(words: tuple[str, ...]) -> click.Command:
    command: click.Command = cli
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def imported(words: list[str], **environment: str) -> frozenset[str]:
    """Return the modules that are loaded when the command has ended."""
    program = (
        "import atexit, sys\n"
        "from forebay.cluster.cli.startup import _LazyModule\n"
        "def loaded():\n"
        "    return sorted(name for name, module in sys.modules.items() if not isinstance(module, _LazyModule))\n"
        "atexit.register(lambda: print(*loaded(), file=sys.stderr))\n"
        f"sys.argv[1:] = {words!r}\n"
        "from forebay.cluster.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    last = found.stderr.splitlines()[-1].split()
    assert "click" in last, found.stderr
    return frozenset(last)


def test_decoded_types_have_no_unresolved_annotations() -> None:
    """msgspec evaluates annotations that are texts, class by class, at the first decoding."""
    for file in (*ROOT.glob("cluster/schemas/*.py"), ROOT / "cluster/config/access.py"):
        assert "from __future__ import annotations" not in file.read_text(), file


def among(loaded: frozenset[str], unwanted: frozenset[str]) -> set[str]:
    return {name for name in loaded if any(name == one or name.startswith(f"{one}.") for one in unwanted)}


def test_the_outermost_help_imports_no_command() -> None:
    assert among(imported(["--help"]), FOR_HELP) == set()


def test_the_outermost_help_matches_each_commands_first_sentence() -> None:
    for entries in TREE.values():
        for name, entry in entries.items():
            if isinstance(entry, Leaf):
                assert entry.summary == (cli.commands[name].help or "").partition("\n")[0]


def test_command_names_match_the_command_tree() -> None:
    assert set(EVERY) >= set(paths())
    for words in paths():
        command: click.Command = cli
        for word in words:
            assert isinstance(command, click.Group)
            command = command.commands[word]
        assert command.name == words[-1] or words[0] == "policy", words


@pytest.mark.parametrize("words", [(), *(words for words in EVERY if isinstance(command_of(words), click.Group))])
def test_each_group_help_fits_on_a_screen(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": "80"}, prog_name="forebay").stdout.splitlines()
    assert len(shown) <= 40 and max(map(len, shown)) <= 80
    group = command_of(words)
    assert isinstance(group, click.Group)
    for name in group.commands:
        lines = [line for line in shown if line.startswith(f"  {name} ")]
        assert len(lines) == 1 and not lines[0].endswith("..."), name


REQUESTS = [
    ("queue",),
    ("queue", "--json"),
    ("job", "show", "42"),
    ("queue",),
    ("submit", "job.sh"),
    ("submit", "--hold", "job.sh", "job.sh"),
    ("job", "hold", "42"),
    ("cancel", "42", "43"),
    ("job", "why", "42"),
    ("buffer", "list"),
    ("pool", "list"),
    ("node", "list"),
    ("transfer", "list"),
    ("policy", "account", "list"),
    ("support", "session", "list"),
    ("cluster", "clock"),
]


@pytest.mark.parametrize("words", REQUESTS, ids=" ".join)
def test_a_simple_request_imports_no_event_loop_or_renderer(
    words: tuple[str, ...], double: Double, tmp_path: Path
) -> None:
    """This includes rejections: the double knows no job, and a rejection is printed."""
    (tmp_path / "job.sh").write_text("#!/bin/sh\n")
    given = [str(tmp_path / word) if word == "job.sh" else word for word in words]
    double.answer("GET", "/v1/jobs/42", PENDING)
    loaded = imported(["--config", str(double.config.file), *given])
    assert double.asked, "it asked nobody"
    assert among(loaded, HEAVY | UNUSED | DEFERRED) == set()


def test_no_command_module_imports_the_async_client_or_a_renderer() -> None:
    """The imports of a module also slow down the other commands in it."""
    program = (
        "import sys\n"
        "from forebay.cluster.cli.app import cli\n"
        "def walk(group, *before):\n"
        "    for name in sorted(group.commands):\n"
        "        command = group.commands[name]\n"
        "        print(*before, name, *({'aiohttp', 'rich', 'uvloop'} & sys.modules.keys()), sep='|')\n"
        "        if hasattr(command, 'commands'):\n"
        "            walk(command, *before, name)\n"
        "walk(cli)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == sorted("|".join(words) for words in EVERY)
