"""The data mover under attack: killed, cut off from power, lied to by the kernel, by its disks and by its own user.

Each attack is a small share of what scripts/transfers does, and is first done to a reference mover, its negative
control, which it has to catch.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.scripts import ScriptEnded, run_script

pytestmark = pytest.mark.campaign(4, together=True)

ATTACKS = (
    "kills", "cuts", "links", "bits", "refusals", "late", "disks", "moves", "trees", "resume", "endings",
    "agents", "sources",
)  # fmt: skip
SEED = "7"
"""The same calls each time: what is drawn is the business of longer runs."""


Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def attacked() -> ScriptEnded:
    """All attacks, done once: if they do not end, no test tries them again."""
    return run_script("transfers", *ATTACKS, "--size", "tiny", "--seed", SEED)


@pytest.fixture
def found(attacked: ScriptEnded) -> Found:
    """What became of an attack; skips the test where the machine cannot do it."""

    def of(name: str) -> dict[str, Any]:
        if name in attacked.summary["left_out"]:
            pytest.skip(attacked.summary["left_out"][name])
        result: dict[str, Any] = attacked.summary["attacks"][name]
        assert "broken" not in result, attacked.said
        assert result.get("reference", "caught") == "caught", attacked.said
        return result

    return of


def test_killed_at_any_call_a_destination_is_never_partial_and_the_next_attempt_ends_right(found: Found) -> None:
    assert found("kills")["deaths"] > 0


def test_when_the_power_goes_nothing_that_was_said_to_be_done_is_lost(found: Found) -> None:
    assert found("cuts")["power_cuts"] > 0


def test_no_swapped_link_leads_out_of_the_roots(found: Found) -> None:
    result = found("links")
    assert result["swaps"] > 0
    assert result["escapes"] == 0


def test_flipped_bits_are_seen_in_flight_on_the_way_back_and_at_rest(found: Found) -> None:
    assert found("bits")["flips"] > 0


def test_a_call_that_is_refused_is_a_sentence_and_the_next_attempt_ends_right(found: Found) -> None:
    result = found("refusals")
    assert result["once"] + result["always"] > 0


def test_what_a_newer_attempt_wrote_stays_whatever_a_late_agent_does(found: Found) -> None:
    assert found("late")["held"] > 0


def test_disks_that_are_full_or_dead_or_read_only_lose_nothing_and_hang_nothing(found: Found) -> None:
    assert found("disks")["dead_mount"] == 1


def test_what_is_moved_is_never_gone_from_both_places(found: Found) -> None:
    assert found("moves")["deaths"] > 0


def test_trees_of_all_kinds_are_moved_whole(found: Found) -> None:
    result = found("trees")
    assert result["names"]["names"] > 255
    assert result["depth"]["levels"] == 200


def test_a_killed_transfer_copies_at_most_a_chunk_for_each_stream_again(found: Found) -> None:
    assert found("resume")["kills"] > 0


def test_a_cancelled_transfer_is_over_at_once_and_leaves_nothing(found: Found) -> None:
    result = found("endings")
    assert result["helpers"] > 0
    assert "cancelled" in result["over_after_s_max"]


def test_an_agent_that_is_killed_anywhere_ends_its_transfer_right_when_it_starts_again(found: Found) -> None:
    assert found("agents")["killed with all"] > 0


def test_a_file_server_that_stops_answering_hangs_nothing_but_the_process_that_asked(found: Found) -> None:
    result = found("sources")
    assert result["vanished"] > 0
    assert "left_out" in result or result["read"] > 0


def test_all_attacks_are_looked_at(attacked: ScriptEnded) -> None:
    assert {*attacked.summary["attacks"], *attacked.summary["left_out"]} == set(ATTACKS)
