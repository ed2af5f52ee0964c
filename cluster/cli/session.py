"""What every command needs: the configuration, an identity, a client; and how a refusal becomes an exit code."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from cluster.cli.exits import ExitCode, Failure
from cluster.client import NO_ANSWER, UNTRUSTED, ApiError, Client, run
from cluster.config import OPERATOR_NAME, Config
from cluster.schemas import Operation
from cluster.security import TlsRefused
from cluster.system import Clock, SystemClock

CONFIG_VARIABLE: Final = "FOREBAY_CONFIG"
CONFIG_DEFAULT: Final = Path("forebay.toml")

DEADLINE_S: Final = 10.0
"""Seconds that a command waits for an answer: a take-over ends within two; a person waits no longer."""

DEADLINE_S_MAX: Final = 3_600.0

_CODES: Final = {
    **dict.fromkeys((400, 413, 414, 415, 422, 431), ExitCode.BAD_INPUT),
    **dict.fromkeys((401, 403), ExitCode.PERMISSION_DENIED),
    404: ExitCode.NOT_FOUND,
    **dict.fromkeys((502, 503, 504), ExitCode.UNREACHABLE),
}

_COMMANDS: Final = (
    (re.compile(r"/v1/jobs/(\d+)/history"), r"`forebay job history \1`"),
    (re.compile(r"/v1/jobs\b(?!/)"), "`forebay job list --all`"),
    (re.compile(r"/v1/status\b"), "`forebay member status`"),
    (re.compile(r"/v1/nodes\b(?!/)"), "`forebay node list`"),
    (re.compile(r"/v1/pools\b(?!/)"), "`forebay pool list`"),
)
"""What remedies of the API name, and the command that shows the same."""

_T = TypeVar("_T")


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The global options of one command line."""

    config_path: Path | None = None
    identity: str = OPERATOR_NAME
    stale: bool = False
    deadline_s: float = DEADLINE_S
    clock: Clock = SystemClock()

    def config(self) -> Config:
        """Return the configuration of --config, or ./forebay.toml; ConfigError says which file and key is wrong."""
        return Config.load(self.config_path or CONFIG_DEFAULT)

    def ask(self, call: Callable[[Client], Awaitable[_T]]) -> _T:
        """Run a call with a client of the cluster and return its answer; Failure says why there is none."""
        config = self.config()

        async def perform() -> _T:
            async with Client.from_config(
                config, self.identity, clock=self.clock, deadline_s=self.deadline_s
            ) as client:
                return await call(client)

        try:
            return run(perform())
        except ApiError as error:
            raise failure_of(error) from error
        except TlsRefused as error:
            sentence, _, remedy = str(error).partition("; ")
            raise Failure(ExitCode.PERMISSION_DENIED, sentence, remedy) from error

    def read(self, operation: Operation[None, _T], **parameters: Any) -> _T:
        """Return the answer to a read, an old one too with --stale; Failure as `ask`."""
        return self.ask(lambda client: client.call(operation, stale=self.stale, **parameters))

    def write(self, operation: Operation[Any, _T], **values: Any) -> _T:
        """Have a command carried out under an id of its own, and return its answer; Failure as `ask`.

        `values` are the parameters of the operation's path, and the fields of its request.
        """
        path = {name: values.pop(name) for name in operation.path_parameters}

        async def send(client: Client) -> _T:
            request = operation.request(command_id=client.new_command_id(), **values)
            return await client.call(operation, request, **path)

        return self.ask(send)


def failure_of(error: ApiError) -> Failure:
    """Return the failure for a call that did not succeed."""
    return Failure(exit_code_of(error), error.sentence, in_commands(error.remedy), place=error.place)


def in_commands(remedy: str) -> str:
    """Return what the API advises with the commands that ask it, for somebody who types them."""
    for pattern, command in _COMMANDS:
        remedy = pattern.sub(command, remedy)
    return remedy


def exit_code_of(error: ApiError) -> ExitCode:
    """Return the exit code for a call that did not succeed."""
    if error.outcome == "unknown":
        return ExitCode.OUTCOME_UNKNOWN
    if error.code == UNTRUSTED:
        return ExitCode.PERMISSION_DENIED
    if error.status == NO_ANSWER:
        return ExitCode.UNREACHABLE
    return _CODES.get(error.status, ExitCode.REFUSED)


def session() -> Session:
    """Return the session of the command that is running."""
    found = click.get_current_context().find_object(Session)
    if found is None:
        raise RuntimeError("a command runs outside the group `forebay`, which makes the session")
    return found
