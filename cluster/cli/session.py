"""What every command needs: the configuration, an identity, a client; and how a refusal becomes an exit code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from cluster.cli.exits import ExitCode, Failure

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.client import ApiError, Client
    from cluster.config import AccessConfig, Config
    from cluster.schemas import ApiOperation
    from cluster.system import Clock

CONFIG_VARIABLE: Final = "FOREBAY_CONFIG"

DEADLINE_S: Final = 10.0
"""Seconds that a command waits for an answer: a take-over ends within two; a person waits no longer."""

DEADLINE_S_MAX: Final = 3_600.0

_CODES: Final = {
    **dict.fromkeys((400, 413, 414, 415, 422, 431), ExitCode.BAD_INPUT),
    **dict.fromkeys((401, 403), ExitCode.PERMISSION_DENIED),
    404: ExitCode.NOT_FOUND,
    **dict.fromkeys((502, 503, 504), ExitCode.UNREACHABLE),
}

UNKNOWN_ROUTE: Final = "unknown_route"
"""The code with which a replica answers to what its release does not have."""

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
"""What remedies of the API name, and the command that shows the same."""

_T = TypeVar("_T")


class Session:
    """The global options of one command line."""

    def __init__(
        self,
        *,
        config_path: Path | None = None,
        identity: str | None = None,
        stale: bool = False,
        deadline_s: float = DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        """Without `identity` it is the account that runs the command, without `clock` the machine's."""
        self.config_path = config_path
        self.identity = identity
        """Whose certificate is shown; None: one comes as the account that one is."""
        self.stale = stale
        self.deadline_s = deadline_s
        self._clock = clock

    @property
    def clock(self) -> Clock:
        """What tells the time."""
        from cluster.system import SystemClock

        return self._clock or SystemClock()

    def config(self) -> Config:
        """Return the configuration of --config, or the one that is found; ConfigError says what is wrong where."""
        from cluster.config import Config

        return Config.load(self.config_file())

    def _access(self) -> AccessConfig:
        """Return what of the configuration says where the cluster is; ConfigError as `config`."""
        from cluster.config import read_access

        return read_access(self.config_file())

    def config_file(self) -> Path:
        """Return the file of the configuration; ConfigError where none was named and none is found."""
        import os

        from cluster.config import find_config

        return self.config_path or find_config(os.environ)

    def ask(self, call: Callable[[Client], Awaitable[_T]], *, on_a_loop: bool = False) -> _T:
        """Run a call with a client of the cluster and return its answer; Failure says why there is none.

        A call that waits for several things at once, or for time to pass, runs `on_a_loop`: an event loop and its
        client, which take longer to import than most commands last.
        """
        from cluster.client import NOBODY_S, ApiError, Client, finish, run
        from cluster.security import TlsError

        config = self._access()
        # Who says how long to wait may be waiting for a cluster that is being started.
        nobody_s = NOBODY_S if self.deadline_s == DEADLINE_S else None

        async def perform() -> _T:
            async with Client.from_config(
                config,
                self.identity,
                clock=self.clock,
                deadline_s=self.deadline_s,
                nobody_s=nobody_s,
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
        """Return the answer to a read, an old one too with --stale; Failure as `ask`."""
        return self.ask(lambda client: client.call(operation, stale=self.stale, **parameters))

    def write(self, operation: ApiOperation[Any, _T], **values: Any) -> _T:
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
    if error.code == UNKNOWN_ROUTE:
        return Failure(
            exit_code_of(error),
            "the replica that answered is of a release that does not know this command",
            "`forebay cluster probe --json` shows the version of each; upgrade every replica first",
            kind=error.code,
        )
    return Failure(exit_code_of(error), error.sentence, name_commands(error.remedy), place=error.place, kind=error.code)


def name_commands(remedy: str) -> str:
    """Return what the API advises with the commands that ask it, for somebody who types them."""
    import re

    for pattern, command in _COMMANDS:
        remedy = re.sub(pattern, command, remedy)
    return remedy


def exit_code_of(error: ApiError) -> ExitCode:
    """Return the exit code for a call that did not succeed."""
    from cluster.client import NO_ANSWER, UNTRUSTED

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
