"""Agents after a recovery or a restored snapshot: which ones register again, and which ones were replaced."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.cluster.api.nodes import _check_poll
from forebay.cluster.api.web import Problem
from forebay.cluster.schemas.agents import PollRequest
from forebay.replica.messages import Actor, ActorRole
from forebay.replica.messages import commands as c
from tests.replica.world import World

MARK = "0123456789abcdef"


def code_of(world: World, instance: str) -> str:
    """Return the problem code that a poll of node n1 gets; empty: none."""
    call: Any = SimpleNamespace(service=SimpleNamespace(controller=SimpleNamespace(state=world.state)))
    try:
        _check_poll(call, "n1", PollRequest(instance=instance, seen_revision=0))
    except Problem as problem:
        return cast(str, problem.view.code)
    return ""


@pytest.mark.parametrize("is_snapshot", [True, False])
def test_an_agent_that_restarted_after_the_backup_registers_again(is_snapshot: bool) -> None:
    world, agent = World(), Actor(ActorRole.AGENT, "n1")

    def register(instance: str) -> None:
        world.at += 1
        assert world.settle(c.RegisterNode("n1", 2, instance, "disk"), agent) == 0

    register("in-the-backup")
    assert code_of(world, "restarted") == "stale_instance"
    world.at += 1
    assert world.settle(c.RecoverCluster(MARK, "r1", ("r1",), 42, 40, is_snapshot)) == 0
    assert (code_of(world, "in-the-backup"), code_of(world, "restarted")) == ("", "unknown_node")
    register("restarted")
    assert (code_of(world, "restarted"), code_of(world, "second")) == ("", "stale_instance")
