"""The reference and the help: complete, current, and honest about exit codes."""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import cluster.serve
from cluster.cli.app import cli
from cluster.cli.audit_commands import audit_commands, words_of
from cluster.cli.commands.submit import submit
from cluster.cli.exits import MEANINGS, SERVE_MEANINGS, ExitCode
from cluster.cli.submission.sbatch_options import OPTIONS, UNNAMED_FIELDS, Treatment
from tests.repo.cli_reference import render

ROOT = Path(__file__).parents[3]


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands(cli))


def test_the_document_holds_what_the_commands_say_now() -> None:
    assert render().strip("\n") in (ROOT / "docs" / "cli.md").read_text(), "run scripts/generate"


def test_the_reference_names_every_command_every_option_and_every_exit_code() -> None:
    text = render()
    for path, command in ALL.items():
        assert f"### `forebay {' '.join(path)}`" in text
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert all(option in text for option in parameter.opts)
    for code in ExitCode:
        assert f"| {int(code)} | {MEANINGS[code]} |" in text
    for option in OPTIONS:
        assert f"| `{option.long}` |" in text


def test_the_reference_is_the_same_in_every_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    wide = render()
    monkeypatch.setenv("COLUMNS", "40")
    assert render() == wide


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_and_every_option_says_what_it_does(path: tuple[str, ...]) -> None:
    command = ALL[path]
    assert command.help
    assert [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not option.help and not option.hidden
    ] == []


def test_every_option_of_a_script_is_an_option_of_the_command_line_too() -> None:
    known = {name for parameter in submit.params for name in (*parameter.opts, *parameter.secondary_opts)}
    carried_out = {option for option in OPTIONS if option.treatment is Treatment.CARRIED_OUT}
    written = {option.long for option in carried_out if option.field not in UNNAMED_FIELDS}
    assert written - known == {"--workdir"}, "which no release of sbatch has that scripts are written for"


def test_the_commands_of_the_issue_are_all_there() -> None:
    wanted = """init up serve agent submit completion; job list show cancel hold release history why; pool list set;
        buffer list; node list drain resume; member list status; ledger verify replay dump; snapshot save inspect"""
    top, *groups = wanted.split(";")
    expected = {(name,) for name in top.split()}
    for group in groups:
        name, *inner = group.split()
        expected |= {(name,), *((name, one) for one in inner)}
    assert expected <= set(ALL)


@pytest.mark.parametrize(
    "words",
    [
        ["ledger", "verify", "--data", "r1"],
        ["ledger", "verify", "--name", "r1", "--json"],
        ["ledger", "replay", "--data=-odd", "--at", "7", "--from-snapshot", "a b", "--expect", "00"],
        ["ledger", "dump", "--data", "x", "--from", "2", "--limit", "3"],
        ["snapshot", "inspect", "--check", "--", "--odd.fbs"],
        ["report", "html", "--data=r1", "--from=10:03", "--job=1", "--job=42", "-o", "-odd.html"],
    ],
)
def test_words_that_are_passed_on_mean_the_same_there(words: list[str]) -> None:
    seen: list[tuple[tuple[str, ...], dict[str, object]]] = []
    groups = audit_commands(lambda path, options: seen.append((path, options)))
    command = next(command for command in groups[words[0]] if command.name == words[1])
    command.main(words[2:], standalone_mode=False)
    command.main(words_of(command, seen[0][1]), standalone_mode=False)
    assert seen[0] == seen[1]
    assert seen[0][0] == tuple(words[:2])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "whatif",
            ["--data=-odd", "--from", "7d", "--set=Pool=fast:+1GiB", "--set", "MaxPasses=3", "--policy=-a b", "--json"],
        ),
        ("recover", ["--name", "r1", "--confirm=-5f", "--leave-behind", "r2", "--leave-behind=r3", "--by=a b"]),
    ],
)
def test_words_of_a_command_without_a_group_mean_the_same_there(name: str, words: list[str]) -> None:
    seen: list[tuple[tuple[str, ...], dict[str, object]]] = []
    commands = audit_commands(lambda path, options: seen.append((path, options)))[""]
    command = next(command for command in commands if command.name == name)
    command.main(words, standalone_mode=False)
    command.main(words_of(command, seen[0][1]), standalone_mode=False)
    assert seen[0] == seen[1]
    assert seen[0][0] == (command.name,)


def test_the_codes_with_which_a_replica_ends_are_those_of_its_process() -> None:
    codes = {value for name, value in vars(cluster.serve).items() if name.startswith("EXIT_")}
    assert set(SERVE_MEANINGS) == codes
    for code, meaning in SERVE_MEANINGS.items():
        assert f"| {code} | {meaning} |" in render()
