"""Data mover under attack: kills, power cuts, and faults of kernel, disks and users.

Each test is a small part of scripts/transfers. An attack must first succeed against a reference mover, its negative
control.
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
"""Fixed seed: longer runs draw other calls."""


Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def attacked() -> ScriptEnded:
    """Run all attacks once; if they hang, no test repeats them."""
    return run_script("transfers", *ATTACKS, "--size", "tiny", "--seed", SEED)


@pytest.fixture
def found(attacked: ScriptEnded) -> Found:
    """Return the result of an attack; skip the test if the machine cannot run it."""

    def of(name: str) -> dict[str, Any]:
        if name in attacked.summary["left_out"]:
            pytest.skip(attacked.summary["left_out"][name])
        result: dict[str, Any] = attacked.summary["attacks"][name]
        assert "broken" not in result, attacked.said
        assert result.get("reference", "caught") == "caught", attacked.said
        return result

    return of


def test_a_killed_transfer_leaves_no_partial_destination_and_resumes(found: Found) -> None:
    assert found("kills")["deaths"] > 0


def test_a_power_cut_loses_no_completed_transfer(found: Found) -> None:
    assert found("cuts")["power_cuts"] > 0


def test_swapped_links_never_lead_outside_the_roots(found: Found) -> None:
    result = found("links")
    assert result["swaps"] > 0
    assert result["escapes"] == 0


def test_flipped_bits_are_detected_in_flight_and_at_rest(found: Found) -> None:
    assert found("bits")["flips"] > 0


def test_a_failing_system_call_is_reported_and_the_next_attempt_succeeds(found: Found) -> None:
    result = found("refusals")
    assert result["once"] + result["always"] > 0


def test_a_late_agent_never_overwrites_a_newer_attempt(found: Found) -> None:
    assert found("late")["held"] > 0


def test_full_dead_and_read_only_disks_lose_and_block_nothing(found: Found) -> None:
    assert found("disks")["dead_mount"] == 1


def test_a_moved_file_always_exists_in_one_place(found: Found) -> None:
    assert found("moves")["deaths"] > 0


def test_unusual_trees_are_moved_completely(found: Found) -> None:
    result = found("trees")
    assert result["names"]["names"] > 255
    assert result["depth"]["levels"] == 200


def test_a_killed_transfer_repeats_at_most_a_chunk_per_stream(found: Found) -> None:
    assert found("resume")["kills"] > 0


def test_a_cancelled_transfer_ends_at_once_without_leftovers(found: Found) -> None:
    result = found("endings")
    assert result["helpers"] > 0
    assert "cancelled" in result["over_after_s_max"]


def test_a_killed_agent_completes_its_transfer_after_a_restart(found: Found) -> None:
    assert found("agents")["killed with all"] > 0


def test_a_hanging_file_server_blocks_only_the_requesting_process(found: Found) -> None:
    result = found("sources")
    assert result["vanished"] > 0
    assert "left_out" in result or result["read"] > 0


def test_all_transfer_attacks_are_tested(attacked: ScriptEnded) -> None:
    assert {*attacked.summary["attacks"], *attacked.summary["left_out"]} == set(ATTACKS)
