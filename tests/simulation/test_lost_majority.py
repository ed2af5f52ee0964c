"""Lost majority: recovered entries are kept, announced losses are exact, and a crash leaves no partial recovery."""

from tests.simulation.lost_majority import lose_majority

SEEDS = range(1, 5)
"""Those that every run of the tests plays; `scripts/recover --simulated N` plays more."""


def test_recovery_from_one_disk_loses_only_announced_entries() -> None:
    losses = [found for seed in SEEDS if (found := lose_majority(seed)) is not None]
    assert len(losses) >= 2
    assert sum(one.kept for one in losses) > 0 and sum(one.lost for one in losses) > 0
