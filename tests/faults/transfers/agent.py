"""Real agent whose controller is a file that gives the orders of one job, stage by stage; both may be killed.

Run by agents.py in a process of its own.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import msgspec

from forebay.cluster.agent.operation import AgentSettings
from forebay.cluster.agent.runtime.state_directory import StateDirectory
from forebay.cluster.agent.service import Agent
from forebay.cluster.schemas.agents import PollRequest, RegisterRequest, ReportsRequest
from forebay.cluster.schemas.jobs import PollAnswer, RegisterAnswer, ReportResult, ReportsAnswer
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.orders import Order

LOOK_S = 0.01
"""Seconds between two looks of a poll that waits."""


class Desk(msgspec.Struct, kw_only=True):
    """What the controller knows, durable as far as a killed process goes."""

    orders: tuple[Order, ...]
    """What is to be done, one after the other; the first one stands."""
    attempt: int = 1
    revision: int = 1
    instance: str = ""
    said: tuple[str, ...] = ()
    """What became of each attempt."""

    @classmethod
    def read(cls, path: Path) -> "Desk":
        """Return what is in the file."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def write(self, path: Path) -> None:
        """Put it in place of what is in the file."""
        beside = path.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(self))
        beside.rename(path)


class FileController:
    """Speaks to one agent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._desk = Desk.read(path)

    async def register(self, _node: str, request: RegisterRequest) -> RegisterAnswer:
        """Take the agent; what an earlier one was doing is ordered again as the next attempt."""
        desk = self._desk
        if desk.instance not in ("", request.instance):
            desk.attempt += 1
        desk.instance = request.instance
        self._keep()
        return RegisterAnswer(revision=desk.revision)

    async def poll(self, _node: str, request: PollRequest) -> PollAnswer:
        """Answer when there is something new."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + request.wait_s
        while self._desk.revision <= request.seen_revision and loop.time() < until_s:
            await asyncio.sleep(LOOK_S)
        desk = self._desk
        orders = tuple(msgspec.structs.replace(order, attempt=desk.attempt) for order in desk.orders[:1])
        return PollAnswer(revision=desk.revision, orders=orders)

    async def report(self, _node: str, request: ReportsRequest) -> ReportsAnswer:
        """Believe what is of the newest attempt."""
        desk, results = self._desk, []
        for report in request.reports:
            stands = bool(desk.orders) and (report.attempt, report.stage) == (desk.attempt, desk.orders[0].stage)
            if not stands:
                results.append(ReportResult(command_id=report.command_id, outcome="rejected", code="stale_attempt"))
                continue
            match report.result:
                case OperationDone():
                    desk.said += ("done",)
                    desk.orders, desk.attempt = desk.orders[1:], desk.attempt + 1
                case OperationFailed(message, final):
                    desk.said += (f"{'final: ' if final else ''}{message}",)
                    desk.orders, desk.attempt = () if final else desk.orders, desk.attempt + 1
            self._keep()
            results.append(ReportResult(command_id=report.command_id, outcome="accepted"))
        return ReportsAnswer(revision=desk.revision, results=tuple(results))

    def _keep(self) -> None:
        self._desk.revision += 1
        self._desk.write(self._path)


async def work(home: Path, desk: Path) -> None:
    """Be the agent until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    clock = SystemClock()
    opened = StateDirectory(home, "own", clock)
    try:
        await Agent(
            opened, AgentSettings(node="n1", accounts="own"), os.cpu_count() or 1, FileController(desk), clock
        ).run(stop)
    finally:
        opened.close()


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), Path(sys.argv[2])))
