"""EIO and ENOSPC from the system calls with which a running replica makes data durable."""

import pytest

from tests.e2e.scripts import remove_kept, run_script

CASES = 4
"""Number of cases in CI, drawn from all cases."""


@pytest.mark.campaign(4)
def test_a_replica_with_a_failing_disk_stops_and_its_peers_continue() -> None:
    done = run_script("diskfault", "--cases", str(CASES))
    assert done.code == 0, done.said
    assert (done.summary["cases"], done.summary["failed"]) == (CASES, 0)
    assert done.summary["failed_calls"] >= CASES
    assert done.summary["objects_checked"] > 0
    assert done.summary["operations"] > CASES


@pytest.mark.campaign(4)
def test_the_disk_fault_checks_find_stale_reads() -> None:
    # This takes a random time, because a follower lags only briefly. The run ends with the first stale read.
    done = run_script("diskfault", "--stale-reads")
    assert done.code == 1, done.said
    assert "stale: revision" in done.said or "not linearizable" in done.said
    assert done.summary["objects_checked"] == 0
    remove_kept("diskfault", done.said)
