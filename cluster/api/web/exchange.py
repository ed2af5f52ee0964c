"""Interface between API workers and the controller process.

A worker ends TLS, decodes and checks requests as far as possible without state, and writes responses; the controller
decides. In one process the backend is called directly (`cluster.api.local_backend`), otherwise through a socket
(`cluster.api.worker`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from forebay.cluster.api.web.identity_assertion import IdentityAssertions
from forebay.cluster.api.web.problems import Problem, Redirect
from forebay.cluster.schemas import ApiOperation, BulkCommand, ErrorView
from forebay.cluster.security import Identity, PeerCertificate, Peers
from forebay.cluster.system.eventloop import Slices
from forebay.replica.messages import SubmitJob
from forebay.replica.model import Site

COMMIT_WAIT_S = 4.0
"""Time a response may wait for its commit, seconds: less than a client waits for one replica."""

LONG_CHARACTERS = 8 * 1024
"""Longest request text decoded on the loop, characters: a few milliseconds of directives."""


class DecodedSubmit(msgspec.Struct, frozen=True, array_like=True):
    """A decoded submit; the result depends only on the site's grammar."""

    command_id: str
    provider: str
    directive: str
    """Directive word of the site it was decoded for."""
    path_variables: tuple[str, ...]
    """Path variables of that site."""
    command: SubmitJob | None
    """None if rejected."""
    warnings: tuple[str, ...] = ()
    status: int = 0
    problem: ErrorView | None = None
    """The rejection; reported by the leader only, which knows the current grammar."""

    def fits(self, site: Site) -> bool:
        """Return True if the site's grammar is still the same."""
        known = self.provider, self.directive, self.path_variables
        return (site.provider, site.directive, site.path_variables) == known

    def result(self) -> tuple[SubmitJob, tuple[str, ...]]:
        """Return the command and its warnings.

        Raises:
            Problem: The submit is rejected.
        """
        if self.command is None:
            view = self.problem
            assert view is not None
            raise Problem(
                self.status, view.code, view.sentence, view.remedy, view.place, outcome=view.outcome, others=view.others
            )
        return self.command, self.warnings


class ApiRequest(msgspec.Struct):
    """Request: authenticated, permitted to its role, decoded."""

    operation: ApiOperation[Any, Any]
    certificate: PeerCertificate
    params: dict[str, str]
    query: dict[str, str]
    body: Any
    """Decoded body; None for operations without one, and for a submit in `prepared`."""
    content: bytes
    """The body as received: valid JSON."""
    prepared: DecodedSubmit | None
    last_event_id: str | None
    gone: asyncio.Event
    """Set when the client disconnects."""

    @property
    def identity(self) -> Identity:
        """Identity of the caller."""
        return self.certificate.identity

    @property
    def size_bytes(self) -> int:
        """Bytes of the body."""
        return len(self.content)


class Response(msgspec.Struct, frozen=True):
    """A complete response."""

    status: int
    revision: int
    content: bytes
    content_type: str = "application/json"


class StreamChunk(NamedTuple):
    """Chunk of a stream."""

    payload: bytes
    farewell: bytes
    """Written in place of all further data if the client does not read this chunk in time."""


class Stream(msgspec.Struct, frozen=True):
    """An endless response; each chunk is made after the previous one was written.

    `parts` is closed when the client stops reading; then `release` is called.
    """

    revision: int
    content_type: str
    parts: AsyncGenerator[StreamChunk, None]
    release: Callable[[], None]
    """Releases the stream's slot; called once at its end, even if it never started."""


class CommandClient(Protocol):
    """Receiver of one command's result. Called from the loop; one of the last two methods is called once."""

    def is_gone(self) -> bool:
        """Return True if the result is no longer needed."""
        ...

    def report_settled(self, revision: int, job: int) -> None:
        """Report success."""
        ...

    def report_failure(self, error: Problem | Redirect) -> None:
        """Report a rejection or an unknown outcome."""
        ...


class Program(Protocol):
    """The controller's side of one channel connection."""

    def take(self, request: BulkCommand, content: bytes, prepared: DecodedSubmit | None, asker: CommandClient) -> None:
        """Execute a command and report to `asker`.

        Raises:
            Problem: The command is rejected at once.
            Redirect: Another replica leads.
        """
        ...

    def leave(self) -> None:
        """Close the connection; its commands stand."""
        ...


class Backend(Protocol):
    """The controller as used by an API worker."""

    peers: Peers
    slices: Slices
    cluster_id: str
    vouching: IdentityAssertions

    @property
    def revision(self) -> int:
        """Revision of the state, for responses made by the worker."""
        ...

    @property
    def site(self) -> Site:
        """Site configuration, with the grammar of requests."""
        ...

    @property
    def leader_channel(self) -> str:
        """Address of the leader's channel, or an empty string."""
        ...

    async def respond(self, asked: ApiRequest) -> Response | Stream:
        """Return the response.

        Raises:
            Problem: The request failed.
            Redirect: Another replica leads.
        """
        ...

    def elsewhere(self) -> Redirect | Problem | None:
        """Return the redirect for a program's commands; None if this replica leads."""
        ...

    def program(self, certificate: PeerCertificate) -> Program:
        """Return the program of a new channel connection."""
        ...

    def observe(self, route: str, status: int, duration_s: float, code: str) -> None:
        """Count a response: route, status, duration, and error code if any."""
        ...
