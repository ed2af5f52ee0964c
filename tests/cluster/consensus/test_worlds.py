"""Worlds beyond those of `test_simulation`: restless ones and deep ones."""

import pytest

from tests.cluster.consensus import deep, restless

RESTLESS_SEEDS = 30
GROUPS = 3
DEEP_SEEDS = (1, 2, 4)
"""Number of worlds, each of some seconds. `python -m tests.mutants` and developers of consensus run more."""


@pytest.mark.campaign(3)
@pytest.mark.parametrize("group", range(GROUPS))
def test_frequent_leader_changes_lose_nothing_and_a_majority_suffices(group: int) -> None:
    leaders = reads = 0
    for seed in range(group, RESTLESS_SEEDS, GROUPS):
        try:
            with restless.world(seed) as sim:
                leaders += len(sim.leaders)
                reads += sim.reads
        except BaseException as failure:
            failure.add_note(f"seed {seed}")
            raise
    assert leaders > 10 * (RESTLESS_SEEDS // GROUPS), "leaders did not change often enough"
    assert reads > 0


@pytest.mark.campaign(3)
@pytest.mark.parametrize("seed", DEEP_SEEDS)
def test_long_worlds_with_full_windows_lose_nothing(seed: int) -> None:
    with deep.world(seed) as world:
        seen = world.seen
    assert seen["virtual_s"] > 10 * 60 and seen["entries"] > 2000, seen
    assert seen["window full"] and seen["lag"] > 300 and seen["installs"] and seen["reads"], seen
