"""Makes the requests of the recorded day: `python -m tests.contract.make_day` writes day/requests.jsonl anew.

Scenes come first, written for what chance would hardly bring about; then seeded people, operators and agents do what
comes to their minds. Agents look at their orders as the API gives them. Run it only to make another day: the recorded
one is what later trees are compared with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from forebay.replica.model.job_states import JobState
from forebay.replica.model.stages import Stage
from tests.contract.day import NODES, REQUESTS, Line
from tests.contract.maker import STAGED, Maker, asks, ended, failed, reached, receipt
from tests.contract.scenes import SCENES, drills, sessions

SEED = 20_261_122
ROUNDS = 375
USERS = ("ada", "ben", "cyd")


# Whatever comes to their minds


class Crowd:
    """Users, an operator and agents that act at random."""

    def __init__(self, maker: Maker) -> None:
        self.m = maker
        self.random = maker.random
        self.acts: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (24, self.submits), (44, self.agent_reports), (6, self.cancels), (4, self.holds), (4, self.releases),
            (3, self.suspends), (3, self.resumes), (3, self.requeues), (6, self.updates), (2, self.node_changes),
            (2, self.pool_changes), (2, self.record_changes), (2, self.asks_why), (1, self.clears), (1, self.mails),
            (1, self.restarts), (3, self.time_passes),
        ]  # fmt: skip

    async def act(self) -> None:
        weights = [weight for weight, _ in self.acts]
        await self.random.choices([act for _, act in self.acts], weights)[0]()

    def user(self) -> str:
        return self.random.choice(USERS)

    def job(self) -> int:
        """Return a job that is not over, mostly; now and then any number."""
        jobs = sorted(self.m.state.unfinished)
        return self.random.choice(jobs) if jobs and self.random.random() < 0.95 else self.random.randint(1, 400)

    def owner(self, job: int) -> str:
        known = self.m.state.jobs.get(job)
        return f"user {known.request.user}" if known is not None and self.random.random() < 0.85 else "operator"

    async def about(self, verb: str, **more: Any) -> None:
        job = self.job()
        await self.m.ask(self.owner(job), f"POST /v1/jobs/{job}/{verb}", **more)

    async def submits(self) -> None:
        chance = self.random.random
        more: dict[str, Any] = {}
        size = self.random.choice([1, 3, 8, 20, 45, 90])
        pool = self.random.choice(["", " pool=wide"])
        form = self.random.randrange(6)
        if form == 0:
            more["script"] = asks(f"#DW jobdw capacity={size}GiB access_mode=striped type=scratch{pool}")
        elif form == 1:
            more["script"] = STAGED
        elif form == 2:
            more["bb"] = f"capacity={size}GiB access=private{pool}"
        elif form == 3:
            more["bbf"] = f"#DW jobdw capacity={size}GiB access_mode=striped type=scratch{pool}\n"
        elif form == 4:
            more["script"] = asks(f"#BB capacity={size}GiB{pool}")
        more["cpus"] = self.random.choice([1, 1, 2, 4, 8])
        more["time_limit_s"] = self.random.choice([30, 120, 600, 3000])
        if chance() < 0.4:
            more["priority"] = self.random.randrange(200)
        if chance() < 0.3:
            more["account"] = self.random.choice(["physics", "optics", "biology"])
        if chance() < 0.2:
            more["qos"] = self.random.choice(["high", "strict", "few"])
        if chance() < 0.2:
            more["licenses"] = [self.random.choice(["matlab", "matlab:2", "ansys"])]
        if chance() < 0.2:
            more["partition"] = self.random.choice(["every", "small", "private", "closed"])
        if chance() < 0.1:
            more["array"] = self.random.choice(["1-3", "1-5%2", "0-8:4"])
        if chance() < 0.15:
            kind = self.random.choice(["after", "afterok", "afternotok", "afterany", "afterburstbuffer"])
            more["dependencies"] = [f"{kind}:{self.job()}"]
        if chance() < 0.1:
            more["begin_at"] = self.m.instant(self.random.randrange(5, 200))
        if chance() < 0.1:
            more["deadline"] = self.m.instant(self.random.randrange(60, 2000))
        if chance() < 0.1:
            more["hold"] = True
        if chance() < 0.1:
            more["nice"] = self.random.randrange(-20, 20)
        if chance() < 0.1:
            more["mail_types"] = [self.random.choice(["begin", "end", "fail", "requeue", "stage_out", "all"])]
        await self.m.submit(self.user(), self.random.choice([0, 0, 1, 5]), **more)

    async def agent_reports(self) -> None:
        node = self.random.choice(NODES)
        orders = await self.m.orders(node)
        if not orders:
            await self.m.wait(self.random.choice([1, 7, 30]))
            return
        rows = []
        for order in self.random.sample(orders, min(len(orders), self.random.choice([1, 1, 2]))):
            result = self.result(order)
            rows.append({"job": order["job"], "attempt": order["attempt"], "stage": order["stage"], "result": result})
        await self.m.ask(
            f"agent {node}", f"POST /v1/agents/{node}/reports", self.random.choice([1, 3, 20]), reports=rows
        )

    def result(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return what an agent says of an order: mostly that it is done."""
        chance, stage, attempt = self.random.random(), order["stage"], order["attempt"]
        if stage == "run":
            if not order.get("started"):
                return (
                    failed("the node lacks memory")
                    if chance < 0.06 and order.get("has_buffer")
                    else {"type": "started"}
                )
            if chance < 0.75:
                return ended()
            kind = self.random.choice([JobState.FAILED, JobState.TIMEOUT, JobState.NODE_FAIL])
            return ended(kind, exit_code=self.random.choice([0, 1, 139]), message=self.random.choice(["", "killed"]))
        if chance < 0.12:
            return failed(self.random.choice(["no space left", "permission denied"]), final=chance < 0.03)
        if stage not in ("stage_in", "stage_out"):
            return {"type": "done"}
        moved = Stage[stage.upper()]
        if chance < 0.25:
            return reached(moved, attempt, self.random.randrange(1, 8))
        size = self.random.randrange(1, 1 << 30)
        if chance < 0.6:
            return {
                "type": "done",
                "files": 3,
                "size_bytes": size,
                "receipt": receipt(moved, attempt, digest="blake3:ef"),
            }
        return {"type": "done", "files": self.random.randrange(9), "size_bytes": size}

    async def cancels(self) -> None:
        await self.about("cancel", **({"hurry": True} if self.random.random() < 0.3 else {}))

    async def holds(self) -> None:
        await self.about("hold")

    async def releases(self) -> None:
        held = [
            job
            for job in sorted(self.m.state.unfinished)
            if self.m.state.jobs[job].hold or self.m.state.jobs[job].stuck
        ]
        if held:
            await self.m.operator(f"POST /v1/jobs/{self.random.choice(held)}/release")
        else:
            await self.about("release")

    async def suspends(self) -> None:
        await self.on_running("suspend", "RUNNING")

    async def resumes(self) -> None:
        await self.on_running("resume", "SUSPENDED")

    async def on_running(self, verb: str, state: str) -> None:
        jobs = [job for job in sorted(self.m.state.unfinished) if self.m.state.jobs[job].state.name == state]
        if jobs:
            await self.m.operator(f"POST /v1/jobs/{self.random.choice(jobs)}/{verb}")
        else:
            await self.about(verb)

    async def requeues(self) -> None:
        await self.about("requeue")

    async def updates(self) -> None:
        changes: list[dict[str, Any]] = [
            {"priority": self.random.randrange(300)}, {"nice": self.random.randrange(9)}, {"time_limit_s": 240},
            {"bb": f"capacity={self.random.randrange(1, 50)}GiB"}, {"account": "biology"}, {"qos": "high"},
            {"partition": "small"}, {"licenses": ["ansys"]}, {"begin_at": self.m.instant(30)}, {"comment": "again"},
        ]  # fmt: skip
        change = self.random.choice(changes)
        waits = [job for job in sorted(self.m.state.unfinished) if self.m.state.jobs[job].state.name == "PENDING"]
        job = self.random.choice(waits) if waits else self.job()
        await self.m.ask(self.owner(job), f"POST /v1/jobs/{job}/update", **change)

    async def node_changes(self) -> None:
        node = self.random.choice(NODES)
        known = self.m.state.nodes[node]
        if known.down:
            await self.m.inside("mark_node_back", 5, node=node)
        elif known.drained:
            await self.m.operator(f"POST /v1/nodes/{node}/resume")
        elif self.random.random() < 0.5:
            await self.m.operator(f"POST /v1/nodes/{node}/drain", reason="looked at")
        elif self.random.random() < 0.5:
            await self.m.inside("mark_node_down", 5, node=node, reason="silent")
        else:
            self.m.instances[node] += 1
            await self.m.register(node)

    async def pool_changes(self) -> None:
        quantity = self.random.choice([60, 80, 100, 120])
        await self.m.operator("POST /v1/pools/fast/change", quantity=f"{quantity}GiB")

    async def record_changes(self) -> None:
        if self.random.random() < 0.5:
            await self.m.operator("PUT /v1/licenses/matlab", total=self.random.randrange(1, 4))
        elif self.random.random() < 0.5:
            await self.m.operator("POST /v1/usage/reset", account=self.random.choice(["physics", "biology"]))
        else:
            state = self.random.choice(["UP", "DOWN", "DRAIN"])
            await self.m.operator("PUT /v1/partitions/small", nodes="n[2-3]", max_time_s=3600, state=state)

    async def asks_why(self) -> None:
        job = self.job()
        await self.m.operator(f"GET /v1/jobs/{job}/{self.random.choice(['why', 'estimate'])}")

    async def clears(self) -> None:
        await self.about("clear", **({"discard": True} if self.random.random() < 0.5 else {}))

    async def mails(self) -> None:
        keys = sorted(self.m.state.mails)
        await self.m.inside("settle_mails", sent=keys[::2], dropped=keys[1::2])

    async def restarts(self) -> None:
        await self.m.inside("restart_operations", jobs=sorted(self.m.state.unfinished)[:5])

    async def time_passes(self) -> None:
        await self.m.wait(self.random.choice([2, 45, 300]))


async def make() -> list[Line]:
    """Return the requests of a day."""
    maker = Maker(SEED)
    for scene in SCENES:
        await scene(maker)
        await maker.clear_away()
    crowd = Crowd(maker)
    for _ in range(ROUNDS):
        await crowd.act()
    await sessions(maker)
    for back_s in (5, 0):
        await maker.inside("set_clock", back_s=back_s)
    for ahead in (0, 1):
        await maker.inside("record_state_digest", ahead=ahead)
    await drills(maker)
    for ahead in (0, 0, 1):
        await maker.inside("record_histories", ahead=ahead)
    for mark in ("none", "0123456789abcdef"):
        await maker.inside("recover_cluster", 60, mark=mark)
    await maker.submit()
    return maker.lines


def main() -> None:
    """Write the requests; what comes of them is written by the test, with FOREBAY_REWRITE_GOLDEN=1."""
    lines = asyncio.run(make())
    REQUESTS.parent.mkdir(exist_ok=True)
    REQUESTS.write_text("".join(f"{msgspec.json.encode(line).decode()}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} requests")


if __name__ == "__main__":
    main()
