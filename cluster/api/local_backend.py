"""Controller side of an API worker: dispatches requests to handlers, and commands to the proposer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import nullcontext
from typing import Any

import msgspec

from forebay.cluster.api import (
    accounts,
    burst,
    clients,
    events,
    external_jobs,
    history,
    jobs,
    ledger,
    members,
    nodes,
    pools,
    watch,
)
from forebay.cluster.api.history_service import HistoryServiceLost
from forebay.cluster.api.service import ApiCall, ApiService, Handler, Reply, Route, is_long
from forebay.cluster.api.transfers import handlers as transfers
from forebay.cluster.api.web import (
    AccessRules,
    CommandClient,
    DecodedSubmit,
    IdentityAssertions,
    Problem,
    Redirect,
    Response,
    Stream,
    internal_error,
    no_leader,
    rejection_problem,
)
from forebay.cluster.api.web.exchange import ApiRequest
from forebay.cluster.providers import CALLS_MAX
from forebay.cluster.schemas import OPERATIONS, BulkCommand, SubmitCommand
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import Identity, PeerCertificate
from forebay.cluster.server import Settlement
from forebay.cluster.system import about
from forebay.replica.messages import SubmitJob
from forebay.replica.model import Site
from forebay.wal import BrokenInvariant, StorageFailed

LOGGER = logging.getLogger(__name__)

FAULT_REMEDY = "report this with the replica's log, and send the command again with the same command_id"
"""Remedy of an internal error."""


_HANDLING = (
    accounts,
    burst,
    clients,
    events,
    external_jobs,
    history,
    jobs,
    ledger,
    members,
    nodes,
    pools,
    transfers,
)

ROUTES = {
    route.operation.name: route
    for module in _HANDLING
    for route in (*vars(module).values(), watch.show_overview, watch.list_pool_use, watch.list_sinks)
    if isinstance(route, Route)
}  # fmt: skip
"""The route of each operation, by name."""

if ROUTES.keys() != OPERATIONS.keys():
    raise AssertionError(f"operations without a handler, or the reverse: {ROUTES.keys() ^ OPERATIONS.keys()}")


def handler_of(asked: ApiRequest) -> Handler:
    """Return the handler; for a query with a past revision or time, that of past states."""
    if "at" in asked.query and asked.operation is not ops.EXPLAIN_JOB:
        return history.read_past
    return ROUTES[asked.operation.name].handler


class LocalBackend:
    """Backend for API workers in the same process; it also serves those in other processes."""

    def __init__(self, service: ApiService) -> None:
        self.service = service
        self.peers = service.peers
        self.slices = service.slices
        self.cluster_id = service.config.cluster.id
        self.access = AccessRules.of(service.config.access)
        self.vouching = IdentityAssertions(self.access, self.cluster_id, clock=service.controller.clock)
        service.document()  # build it now, since it takes too long later

    @property
    def revision(self) -> int:
        return self.service.controller.state.revision

    @property
    def site(self) -> Site:
        return self.service.controller.state.site

    @property
    def leader_channel(self) -> str:
        leader = self.service.controller.engine.leader
        for replica in self.service.config.replicas:
            if replica.name == leader and replica.channel is not None:
                return str(replica.channel)
        return ""

    def observe(self, route: str, status: int, duration_s: float, code: str) -> None:
        self.service.metrics.record_request(route, status, duration_s, code)

    async def respond(self, asked: ApiRequest) -> Response | Stream:
        operation = asked.operation
        try:
            outcome = await self._handle(ApiCall(self.service, asked))
        except (Problem, Redirect):
            raise
        except (StorageFailed, BrokenInvariant) as error:
            self.service.fail(error)
        except Exception as error:
            LOGGER.exception(
                "%s %s failed", operation.method, operation.name, extra=about(job=asked.params.get("id", ""))
            )
            remedy = "report this with the replica's log; send a write again with the same command_id"
            raise internal_error(remedy, "unknown" if operation.method != "GET" else "rejected") from error
        if isinstance(outcome, Stream):
            return outcome
        content = outcome.content if outcome.content is not None else msgspec.json.encode(outcome.view)
        return Response(operation.status, outcome.revision, content, outcome.content_type)

    async def _handle(self, call: ApiCall[Any]) -> Reply[Any] | Stream:
        if call.operation.of_ledger:
            return await history.read_records(call, lambda: watch.live_values(call))
        if call.operation.live is not None and "at" not in call.query and self.service.past.has_present:
            with contextlib.suppress(HistoryServiceLost):
                return await history.read_present(call, lambda: watch.live_values(call))
        return await handler_of(call.asked)(call)

    def elsewhere(self) -> Redirect | Problem | None:
        controller = self.service.controller
        return None if controller.leads else self.service.elsewhere(controller.engine.leader)

    def program(self, certificate: PeerCertificate) -> LocalProgram:
        return LocalProgram(self.service, certificate.identity)


class LocalProgram:
    """Connection of the channel."""

    def __init__(self, service: ApiService, identity: Identity) -> None:
        self._service = service
        self._identity = identity
        self._validating: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(CALLS_MAX)
        """Bounds a program's submits that wait for the provider's validation."""

    def take(self, request: BulkCommand, content: bytes, prepared: DecodedSubmit | None, asker: CommandClient) -> None:
        service = self._service
        state = service.controller.state
        if not state.revision:
            raise no_leader("the cluster is being founded")
        ready: SubmitJob | None = None
        if prepared is not None and prepared.fits(state.site):
            ready, _ = prepared.result()
        heard = CommandWaiter(self, asker)
        if (ready is None and is_long(request)) or service.providing.is_needed(state):
            task = asyncio.get_running_loop().create_task(self._prepare(request, heard, len(content)))
            self._validating.add(task)
            task.add_done_callback(self._validating.discard)
            return
        try:
            service.admit(self._identity, request, heard, size_bytes=len(content), prepared=ready)
        except (Problem, Redirect):
            raise
        except (StorageFailed, BrokenInvariant) as error:
            service.fail(error)
        except Exception as error:
            raise self.fault(error) from error

    def leave(self) -> None:
        """Do nothing; commands under way continue."""

    async def _prepare(self, request: BulkCommand, heard: CommandWaiter, size_bytes: int) -> None:
        """Decode a long command outside the loop, and have the provider validate it, before it is queued."""
        service = self._service
        controller = service.controller
        try:
            async with self._turns if isinstance(request, SubmitCommand) else nullcontext():
                if not controller.leads:  # the leadership may have changed while it waited
                    raise service.elsewhere(controller.engine.leader)
                prepared = await service.prepare(self._identity, request)
            if not controller.leads:
                raise service.elsewhere(controller.engine.leader)
            service.admit(self._identity, request, heard, size_bytes=size_bytes, prepared=prepared)
        except (StorageFailed, BrokenInvariant) as error:
            service.fail(error)
        except Exception as error:
            if not heard.done():
                heard.set_exception(error)

    def fault(self, error: Exception) -> Problem | Redirect:
        """Return the error to report; every command must get a response."""
        if isinstance(error, Problem | Redirect):
            return error
        try:
            return self._service.problem_of(error)
        except Exception:
            LOGGER.error("a command of %s failed", self._identity, exc_info=error)
            return internal_error(FAULT_REMEDY, "unknown")


class CommandWaiter:
    """Receives one command's result from the proposer at once, so that responses leave before the next batch."""

    __slots__ = ("_asker", "_program")

    def __init__(self, program: LocalProgram, asker: CommandClient) -> None:
        self._program = program
        self._asker = asker

    def done(self) -> bool:
        return self._asker.is_gone()

    def cancelled(self) -> bool:
        return False  # a disconnected program's commands stand

    def set_result(self, result: Settlement) -> None:
        if result.rejection is not None:
            self._asker.report_failure(rejection_problem(result.rejection))
        else:
            self._asker.report_settled(result.revision, result.job)

    def set_exception(self, exception: Exception) -> None:
        self._asker.report_failure(self._program.fault(exception))
