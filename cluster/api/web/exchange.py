"""What a front door asks the core of a replica, and what it gets: one contract, in whichever processes they are.

A door ends TLS, reads and checks what a request says by itself, and writes answers; the core decides. Where both are
one process the core is called (`cluster.api.local_backend`); where they are two, the same goes over a socket
(`cluster.api.worker`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from cluster.api.web.identity_assertion import IdentityAssertions
from cluster.api.web.problems import Problem, Redirect
from cluster.schemas import ApiOperation, BulkCommand, ErrorView
from cluster.security import Identity, PeerCertificate, Peers
from cluster.system.eventloop import Slices
from replica.messages import SubmitJob
from replica.model import Site

COMMIT_WAIT_S = 4.0
"""How long an answer may wait for its commit, seconds: less than a client waits for one replica."""


class DecodedSubmit(msgspec.Struct, frozen=True, array_like=True):
    """A submit whose script and options were read, which depends on the site's grammar and on nothing else."""

    command_id: str
    provider: str
    directive: str
    """Of the site for which it was read."""
    command: SubmitJob | None
    """None where it was refused."""
    warnings: tuple[str, ...] = ()
    status: int = 0
    problem: ErrorView | None = None
    """Why it was refused; told by who leads, to whom alone the site's grammar is known."""

    def fits(self, site: Site) -> bool:
        """Whether the site's grammar is still the one that it was read by."""
        return (site.provider, site.directive) == (self.provider, self.directive)

    def result(self) -> tuple[SubmitJob, tuple[str, ...]]:
        """Return the command and what its submitter should look at; Problem."""
        if self.command is None:
            view = self.problem
            assert view is not None
            raise Problem(
                self.status, view.code, view.sentence, view.remedy, view.place, outcome=view.outcome, others=view.others
            )
        return self.command, self.warnings


class ApiRequest(msgspec.Struct):
    """One request: authenticated, permitted to its role, decoded."""

    operation: ApiOperation[Any, Any]
    certificate: PeerCertificate
    params: dict[str, str]
    query: dict[str, str]
    body: Any
    """What the operation takes; None where there is none, and for a submit that is `prepared`."""
    content: bytes
    """The body as it came: JSON that has been found valid."""
    prepared: DecodedSubmit | None
    last_event_id: str | None
    gone: asyncio.Event
    """Set once the client has gone."""

    @property
    def identity(self) -> Identity:
        """Who asks."""
        return self.certificate.identity

    @property
    def size_bytes(self) -> int:
        """Bytes of the body."""
        return len(self.content)


class Response(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    revision: int
    content: bytes
    content_type: str = "application/json"


class StreamChunk(NamedTuple):
    """A piece of a stream."""

    payload: bytes
    farewell: bytes
    """What is written in place of all that would follow, where the client does not read this in time."""


class Stream(msgspec.Struct, frozen=True):
    """An answer without an end: the next part is made once this one was written.

    `parts` is closed when nobody reads it any more; then `release` is due.
    """

    revision: int
    content_type: str
    parts: AsyncGenerator[StreamChunk, None]
    release: Callable[[], None]
    """Gives back the stream's place; called once, when it is over, whether or not any of it was made."""


class CommandClient(Protocol):
    """Who waits for one command of a program. The methods are called from the loop, one of the last two once."""

    def is_gone(self) -> bool:
        """Whether nobody waits any more."""
        ...

    def report_settled(self, revision: int, job: int) -> None:
        """Learn that it was carried out."""
        ...

    def report_failure(self, error: Problem | Redirect) -> None:
        """Learn that it was not, or that nobody knows."""
        ...


class Program(Protocol):
    """One connection of the channel, as the core knows it."""

    def take(self, request: BulkCommand, content: bytes, prepared: DecodedSubmit | None, asker: CommandClient) -> None:
        """Have a command carried out, and tell `asker`; Problem or Redirect where it is not even begun."""
        ...

    def leave(self) -> None:
        """Forget it: the connection has ended. Its commands stand."""
        ...


class Backend(Protocol):
    """The replica behind a door."""

    peers: Peers
    slices: Slices
    cluster_id: str
    vouching: IdentityAssertions

    @property
    def revision(self) -> int:
        """The revision of the state, for what a door answers by itself."""
        ...

    @property
    def site(self) -> Site:
        """The site's configuration, by whose grammar requests are read."""
        ...

    @property
    def leader_channel(self) -> str:
        """Where the channel of the replica that leads is, or the empty string."""
        ...

    async def respond(self, asked: ApiRequest) -> Response | Stream:
        """Return the answer; Problem, or Redirect to the leader."""
        ...

    def elsewhere(self) -> Redirect | Problem | None:
        """Return where a program should go instead; None where this replica leads."""
        ...

    def program(self, certificate: PeerCertificate) -> Program:
        """Return what takes the commands of a new connection of the channel."""
        ...

    def observe(self, route: str, status: int, duration_s: float, code: str) -> None:
        """Count an answer: its route, how long it took, and the problem's code where it was one."""
        ...
