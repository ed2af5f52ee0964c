"""The reference and the help are complete and current, including exit codes."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import forebay.cluster.serve
from forebay.cluster.audit.commands import COMMANDS
from forebay.cluster.cli.app import cli
from forebay.cluster.cli.audit import offline
from forebay.cluster.cli.commands.submit import submit
from forebay.cluster.cli.exits import MEANINGS, SERVE_MEANINGS, ExitCode
from forebay.cluster.cli.submission.sbatch_options import OPTIONS, UNNAMED_FIELDS, Treatment
from forebay.cluster.cli.tree import GUESSES
from tests.repo import cli_reference


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands(cli))


@pytest.mark.parametrize("words", GUESSES, ids=" ".join)
def test_a_guessed_word_runs_the_matching_command(words: tuple[str, ...]) -> None:
    assert words not in ALL, "a guess must hide no command"
    help_text = ALL[GUESSES[words]].help
    assert help_text is not None
    assert help_text.split("\n")[0] in CliRunner().invoke(cli, [*words, "--help"]).output


def render() -> str:
    """Return the pages of the reference in one text."""
    names = ("overview", "options", "everyday", "operators", "audit", "services", "exit_codes", "sbatch_options")
    return "\n".join(getattr(cli_reference, name)() for name in names)


def test_the_reference_names_every_command_option_and_exit_code() -> None:
    text = render()
    for path, command in ALL.items():
        assert f"{'#' * min(len(path) + 1, 4)} `forebay {' '.join(path)}`\n" in text
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert all(option in text for option in parameter.opts)
    for code in ExitCode:
        assert f"| {int(code)} | {MEANINGS[code]} |" in text
    for option in OPTIONS:
        assert f"| `{option.long}` |" in text


def test_the_reference_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    wide = render()
    monkeypatch.setenv("COLUMNS", "40")
    assert render() == wide


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_and_option_has_help(path: tuple[str, ...]) -> None:
    command = ALL[path]
    assert command.help
    assert [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not option.help and not option.hidden
    ] == []


def test_every_script_option_is_a_command_line_option() -> None:
    known = {name for parameter in submit.params for name in (*parameter.opts, *parameter.secondary_opts)}
    carried_out = {option for option in OPTIONS if option.treatment is Treatment.CARRIED_OUT}
    written = {option.long for option in carried_out if option.field not in UNNAMED_FIELDS}
    assert written - known == {"--workdir"}, "which no release of sbatch has that scripts are written for"


def test_the_required_commands_exist() -> None:
    wanted = """submit queue cancel status top; job show why history update hold release requeue suspend resume;
        buffer list export clear; transfer list show receipt; pool list create set delete drain resume history;
        node list show admit drain resume lost; policy account qos license partition reservation usage scheduling;
        config show set diff apply; cluster init up check members add replace remove transfer recover clock;
        backup create inspect restore; cert issue list revoke renew-authority; drill plan run list show abort lock;
        audit verify replay prove checkpoint archive history diff whatif report;
        run replica agent gateway bridge helper witness; slurm install jobs release; support debug completion session"""
    top, *groups = wanted.split(";")
    expected = {(name,) for name in top.split()}
    for group in groups:
        name, *inner = group.split()
        expected |= {(name,), *((name, one) for one in inner)}
    assert expected <= set(ALL)


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "verify", "--data", "r1"],
        ["audit", "verify", "--name", "r1", "--json"],
        ["audit", "replay", "--data=-odd", "--at", "7", "--from-snapshot", "a b", "--expect", "00"],
        ["audit", "dump", "--data", "x", "--from", "2", "--limit", "3"],
        ["backup", "inspect", "--check", "--", "--odd.fbs"],
        ["audit", "report", "--data=r1", "--from=10:03", "--job=1", "--job=42", "-o", "-odd.html"],
        ["audit", "whatif", "--data=-odd", "--set=Pool=fast:+1GiB", "--set", "MaxPasses=3", "--policy=-a b", "--json"],
        ["cluster", "recover", "--name", "r1", "--confirm=-5f", "--leave-behind", "r2", "--by=a b"],
    ],
)
def test_forwarded_options_match_the_audit_commands(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    parsed: list[dict[str, object]] = []
    encode = offline.encode_options
    monkeypatch.setattr(offline, "encode_options", lambda options: (parsed.append(options), encode(options))[1])
    monkeypatch.setattr(offline, "become", became.append)
    result = CliRunner().invoke(cli, ["--config", "/etc/odd name.toml", *words])
    assert result.exit_code == 0, result.output
    name, text = became[0][-2:]
    assert name in COMMANDS
    assert offline.decode_options(text) == parsed[0]
    assert parsed[0]["config"] == Path("/etc/odd name.toml") and parsed[0]["as_json"] == ("--json" in words)


def test_every_forwarded_command_has_an_implementation() -> None:
    started = re.findall(r'start_audit\("([a-z-]+)"', Path(offline.__file__ or "").read_text())
    assert sorted(started) == sorted(COMMANDS)


def test_documented_replica_exit_codes_match_the_process() -> None:
    codes = {value for name, value in vars(forebay.cluster.serve).items() if name.startswith("EXIT_")}
    assert set(SERVE_MEANINGS) == codes
    for code, meaning in SERVE_MEANINGS.items():
        assert f"| {code} | {meaning} |" in render()
