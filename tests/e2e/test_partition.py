"""Network cuts, freezes and kills of real processes, with a check of the clients' histories."""

import pytest

from tests.e2e.scripts import remove_kept, run_script

FAULTS = (
    "isolate the leader from its peers",
    "the leader hears nothing",
    "the leader is not heard",
    "stop the leader",
    "kill a majority",
)
ROUNDS = 4
KILLS = 2


@pytest.mark.campaign(3)
def test_histories_stay_linearizable_under_cuts_freezes_and_kills() -> None:
    options = [word for fault in FAULTS for word in ("--fault", fault)]
    done = run_script("partition", "--rounds", str(ROUNDS), *options)
    assert done.code == 0, done.said
    assert (done.summary["rounds"], done.summary["failed"]) == (ROUNDS, 0)
    assert done.summary["objects_checked"] > 0
    assert done.summary["operations"] > ROUNDS


@pytest.mark.campaign(3)
def test_killing_leaders_under_writes_loses_and_repeats_nothing() -> None:
    done = run_script("partition", "--rounds", str(KILLS), "--leader-kills")
    assert done.code == 0, done.said
    assert (done.summary["rounds"], done.summary["failed"]) == (KILLS, 0)


@pytest.mark.campaign(3)
def test_the_partition_checks_find_stale_reads() -> None:
    done = run_script("partition", "--rounds", "3", "--fault", "isolate the leader from its peers", "--stale-reads")
    assert done.code == 1, done.said
    assert "stale: revision" in done.said or "not linearizable" in done.said
    remove_kept("partition", done.said)
