"""EIO and ENOSPC from the calls with which a running replica makes things durable."""

import pytest

from tests.e2e.scripts import remove_kept, run_script

CASES = 4
"""Cases in CI, drawn from all of them, count."""


@pytest.mark.campaign(4)
def test_a_replica_whose_disk_fails_stops_itself_and_its_peers_go_on() -> None:
    done = run_script("diskfault", "--cases", str(CASES))
    assert done.code == 0, done.said
    assert (done.summary["cases"], done.summary["failed"]) == (CASES, 0)
    assert done.summary["failed_calls"] >= CASES
    assert done.summary["objects_checked"] > 0
    assert done.summary["operations"] > CASES


@pytest.mark.campaign(4)
def test_the_checks_of_a_failing_disk_find_stale_reads() -> None:
    # Sooner or later: a follower is behind for a moment only, unless it comes back. It ends with the first one found.
    done = run_script("diskfault", "--stale-reads")
    assert done.code == 1, done.said
    assert "stale: revision" in done.said or "not linearizable" in done.said
    assert done.summary["objects_checked"] == 0
    remove_kept("diskfault", done.said)
