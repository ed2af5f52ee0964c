"""A new leader leaves operations under way alone, or restarts them with restart-policy slurm."""

from __future__ import annotations

import asyncio

import pytest

from forebay.cluster.server.operation_restart import OperationRestart
from forebay.cluster.server.pending import Answer, QueueFull, Settlement
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.values.limits import RESTARTED_MAX
from tests.replica.world import World


class Led:
    """World whose leader changes; the leader's own commands are settled at once."""

    def __init__(self, policy: str) -> None:
        self.world = World({"fast": 1000}, cpus=10_000, operations_per_stage_max=2 * RESTARTED_MAX)
        self.world.settle(c.ConfigureSite(settings=(ConfSetting("RestartPolicy", policy),), partial=True))
        self.commands: list[c.RestartOperations] = []
        self.full = 0
        self.leads = True
        self.term = 0
        self.restarting = OperationRestart(
            state=lambda: self.world.state, leads=lambda: self.leads, term=lambda: self.term, submit=self.submit
        )

    def submit(self, request: c.Request) -> Answer:
        if self.full:
            self.full -= 1
            raise QueueFull
        assert isinstance(request.command, c.RestartOperations)
        self.commands.append(request.command)
        self.world.settle(request.command, request.actor)
        answer: Answer = asyncio.get_running_loop().create_future()
        answer.set_result(Settlement(self.world.state.revision, 0, None, self.world.state, True))
        return answer

    async def lead(self, term: int) -> None:
        self.term = term
        self.restarting.poll()
        task = self.restarting._task
        if task is not None:
            await task


@pytest.mark.parametrize(("policy", "states"), [("forebay", "staging-in running"), ("slurm", "teardown running")])
def test_new_leader_restarts_operations_only_by_policy_and_never_a_script(policy: str, states: str) -> None:
    led = Led(policy)
    staging, running = led.world.submit("capacity=1"), led.world.submit("capacity=1")
    led.world.done(running)
    led.world.report(running, c.ScriptStarted())
    asyncio.run(led.lead(2))
    assert " ".join(led.world.shown(job)[2] for job in (staging, running)) == states


def test_restart_happens_once_in_a_term_and_again_in_the_next() -> None:
    led = Led("slurm")
    led.world.submit("capacity=1")

    async def story() -> None:
        await led.lead(2)
        await led.lead(2)
        assert len(led.commands) == 1
        await led.lead(3)
        assert len(led.commands) == 2
        led.leads = False
        await led.lead(4)
        assert len(led.commands) == 2

    asyncio.run(story())


def test_many_jobs_are_restarted_in_portions_and_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cluster.server.operation_restart.RETRY_S", 0.0)
    led = Led("slurm")
    jobs = [led.world.submit("capacity=1") for _ in range(RESTARTED_MAX + 1)]
    held = [job for job in jobs if led.world.state.buffers[job].state.word == "staging-in"]
    led.full = 2
    asyncio.run(led.lead(2))
    assert all(0 < len(command.jobs) <= RESTARTED_MAX for command in led.commands)
    assert {job for command in led.commands for job in command.jobs} == set(held)
