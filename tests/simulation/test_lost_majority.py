"""A lost majority: what is left of it is kept, what is said to be lost is what is lost, and a crash leaves no half."""

from tests.simulation.lost_majority import lose_majority

SEEDS = range(1, 5)
"""Those that every run of the tests plays; `scripts/recover --simulated N` plays more."""


def test_what_one_disk_has_left_goes_on_whole_and_no_more_is_lost_than_was_said() -> None:
    losses = [found for seed in SEEDS if (found := lose_majority(seed)) is not None]
    assert len(losses) >= 2
    assert sum(one.kept for one in losses) > 0 and sum(one.lost for one in losses) > 0
