"""Who makes the requests of a day: what people, operators and agents do, each sent and written down."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from forebay.cluster.system.clock import format_instant
from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import DEFAULT_PRIORITY
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import TransferCheckpoint, TransferReceipt
from forebay.replica.values.units import Instant
from tests.contract.day import NODES, Line, Repeated
from tests.contract.in_memory import Answer

SCRIPT = "#!/bin/sh\n{}true\n"


class Maker:
    """Somebody who does things and writes down what."""

    def __init__(self, seed: int) -> None:
        self.day = Repeated()
        self.lines: list[Line] = []
        self.random = random.Random(seed)
        self.cpus = {"n1": 8, "n2": 4, "n3": 2}
        self.instances = dict.fromkeys(NODES, 1)

    @property
    def state(self) -> Any:
        return self.day.replica.state

    async def do(self, line: Line) -> Answer:
        self.lines.append(line)
        return await self.day.do(line)

    async def ask(self, who: str, what: str, after_s: float = 0, same_id: bool = False, **body: Any) -> Answer:
        line: Line = {"who": who, "ask": what}
        if after_s:
            line["after_s"] = after_s
        if same_id:
            line["same_id"] = True
        if body:
            line["body"] = body
        return await self.do(line)

    async def operator(self, what: str, after_s: float = 0, **body: Any) -> Answer:
        return await self.ask("operator", what, after_s, **body)

    async def inside(self, name: str, after_s: float = 0, **more: Any) -> Answer:
        return await self.do({"inside": name, **({"after_s": after_s} if after_s else {}), **more})

    async def submit(self, by: str = "ada", after_s: float = 0, **more: Any) -> int:
        """Submit a job; return its number, 0 if it was refused."""
        body = {"script": SCRIPT.format(""), "time_limit_s": 600, "workdir": "/out", **more}
        if more.get("priority", 0) > DEFAULT_PRIORITY or more.get("nice", 0) < 0:  # an operator's to give
            answer = await self.ask("operator", "POST /v1/jobs", after_s, user=by, **body)
        else:
            answer = await self.ask(f"user {by}", "POST /v1/jobs", after_s, **body)
        return int(answer.body["job_id"]) if answer.status == 201 else 0

    async def configure(self, **settings: str) -> Answer:
        listed = [{"key": key, "value": value} for key, value in settings.items()]
        return await self.operator("POST /v1/configuration", settings=listed, partial=True)

    async def wait(self, seconds: float) -> None:
        """Let time pass."""
        await self.do({"after_s": seconds})

    def instant(self, seconds: float) -> str:
        """Return the instant that many seconds from now, as people write it."""
        return str(format_instant(Instant(self.day.replica.at + int(seconds * 1_000_000))))

    # Agents

    async def register(self, node: str, **more: Any) -> None:
        body = {
            "instance": f"i{self.instances[node]}",
            "storage_id": f"disk of {node}",
            "cpus": self.cpus[node],
            "process_control": "cgroup",
            "capacity_control": "project_quota" if node == "n1" else "watch",
            **more,
        }
        await self.ask(f"agent {node}", f"POST /v1/agents/{node}/register", **body)

    async def orders(self, node: str) -> list[dict[str, Any]]:
        """Return what a node's agent has to do, without writing down that it asked."""
        known = self.state.nodes.get(node)
        body = {"instance": known.instance, "wait_s": 0}
        answer = await self.day.replica.ask(f"agent {node}", "POST", f"/v1/agents/{node}/poll", body)
        return list(answer.body["orders"])

    async def order(self, job: int) -> tuple[str, dict[str, Any]] | None:
        for node in sorted(self.state.nodes):
            for order in await self.orders(node):
                if order["job"] == job:
                    return node, order
        return None

    async def report(self, job: int, result: dict[str, Any], after_s: float = 1, **changes: Any) -> bool:
        """Report on whatever is ordered for a job; False where nothing is."""
        found = await self.order(job)
        if found is None:
            return False
        node, order = found
        row = {"job": job, "attempt": order["attempt"], "stage": order["stage"], "result": result, **changes}
        await self.ask(f"agent {node}", f"POST /v1/agents/{node}/reports", after_s, reports=[row])
        return True

    async def done(self, job: int, after_s: float = 1) -> bool:
        """Have whatever is ordered for a job succeed."""
        found = await self.order(job)
        if found is not None and found[1]["stage"] == "run":
            return await self.report(job, ended() if found[1].get("started") else {"type": "started"}, after_s)
        return await self.report(job, {"type": "done", "files": 2, "size_bytes": 4096}, after_s)

    async def until(self, job: int, stage: str) -> None:
        """Have operations of a job succeed until `stage` is what it has to do."""
        for _ in range(12):
            found = await self.order(job)
            if found is not None and found[1]["stage"] == stage:
                return
            await self.done(job)

    async def clear_away(self) -> None:
        """Have all jobs end that are not over."""
        jobs = sorted(self.state.unfinished)
        rows = [{"type": "cancel_job", "job_id": job, "hurry": True} for job in jobs]
        if rows:
            await self.operator("POST /v1/commands", commands=rows)
        for job in jobs:
            await self.finish(job)

    async def finish(self, job: int) -> None:
        for _ in range(12):
            if job not in self.state.unfinished or not await self.done(job):
                return


def ended(result: JobState = JobState.COMPLETED, **more: Any) -> dict[str, Any]:
    return {"type": "ended", "result": int(result), **more}


def failed(message: str, **more: Any) -> dict[str, Any]:
    return {"type": "failed", "message": message, **more}


def receipt(stage: Stage, attempt: int, **more: Any) -> Any:
    made = TransferReceipt(stage, attempt, files=3, directories=1, size_bytes=5 << 20, written_bytes=5 << 20, **more)
    return msgspec.to_builtins(made)


def reached(stage: Stage, attempt: int, files: int) -> dict[str, Any]:
    made = TransferCheckpoint(stage, attempt, files, files << 20, 9, 9 << 20, "xxh3-128:ab")
    return {"type": "progressed", "checkpoint": msgspec.to_builtins(made)}


def asks(*directives: str) -> str:
    return SCRIPT.format("".join(f"{directive}\n" for directive in directives))


DW = asks("#DW jobdw capacity=10GiB access_mode=striped type=scratch")
STAGED = asks(
    "#DW jobdw capacity=20GiB access_mode=striped,private type=scratch",
    "#DW stage_in type=directory source=/in/%u destination=$DW_JOB_STRIPED/data",
    "#DW stage_out type=file source=$DW_JOB_STRIPED/result destination=/out/result.%j",
)
