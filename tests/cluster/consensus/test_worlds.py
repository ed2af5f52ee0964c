"""Worlds that the small ones of `test_simulation` do not reach: restless ones, and deep ones."""

import pytest

from tests.cluster.consensus import deep, restless

RESTLESS_SEEDS = 30
GROUPS = 3
DEEP_SEEDS = (1, 2, 4)
"""Each some seconds. `python -m tests.mutants` and whoever changes consensus runs more."""


@pytest.mark.campaign(3)
@pytest.mark.parametrize("group", range(GROUPS))
def test_leaders_that_come_and_go_lose_nothing_and_a_majority_is_enough_to_go_on(group: int) -> None:
    leaders = reads = 0
    for seed in range(group, RESTLESS_SEEDS, GROUPS):
        try:
            with restless.world(seed) as sim:
                leaders += len(sim.leaders)
                reads += sim.reads
        except BaseException as failure:
            failure.add_note(f"seed {seed}")
            raise
    assert leaders > 10 * (RESTLESS_SEEDS // GROUPS), "they did not come and go"
    assert reads > 0


@pytest.mark.campaign(3)
@pytest.mark.parametrize("seed", DEEP_SEEDS)
def test_with_thousands_of_entries_and_everything_full_nothing_is_lost_in_many_minutes(seed: int) -> None:
    with deep.world(seed) as world:
        seen = world.seen
    assert seen["virtual_s"] > 10 * 60 and seen["entries"] > 2000, seen
    assert seen["window full"] and seen["lag"] > 300 and seen["installs"] and seen["reads"], seen
