"""EIO and ENOSPC from the calls with which a running replica makes things durable."""

from tests.e2e.exercise import exercise

CASES = 4
"""Cases in CI, drawn from all of them, count."""


def test_a_replica_whose_disk_fails_stops_itself_and_its_peers_go_on() -> None:
    done = exercise("diskfault", "--cases", str(CASES))
    assert done.code == 0, done.said
    assert (done.summary["cases"], done.summary["failed"]) == (CASES, 0)
    assert done.summary["failed_calls"] >= CASES
