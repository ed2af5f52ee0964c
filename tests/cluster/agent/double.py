"""A controller that speaks the agent's half of `/v1` over mutual TLS, and gives exactly the orders that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from forebay.cluster.config.config import Config
from forebay.cluster.schemas.agents import OperationReport, PollRequest, RegisterRequest, ReportsRequest
from forebay.cluster.schemas.jobs import (
    ErrorAnswer,
    ErrorView,
    FilesystemsAnswer,
    FilesystemView,
    PollAnswer,
    RegisterAnswer,
    ReportResult,
    ReportsAnswer,
)
from forebay.cluster.security.tls import server_context
from forebay.replica.messages.commands import (
    OperationDone,
    OperationFailed,
    PersistentChanged,
    ScriptEnded,
    ScriptStarted,
    TransferProgressed,
)
from forebay.replica.model.orders import Order

DEADLINE_S = 300.0
"""Seconds after which a test that waits for something says what it got instead."""

STATUSES = {"stale_instance": 409, "unknown_node": 404, "command_too_old": 400, "forbidden": 403}
"""With which status the API gives which code."""

_Result = OperationDone | OperationFailed | TransferProgressed | PersistentChanged | ScriptStarted | ScriptEnded

UNDER_WAY = (ScriptStarted, TransferProgressed, PersistentChanged)
"""Results after which the operation goes on."""


class ControllerDouble:
    """Orders and reports in memory, served over HTTPS."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.orders: dict[int, Order] = {}
        self.revision = 1
        self.registrations: list[RegisterRequest] = []
        self.polls: list[PollRequest] = []
        self.received: list[OperationReport] = []
        """Every report that came in, repeated ones too."""
        self.accepted: list[OperationReport] = []
        self.heard: list[str] = []
        """What was asked and answered, in order: register, poll, reports."""
        self.filesystems: list[FilesystemView] = []
        self.silent = False
        """Whether every request is answered with 503."""
        self.silent_to_reports = False
        """Whether reports alone are answered with 503."""
        self.deaf = False
        """Whether reports are carried out and their answers lost."""
        self.registering_refused: ErrorView | None = None
        self.polling_refused: ErrorView | None = None
        """What registrations and polls are answered with instead; the double goes by `STATUSES`."""
        self.automatic: Callable[[OperationReport], None] | None = None
        """What follows from an accepted report; by default its order goes, unless the script has only started."""

    async def start(self) -> None:
        """Listen on the api address of the first replica."""
        replica = self._config.replicas[0]
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.router.add_get("/v1/filesystems", self._list_filesystems)
        application.router.add_post("/v1/agents/{node}/register", self._register)
        application.router.add_post("/v1/agents/{node}/poll", self._poll)
        application.router.add_post("/v1/agents/{node}/reports", self._reports)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        context = server_context(self._config.tls_files(replica.name))
        await web.TCPSite(self._runner, replica.api.host, replica.api.port, ssl_context=context).start()

    async def stop(self) -> None:
        """Stop listening; what it knows stays."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def order(self, *orders: Order) -> None:
        """Let these orders stand, each in place of the one of the same job."""
        async with self._changed:
            self.orders |= {order.job: order for order in orders}
            self.revision += 1
            self._changed.notify_all()

    async def withdraw(self, job: int) -> None:
        """Let no order of the job stand."""
        async with self._changed:
            self.orders.pop(job, None)
            self.revision += 1
            self._changed.notify_all()

    async def wait(self, what: Callable[[], bool]) -> None:
        """Wait until `what` holds; it is looked at whenever the agent says something."""
        try:
            async with asyncio.timeout(DEADLINE_S), self._changed:
                await self._changed.wait_for(what)
        except TimeoutError:
            raise AssertionError(f"nothing within {DEADLINE_S} s; accepted so far: {self.accepted}") from None

    async def result(self, job: int, attempt: int, kind: type = object) -> _Result:
        """Wait for the first result of this order that is not a start (or is of the given kind), and return it."""

        def found() -> list[_Result]:
            return [
                report.result
                for report in self.accepted
                if (report.job, report.attempt) == (job, attempt)
                and (
                    isinstance(report.result, kind) and (kind is not object or not isinstance(report.result, UNDER_WAY))
                )
            ]

        await self.wait(lambda: bool(found()))
        return found()[0]

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _list_filesystems(self, request: web.Request) -> web.Response:
        return _json(FilesystemsAnswer(revision=self.revision, filesystems=tuple(self.filesystems)))

    async def _register(self, request: web.Request) -> web.Response:
        if self.silent:
            return _silence()
        self.heard.append("register")
        if self.registering_refused is not None:
            await self._tell()
            return _refused(self.registering_refused)
        self.registrations.append(msgspec.json.decode(await request.read(), type=RegisterRequest))
        self.revision += 1
        await self._tell()
        return _json(RegisterAnswer(revision=self.revision))

    async def _poll(self, request: web.Request) -> web.Response:
        if self.silent:
            return _silence()
        poll = msgspec.json.decode(await request.read(), type=PollRequest)
        self.polls.append(poll)
        if self.polling_refused is not None:
            await self._tell()
            return _refused(self.polling_refused)
        async with self._changed:
            self._changed.notify_all()
            try:
                async with asyncio.timeout(poll.wait_s):
                    await self._changed.wait_for(lambda: self.revision > poll.seen_revision)
            except TimeoutError:
                pass
        return _json(PollAnswer(revision=self.revision, orders=tuple(self.orders.values())))

    async def _reports(self, request: web.Request) -> web.Response:
        if self.silent or self.silent_to_reports:
            self.heard.append("unheard reports")
            await self._tell()
            return _silence()
        reports = msgspec.json.decode(await request.read(), type=ReportsRequest).reports
        self.heard.append("reports")
        self.received.extend(reports)
        results = [await self._settle(report) for report in reports]
        await self._tell()
        return _silence() if self.deaf else _json(ReportsAnswer(revision=self.revision, results=tuple(results)))

    async def _settle(self, report: OperationReport) -> ReportResult:
        order = self.orders.get(report.job)
        if any(known.command_id == report.command_id for known in self.accepted):
            return ReportResult(command_id=report.command_id, outcome="accepted")
        if order is None or (order.attempt, order.stage) != (report.attempt, report.stage):
            return ReportResult(
                command_id=report.command_id, outcome="rejected", code="stale_attempt", sentence="stale"
            )
        self.accepted.append(report)
        if isinstance(report.result, TransferProgressed | PersistentChanged):
            return ReportResult(command_id=report.command_id, outcome="accepted")
        if isinstance(report.result, ScriptStarted):
            self.orders[report.job] = msgspec.structs.replace(order, started=True)
        else:
            del self.orders[report.job]
        self.revision += 1
        if self.automatic is not None:
            self.automatic(report)
        return ReportResult(command_id=report.command_id, outcome="accepted")


def _json(answer: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def _silence() -> web.Response:
    error = ErrorView(code="no_leader", sentence="there is no leader", outcome="unknown")
    return web.Response(status=503, body=msgspec.json.encode(ErrorAnswer(error=error)), content_type="application/json")


def _refused(error: ErrorView) -> web.Response:
    body = msgspec.json.encode(ErrorAnswer(error=error))
    return web.Response(status=STATUSES[error.code], body=body, content_type="application/json")


def script_of(*lines: str) -> str:
    """Return a script of these lines."""
    return "\n".join(("#!/bin/sh", *lines, ""))


def stands_still(pid: int | str) -> bool:
    """Whether a process is stopped by a signal; one that is gone is not.

    Nor does a shell go on whose child was stopped before that had become another program (vfork): it waits in the
    kernel for it, and is not shown as stopped.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return False
    return state == "T" or (state == "D" and bool(children) and all(map(stands_still, children)))


def shown(path: Path) -> str:
    """Return what a file holds, for comparisons that should fail readably."""
    return path.read_text() if path.exists() else f"{path} does not exist"
