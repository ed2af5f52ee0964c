"""What ends jobs and holds buffers to their capacity, as the listings of nodes and pools say it."""

from __future__ import annotations

import pytest

from forebay.cluster.api.render import capacity_controls, pool_view
from forebay.replica.messages import commands as c
from forebay.replica.model.nodes import CAPACITY_CONTROLS
from forebay.replica.model.pools import PoolUnit
from tests.replica.world import World, agent


def said(world: World, **controls: str) -> None:
    for name, capacity in controls.items():
        world.settle(c.RegisterNode(name, 8, f"again {name}", f"disk of {name}", "", "cgroup", capacity), agent(name))


@pytest.mark.parametrize("first", CAPACITY_CONTROLS)
@pytest.mark.parametrize("second", CAPACITY_CONTROLS)
def test_a_pool_says_what_is_in_force_on_any_node_of_it(first: str, second: str) -> None:
    world = World()
    said(world, n7=first, n8=second)
    known = capacity_controls(world.state)
    assert known == tuple(sorted({first, second} - {""}))
    for name, pool in world.state.pools.items():
        view = pool_view(world.state, name, 0, known)
        assert view.capacity_control == (known if pool.unit is PoolUnit.BYTES else ())
