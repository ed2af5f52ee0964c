"""A whole cluster for half an hour of virtual time, with all limits reached."""

import pytest

from tests.simulation.world import simulate

SEED = 8
"""One that fills every bound; a campaign with scripts/simulate takes most of a minute for each."""


@pytest.mark.campaign(4)
def test_guarantees_hold_for_half_an_hour_with_full_limits() -> None:
    outcome = simulate(SEED, profile="deep")
    seen = outcome.counts
    assert outcome.violations == ()
    assert outcome.virtual_s > 30 * 60 and seen["entries"] > 2000 and outcome.acknowledged > 2000, outcome
    assert seen["journal_most"] > 500 and seen["lag_most"] > 200 and seen["installs"] and seen["elections"] > 3, seen
    assert seen["window_full"] and seen["slice_full"] and seen["snapshot_under_way"], seen
