"""Consistency of the command line: global options, confirmations, and no API routes in messages."""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from forebay.cluster.cli.app import cli
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.cli.global_options import GlobalOption
from forebay.cluster.cli.session import DEADLINE_S, name_commands
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import API_PORT_OFFSET, Founding, create_site
from forebay.cluster.schemas import JobsAnswer, NodesAnswer
from forebay.cluster.system.clock import SystemClock
from tests.cluster.cli.double import Double, forebay, on_a_terminal
from tests.cluster.cli.test_commands import NODE
from tests.cluster.cli.test_errors_as_json import OURS
from tests.cluster.cli.test_what_is_imported import EVERY
from tests.ports import free_ports

ROOT = Path(__file__).parents[3]


def command_of(words: tuple[str, ...]) -> click.Command:
    command: click.Command = cli
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def own_options(words: tuple[str, ...]) -> set[str]:
    return {word for one in command_of(words).params for word in (*one.opts, *one.secondary_opts)}


ANYWHERE = {
    "--config": "/proc/nowhere",
    "--identity": "ada",
    "--user": "ada",
    "--stale": "",
    "--deadline": "3",
    "--json": "",
}


def test_every_outermost_option_but_version_is_global() -> None:
    given = {word for one in cli.params for word in one.opts if isinstance(one, GlobalOption)}
    assert given == ANYWHERE.keys() == own_options(()) - {"--version"}


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_every_command_accepts_global_options_at_any_position(words: tuple[str, ...]) -> None:
    for option, value in ANYWHERE.items():
        for place in range(len(words) + 1):
            if option in own_options(words[:place]) and option != "--json" and place:
                continue
            typed = [*words[:place], option, *([value] if value else []), *words[place:], "--help"]
            # Without a session, the options before the command create one, as in a separate process.
            result = CliRunner().invoke(cli, typed)
            assert result.exit_code == 0 and result.stdout.startswith("Usage: "), (typed, result.stderr)


@pytest.mark.parametrize("words", [("job",), ("queue",), ("run", "replica"), ("audit", "prune"), ("run", "helper")])
def test_minus_h_shows_help_for_every_command(words: tuple[str, ...]) -> None:
    run = [sys.executable, "-m", "forebay.cluster.cli", *words, "-h"]
    shown = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(f"Usage: forebay {' '.join(words)} ") and "-h, --help" in shown


@pytest.mark.parametrize("place", range(3))
def test_a_global_option_works_at_any_position(double: Double, place: int) -> None:
    double.answer("GET", "/v1/jobs.*", JobsAnswer(revision=1, jobs=(), truncated=False))
    environment = {**os.environ, "FOREBAY_CONFIG": "", "FOREBAY_IDENTITY": ""}
    given = ["--config", str(double.config.file), "--identity", "alice", "--stale", "--deadline", "9", "--json"]
    typed = ["queue"]
    typed[place:place] = given
    run = subprocess.run(
        [sys.executable, "-m", "forebay.cluster.cli", *typed], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert msgspec.json.decode(run.stdout, type=JobsAnswer) == JobsAnswer(revision=1, jobs=())
    (asked,) = double.asked
    assert "alice" in asked.identity and "stale=ok" in asked.target


# Destructive commands
# ------------------------------------------------------------------------------------------------------

DESTROYS = {
    ("policy", "account", "delete"): ["a"],
    ("buffer", "clear"): ["7"],
    ("cert", "retire-authority"): [],
    ("audit", "prune"): [],
    ("policy", "license", "delete"): ["a"],
    ("node", "lost"): ["n1"],
    ("cluster", "remove"): ["r2"],
    ("cluster", "replace"): ["r2"],
    ("policy", "partition", "delete"): ["a"],
    ("pool", "filesystem", "delete"): ["a"],
    ("pool", "delete"): ["a"],
    ("policy", "qos", "delete"): ["a"],
    ("policy", "reservation", "delete"): ["a"],
    ("slurm", "release"): ["a"],
    ("support", "session", "close"): ["7"],
    ("policy", "usage", "reset"): ["--qos", "a"],
}
"""Commands that ask for confirmation, with valid arguments."""

PLANNED = {("cluster", "recover"), ("backup", "restore")}
"""Commands that first show a plan; giving its ID confirms it, as --yes does."""

HERE = {("audit", "prune"), ("cert", "retire-authority")}
"""Commands that send no request."""

VERBS = set("clear close delete destroy discard forget prune purge remove reset retire-authority".split())


def test_exactly_the_destructive_commands_have_yes() -> None:
    asking = {words for words in EVERY if "--yes" in own_options(words)}
    assert asking == DESTROYS.keys() | PLANNED
    assert {words for words in EVERY if words[-1] in VERBS} <= asking


def test_verbs_for_creating_showing_and_deleting_are_consistent() -> None:
    verbs = {words[-1] for words in EVERY}
    assert {"list", "show", "create", "set", "delete"} <= verbs
    assert not {"rm", "get", "ls", "info", "modify"} & verbs


ASKED_FIRST = sorted(DESTROYS.keys() - HERE)


@pytest.mark.parametrize("words", ASKED_FIRST, ids=" ".join)
def test_without_a_terminal_destructive_commands_need_yes(double: Double, words: tuple[str, ...]) -> None:
    typed = (*words, *DESTROYS[words])
    refused = forebay(double.config, *typed)
    assert (refused.exit_code, refused.stdout, double.asked) == (ExitCode.BAD_INPUT, "", [])
    assert "add --yes" in refused.stderr and "?" in refused.stderr.splitlines()[0]
    forebay(double.config, *typed, "--yes")
    assert [one.method for one in double.asked] == ["POST"]


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("words", ASKED_FIRST, ids=" ".join)
def test_on_a_terminal_destructive_commands_ask_first(double: Double, words: tuple[str, ...], answer: str) -> None:
    with on_a_terminal(double.config, "--identity", "operator", *words, *DESTROYS[words]) as (ours, _, process):
        os.write(ours, f"{answer}\n".encode())
        _, said = process.communicate(timeout=60)
    assert "? [y/N]" in said.decode(), said
    assert [one.method for one in double.asked] == (["POST"] if answer == "y" else [])
    if answer == "n":
        assert process.returncode == ExitCode.INTERRUPTED and b"nothing was changed" in said


def test_the_former_authority_is_trusted_until_confirmation(double: Double) -> None:
    authority = double.config.tls.authority.read_bytes()
    refused = forebay(double.config, "cert", "retire-authority")
    assert refused.exit_code == ExitCode.BAD_INPUT and "add --yes" in refused.stderr
    retired = forebay(double.config, "cert", "retire-authority", "--yes", "--json")
    assert msgspec.json.decode(retired.stdout)["retired"] == 0
    assert double.config.tls.authority.read_bytes() == authority


# Reasons ------------------------------------------------------------------------------------------------------------

REASON = "disk 3 of the second shelf fails its self-test since Monday;\nwaits for the vendor \x1b[31mand a new one"


def test_a_long_reason_is_shortened_in_lists_and_whole_in_show(double: Double) -> None:
    node = msgspec.structs.replace(NODE, name="n1", state="DRAINED", reason=REASON)
    double.answer("GET", "/v1/nodes", NodesAnswer(revision=1, nodes=(node, NODE)))
    listed = forebay(double.config, "node", "list", columns=100).stdout.splitlines()
    assert len(listed) == 3 and max(map(len, listed)) <= 100
    assert listed[1].startswith("n1 ") and listed[1].endswith("…")
    for columns in (80, 100, None):
        shown = forebay(double.config, "node", "show", "n1", columns=columns).stdout
        assert "\x1b" not in shown
        words = "".join(shown.split())
        assert "".join(REASON.replace("\n", "\\n").replace("\x1b", "\\x1b").split()) in words
    missing = forebay(double.config, "node", "show", "n9")
    assert missing.exit_code == ExitCode.NOT_FOUND and "use one of: n1, " in missing.stderr


# No routes ----------------------------------------------------------------------------------------------------------


def sentences(path: Path) -> Iterator[str]:
    """Yield the texts of a module with a blank and a route, except docstrings and patterns."""
    tree = ast.parse(path.read_text())
    skipped = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a docstring
            skipped |= {node, node.value}
        if isinstance(node, ast.AnnAssign | ast.Assign) and "_COMMANDS" in ast.unparse(node).partition("=")[0]:
            skipped |= set(ast.walk(node))
        if isinstance(node, ast.JoinedStr):
            skipped |= set(node.values)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if "/v1/" in text and " " in text.strip():
            yield text


def test_every_api_remedy_is_translated_to_commands() -> None:
    said = [text for room in ("api", "client", "server") for path in sorted((ROOT / "cluster" / room).rglob("*.py"))
            for text in sentences(path)]  # fmt: skip
    assert len(said) > 10
    assert [text for text in said if "/v1/" in name_commands(text)] == []


def test_no_service_message_names_a_route() -> None:
    rooms = ("agent", "audit", "cli", "config", "drill", "security", "slurm", "system")
    paths = [path for room in rooms for path in sorted((ROOT / "cluster" / room).rglob("*.py"))]
    paths += sorted((ROOT / "replica").rglob("*.py"))
    assert {str(path): found for path in paths if (found := [*sentences(path)])} == {}


def test_no_help_names_a_route() -> None:
    for words in ((), *EVERY):
        command = command_of(words)
        texts = [command.help or "", *(getattr(one, "help", None) or "" for one in command.params)]
        assert "/v1/" not in " ".join(texts), words


def test_a_route_missing_on_a_replica_is_reported_as_an_older_release(double: Double) -> None:
    path = "/v1/usage"
    double.refuse("GET", path, 404, "unknown_route", f"there is nothing at {path}", remedy="see /v1/openapi.json")
    result = forebay(double.config, "policy", "usage", "list")
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "does not have this command" in result.stderr and "/v1/" not in result.stderr


# No replica answers
# -------------------------------------------------------------------------------------------------------

LOCAL = {
    ("node", "buffers"), ("node", "receipt"), ("cert", "issue"), ("cert", "list"), ("cert", "renew-authority"),
    ("cert", "retire-authority"), ("cluster", "check"), ("support", "completion"), ("support", "debug"),
    ("cluster", "init"), ("audit", "archive"), ("audit", "dump"), ("audit", "prune"), ("audit", "redecide"),
    ("audit", "replay"), ("audit", "restore"), ("audit", "retain"), ("audit", "verify"), ("pool", "filesystem", "mark"),
    ("cluster", "recover"), ("audit", "report"), ("audit", "jobs"), ("slurm", "install"), ("backup", "inspect"),
    ("backup", "restore"), ("top",), ("cluster", "up"), ("audit", "whatif"), ("audit", "witness", "key"),
    ("audit", "witness", "list"), *(words for words in EVERY if words[0] == "run"),
}  # fmt: skip
"""Commands that need no answer of a replica, or that report each missing answer (`check`, `debug`, `top`)."""

ASKING = sorted(
    words
    for words in EVERY
    if words not in LOCAL and (not isinstance(one := command_of(words), click.Group) or one.invoke_without_command)
)
ARGUMENTS = {
    "job_id": "7", "job_ids": "7", "job": "7", "size": "1GiB", "settings": "A=1", "since": "1",
    "until": "2", "quantity": "1GiB", "granularity": "1MiB", "peer": "h:1", "api": "h:2", "level": "2", "time": "1",
}  # fmt: skip
"""Example value of an argument or required option, by name; otherwise the type determines the value."""

MORE = {
    ("pool", "set"): ["--quantity=1GiB"],
    ("pool", "filesystem", "set"): ["--quota=none"],
    ("job", "update"): ["--nice=1"],
    ("cluster", "update"): ["--api=h:1"],
    ("policy", "usage", "reset"): ["--qos=a"],
}


def sample(parameter: click.Parameter, file: Path) -> str:
    kind = parameter.type
    if parameter.name in ARGUMENTS:
        return ARGUMENTS[parameter.name]
    if isinstance(kind, click.Choice):
        return str(next(iter(kind.choices)))
    if isinstance(kind, click.types.IntParamType):
        return "1"
    if isinstance(kind, click.Path):
        return str(file if kind.file_okay else file.parent)
    return str(file) if parameter.name == "scripts" else "r1"


def typed_for(words: tuple[str, ...], file: Path) -> list[str]:
    typed = [*words, *MORE.get(words, []), *(["--yes"] if "--yes" in own_options(words) else [])]
    for one in command_of(words).params:
        if isinstance(one, click.Argument):
            typed.append(sample(one, file))
        elif one.required:
            typed += [one.opts[0], sample(one, file)]
    return typed


@pytest.fixture(scope="module")
def nobody(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Cluster of three replicas, none of which runs."""
    founding = Founding(replicas=3, agents=1, base_port=free_ports(API_PORT_OFFSET + 3)[0])
    return create_site(tmp_path_factory.mktemp("nobody") / "site", founding, clock=SystemClock())


@pytest.mark.parametrize("words", ASKING, ids=" ".join)
def test_refused_connections_fail_before_the_deadline(
    nobody: Config, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("#!/bin/sh\n" if words == ("submit",) else "GetSysState=/bin/true\n")
    # Retry period while no replica listens: shortened, because every command would wait for it here.
    monkeypatch.setattr("forebay.cluster.client.UNREACHABLE_S", 0.05)
    began = time.monotonic()
    result = forebay(nobody, *typed_for(words, file))
    assert result.exit_code == ExitCode.UNREACHABLE, (result.stdout, result.stderr)
    assert time.monotonic() - began < DEADLINE_S / 2
