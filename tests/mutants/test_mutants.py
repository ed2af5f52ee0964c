"""Each mutant of the table is found by the world and the seed that it names, and without one nothing is found."""

import pytest

from tests.mutants.hunts import HUNTS, hunt
from tests.mutants.planting import Mutant, PlantFailed, function_at, mutated_code, planted
from tests.mutants.table import MUTANTS

LATER_SEEDS = 8
"""Seeds after the one that is named, within which a mutant has to be found, count: another draw of randomness moves it
by a few."""


@pytest.mark.campaign(4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.sentence for mutant in MUTANTS])
def test_a_mutant_is_found_by_its_world_within_a_few_seeds_of_the_one_that_is_named(mutant: Mutant) -> None:
    with planted(mutant):
        for seed in range(mutant.seed, mutant.seed + LATER_SEEDS):
            if hunt(mutant.hunt, seed):
                return
    pytest.fail(
        f"the seeds {mutant.seed} to {mutant.seed + LATER_SEEDS - 1} of {mutant.hunt} do not find {mutant.sentence!r}; "
        f"`python -m tests.mutants --only {mutant.sentence!r} --seeds 200` says which does"
    )


HALF_HOUR = "half_hour"
"""A world whose seeds take a minute: that nothing is found in one is a test of its own (tests/simulation/test_deep)."""


@pytest.mark.campaign(4)
@pytest.mark.parametrize(
    ("world", "seed"), sorted({(mutant.hunt, mutant.seed) for mutant in MUTANTS if mutant.hunt != HALF_HOUR})
)
def test_what_finds_a_mutant_finds_nothing_in_the_product_itself(world: str, seed: int) -> None:
    assert hunt(world, seed) == ""


def test_no_two_mutants_are_the_same_and_each_has_a_world() -> None:
    assert len({mutant.sentence for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.place, mutant.new, mutant.old) for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.hunt for mutant in MUTANTS} <= set(HUNTS)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("no such text", "pass", "0 times"),
        ("raft", "raft", "times"),
        ("raft.stirred = True", "raft.stirred = (True)", "changes nothing"),
    ],
)
def test_a_mutant_whose_text_does_not_apply_any_more_says_so(old: str, new: str, said: str) -> None:
    mutant = Mutant("it does not apply", "forebay.cluster.consensus.log_replication:propose", old, new, "raft", 0)
    with pytest.raises(PlantFailed, match=said):
        mutated_code(mutant)


def test_a_mutant_is_in_the_code_for_as_long_as_it_is_entered_and_for_whoever_imported_it() -> None:
    from forebay.cluster.consensus.log_replication import on_leader_message

    mutant = next(one for one in MUTANTS if one.place.endswith(":on_leader_message"))
    sound = on_leader_message.__code__
    with planted(mutant):
        assert function_at(mutant.place) is on_leader_message and on_leader_message.__code__ is not sound
    assert on_leader_message.__code__ is sound
