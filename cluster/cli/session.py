"""Session of a command line: configuration, identity, client, and conversion of API errors to exit codes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from forebay.cluster.cli.exits import ExitCode, Failure

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.cluster.client import ApiError, Client
    from forebay.cluster.config import AccessConfig, Config
    from forebay.cluster.schemas import ApiOperation
    from forebay.cluster.system import Clock

CONFIG_VARIABLE: Final = "FOREBAY_CONFIG"

DEADLINE_S: Final = 10.0
"""Default of --deadline, seconds: a failover ends within two, and users wait no longer."""

DEADLINE_S_MAX: Final = 3_600.0

_CODES: Final = {
    **dict.fromkeys((400, 413, 414, 415, 422, 431), ExitCode.BAD_INPUT),
    **dict.fromkeys((401, 403), ExitCode.PERMISSION_DENIED),
    404: ExitCode.NOT_FOUND,
    **dict.fromkeys((502, 503, 504), ExitCode.UNREACHABLE),
}

UNKNOWN_ROUTE: Final = "unknown_route"
"""Error code of a replica whose release does not have the route."""

_COMMANDS: Final = (
    (r"/v1/jobs/([^\s/]+)/history", r"`forebay job history \1`"),
    (r"/v1/jobs\b(?!/)", "`forebay queue --all`"),
    (r"/v1/status\b", "`forebay cluster probe`"),
    (r"/v1/nodes\b(?!/)", "`forebay node list`"),
    (r"/v1/pools\b(?!/)", "`forebay pool list`"),
    (r"/v1/transfers/([^\s/]+)/receipts", r"`forebay transfer receipt \1`"),
    (r"/v1/tlog/checkpoint\b", "`forebay audit checkpoint`"),
    (r"GET /v1/snapshots lists them", "`forebay backup create` takes the newest"),
    (r"register at /v1/agents/([^\s/]+)/register", r"start its agent: `forebay run agent --name \1`"),
    (r"send many in one request to /v1/commands", "name many jobs in one command"),
    (r"POST /v1/sessions", "`forebay support session list`"),
    (r"(use an HTTP client, and )?see /v1/openapi\.json( for what \w+( be)? \w+)?", "see `forebay --help`"),
)
"""Routes named in the API's remedies -> the corresponding commands."""

_T = TypeVar("_T")


class Session:
    """Global options of one command line."""

    def __init__(
        self,
        *,
        config_path: Path | None = None,
        identity: str | None = None,
        stale: bool = False,
        deadline_s: float = DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        """Create a session; `clock` defaults to the machine's clock."""
        self.config_path = config_path
        self.identity = identity
        """Name of the certificate to present; None to use the account that runs the command."""
        self.stale = stale
        self.deadline_s = deadline_s
        self._clock = clock

    @property
    def clock(self) -> Clock:
        """Clock of the session."""
        from forebay.cluster.system import SystemClock

        return self._clock or SystemClock()

    def config(self) -> Config:
        """Load the configuration of --config, or the default one.

        Raises:
            ConfigError: if there is none, or it is invalid.
        """
        from forebay.cluster.config import Config

        return Config.load(self.config_file())

    def _access(self) -> AccessConfig:
        """Load only the part of the configuration that clients need.

        Raises:
            ConfigError: as `config`.
        """
        from forebay.cluster.config import read_access

        return read_access(self.config_file())

    def config_file(self) -> Path:
        """Return the path of the configuration.

        Raises:
            ConfigError: if none was given and none is found.
        """
        import os

        from forebay.cluster.config import find_config

        return self.config_path or find_config(os.environ)

    def ask(self, call: Callable[[Client], Awaitable[_T]], *, on_a_loop: bool = False) -> _T:
        """Run a call with a client of the cluster and return its answer.

        A call with concurrent requests or sleeps needs `on_a_loop`: an event loop, whose import takes longer than
        most commands.

        Raises:
            Failure: if the cluster did not answer, or rejected the call.
        """
        from forebay.cluster.client import UNREACHABLE_S, ApiError, Client, finish, run
        from forebay.cluster.security import TlsError

        config = self._access()
        # With an explicit deadline, the user may be waiting for a cluster that is starting.
        unreachable_s = UNREACHABLE_S if self.deadline_s == DEADLINE_S else None

        async def perform() -> _T:
            async with Client.from_config(
                config,
                self.identity,
                clock=self.clock,
                deadline_s=self.deadline_s,
                unreachable_s=unreachable_s,
                blocking=not on_a_loop,
            ) as client:
                return await call(client)

        try:
            return run(perform()) if on_a_loop else finish(perform())
        except ApiError as error:
            raise failure_of(error) from error
        except TlsError as error:
            sentence, _, remedy = str(error).partition("; ")
            raise Failure(ExitCode.PERMISSION_DENIED, sentence, remedy) from error

    def read(self, operation: ApiOperation[None, _T], **parameters: Any) -> _T:
        """Return the answer to a read, which may be stale with --stale.

        Raises:
            Failure: as `ask`.
        """
        return self.ask(lambda client: client.call(operation, stale=self.stale, **parameters))

    def write(self, operation: ApiOperation[Any, _T], **values: Any) -> _T:
        """Send a command with a new command ID, and return its answer.

        `values` are the operation's path parameters and the fields of its request.

        Raises:
            Failure: as `ask`.
        """
        path = {name: values.pop(name) for name in operation.path_parameters}

        async def send(client: Client) -> _T:
            request = operation.request(command_id=client.new_command_id(), **values)
            return await client.call(operation, request, **path)

        return self.ask(send)


def failure_of(error: ApiError) -> Failure:
    """Return the failure for a failed call."""
    if error.code == UNKNOWN_ROUTE:
        return Failure(
            exit_code_of(error),
            "the release of the replica that answered does not have this command",
            "upgrade every replica first (`forebay cluster probe --json` shows their versions)",
            kind=error.code,
        )
    return Failure(exit_code_of(error), error.sentence, name_commands(error.remedy), place=error.place, kind=error.code)


def name_commands(remedy: str) -> str:
    """Return a remedy of the API with routes replaced by commands."""
    import re

    for pattern, command in _COMMANDS:
        remedy = re.sub(pattern, command, remedy)
    return remedy


def exit_code_of(error: ApiError) -> ExitCode:
    """Return the exit code for a failed call."""
    from forebay.cluster.client import NO_ANSWER, UNTRUSTED

    if error.outcome == "unknown":
        return ExitCode.OUTCOME_UNKNOWN
    if error.code == UNTRUSTED:
        return ExitCode.PERMISSION_DENIED
    if error.status == NO_ANSWER:
        return ExitCode.UNREACHABLE
    return _CODES.get(error.status, ExitCode.REFUSED)


def session() -> Session:
    """Return the session of the running command."""
    found = click.get_current_context().find_object(Session)
    if found is None:
        raise RuntimeError("a command runs outside the group `forebay`, which creates the session")
    return found
