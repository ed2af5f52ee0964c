"""Carrying out audit commands in the tests' process."""

from unittest.mock import patch

from click.testing import CliRunner, Result

from forebay.cluster.audit.commands import COMMANDS
from forebay.cluster.cli.app import cli
from forebay.cluster.cli.audit.offline import decode_options


def audit(*words: object) -> Result:
    """Type a command; what would become `python -m cluster.audit` is carried out here."""

    def carry_out(command: list[str]) -> None:
        name, options = command[-2:]
        COMMANDS[name](decode_options(options))

    with patch("forebay.cluster.cli.audit.offline.become", carry_out):
        return CliRunner().invoke(cli, [str(word) for word in words], env={"FOREBAY_CONFIG": None})
